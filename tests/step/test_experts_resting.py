"""Steps of mixtures whose experts stay apart: the numbers of one device, wherever they rest."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.conftest import shared_with_ci
from tests.support import mixture
from tests.support.reference import assert_close, assert_equal_bits, train_state
from zerojax._plan import padding
from zerojax.checkpoint import export_safetensors

KEPT = {"expert": "experts"}
ADAM = optax.adam(1e-2, eps=1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2, eps=1e-3))
MUON = optax.contrib.muon(0.02)
TX = {"adam": ADAM, "clipped": CLIPPED, "muon": MUON}
EVEN: dict[str, Any] = {"experts": 8, "layers": 0, "width": 12, "inner": 20}
ODD: dict[str, Any] = {"experts": 7, "layers": 0, "width": 11, "inner": 19}
MODELS = {"even": EVEN, "odd": ODD, "scan": EVEN | {"layers": 3}, "odd scan": ODD | {"layers": 3}}
MODELS["wide"] = EVEN | {"width": 32, "inner": 64}
MODELS["wide scan"] = MODELS["wide"] | {"layers": 3}
MODELS["loop"] = EVEN | {"layers": 3, "in_list": True}
MESHES = {
    "4x2": ({"data": 4, "expert": 2}, None),
    "2x4": ({"data": 2, "expert": 4}, None),
    "2x2x2": ({"node": 2, "gpu": 2, "expert": 2}, ("node", "gpu")),
}
STEPS = 3


@functools.cache
def on_one_device(model: str, tx: str) -> Any:
    """The losses and norms of three steps, the first gradients, and the last parameters."""
    params, batch, optimizer = mixture.params(**MODELS[model]), mixture.batch(), TX[tx]
    opt_state, metrics, first = optimizer.init(params), [], None

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        loss, grads = jax.value_and_grad(mixture.loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        norm = optax.tree.norm(grads)
        return optax.apply_updates(params, updates), opt_state, (loss, norm), grads

    for _ in range(STEPS):
        params, opt_state, pair, grads = step(params, opt_state)
        first = grads if first is None else first
        metrics.append(pair)
    return jax.device_get((metrics, first, params))


def placed(model: str, mesh: str, stage: int, tx: Any = ADAM, **options: Any) -> Any:
    sizes, axis = MESHES[mesh]
    options = {"experts": KEPT, "axis": axis, "min_shard_size": 1} | options
    make = lambda: train_state(mixture.params(**MODELS[model]), tx)
    return zerojax.shard_train_state(make, stage, mesh=zerojax.mesh(**sizes), **options)


def trained(state: Any, **options: Any) -> tuple[list[Any], Any]:
    step, metrics = zerojax.train_step(mixture.loss, **options), []
    for _ in range(STEPS):
        state, values = step(state, mixture.batch())
        metrics.append((values["loss"], values["grad_norm"]))
    return jax.device_get(metrics), zerojax.gather_params(state)


def turns() -> list[Any]:
    stages = {"even": (0, 3), "odd": (0, 1, 2, 3), "scan": (2, 3), "odd scan": (1, 3)}
    pairs = [(model, stage) for model, each in stages.items() for stage in each]
    return [(model, [*MESHES][at % 3], stage) for at, (model, stage) in enumerate(pairs)]


@pytest.mark.parametrize(("model", "mesh", "stage"), shared_with_ci(turns()))
def test_steps_are_those_of_one_device(model, mesh, stage):
    metrics, grads, params = on_one_device(model, "adam")
    state = placed(model, mesh, stage)
    plan = state.tx.plan
    loss_and_grads = jax.jit(zerojax.value_and_grad(mixture.loss, plan))
    loss, sharded = loss_and_grads(state.params, mixture.batch())
    assert_close((loss, zerojax.gather_params(sharded, plan)), (metrics[0][0], grads), 2e-5)
    # Experts, and then the other axes from stage 3 on, share each of these arrays.
    ways = 8 if stage == 3 else MESHES[mesh][0]["expert"]
    for value in state.params["layers"]["experts"].values():
        assert value.sharding.spec["scan" in model] == "expert"
        assert value.addressable_shards[0].data.size == value.size // ways
    found, after = trained(state)
    assert_close(found, metrics, 2e-5)
    assert_close(after, params, 1e-4)


GROUPS = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
ON_HOST = zerojax.Offload(opt_state=True, params=True, min_bytes=0)
OPTIONS: list[Any] = [
    ("odd", "4x2", 3, "clipped", {}, {}),
    ("odd", "2x2x2", 1, "muon", {}, {"accumulate": 2}),
    ("odd scan", "2x4", 3, "muon", {}, {}),
    ("odd scan", "4x2", 2, "clipped", {}, {"accumulate": 2}),
    ("scan", "2x2x2", 3, "adam", {}, {"accumulate": 2, "order": "layers"}),
    ("odd scan", "4x2", 3, "adam", {"offload": ON_HOST}, {}),
    ("even", "2x2x2", 3, "adam", {"groups": GROUPS, "axis": None}, {"accumulate": 2}),
    ("odd", "2x2x2", 1, "adam", {"groups": {"opt_state": "expert"}, "axis": None}, {}),
    ("scan", "2x4", 3, "adam", {}, {"update": "backward"}),
    ("loop", "2x4", 3, "adam", {}, {"roll": True}),
]


@pytest.mark.parametrize(
    ("model", "mesh", "stage", "tx", "placing", "stepping"), shared_with_ci(OPTIONS)
)
def test_options_change_no_number(model, mesh, stage, tx, placing, stepping):
    metrics, _, params = on_one_device(model, tx)
    names = ("order", "update", "roll")
    schedule = zerojax.Schedule(**{k: v for k, v in stepping.items() if k in names})
    stepping = {k: v for k, v in stepping.items() if k not in names} | {"schedule": schedule}
    found, after = trained(placed(model, mesh, stage, TX[tx], **placing), **stepping)
    assert_close(found, metrics, 2e-5)
    assert_close(after, params, 1e-4)


MASTER = {"param": "bfloat16", "master": "float32", "compute": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "stage", "precision"),
    [
        ("odd", 1, {}),
        ("odd", 3, MASTER),
        ("wide", 3, {"moments": "int8", "gather": "int8", "reduce": "int8"}),
    ],
)
def test_precisions_are_verified(model, stage, precision):
    state = placed(model, "4x2", stage, precision=zerojax.Precision(**precision))
    result = zerojax.verify(zerojax.train_step(mixture.loss), state, mixture.batch())
    assert result.ok, str(result)


def is_expert(path: Any, _: Any) -> bool:
    return "experts" in jax.tree_util.keystr(path)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_experts_rest_as_codes(stage):
    """They are gathered as codes too, and equal what plain ZeRO does with them."""
    params = mixture.params(**MODELS["wide scan"] | {"experts": 7})
    frozen = jax.tree.map_with_path(is_expert, params)
    state = train_state(params, optax.selective_transform(ADAM, freeze_mask=frozen))
    results = []
    ways: list[dict[str, Any]] = [{"experts": KEPT}, {"axis": ("data", "expert")}]
    for options in ways:
        coded = zerojax.quantize(state, where="up|down")
        mesh = zerojax.mesh(data=4, expert=2)
        coded = zerojax.shard_train_state(coded, stage, mesh=mesh, **options)
        results.append(trained(coded))
    assert_close(results[0], results[1], 1e-5)


def test_beside_sequences_and_an_axis_of_the_users_own():
    metrics, _, params = on_one_device("odd", "adam")
    mesh = zerojax.mesh(data=2, sequence=2, expert=2)
    how = zerojax.Sequences(most_gathered=math.inf)
    state = train_state(mixture.params(**ODD), ADAM)
    state = zerojax.shard_train_state(
        state, mesh=mesh, experts=KEPT, sequence=how, min_shard_size=1
    )
    assert_close(trained(state), (metrics, params), 1e-4)
    metrics, _, params = on_one_device("even", "adam")
    mesh = zerojax.mesh(data=2, expert=2, tensor=2)
    start = mixture.params(**EVEN)
    up = start["layers"]["experts"]["up"]
    over = jax.sharding.NamedSharding(mesh, P(None, None, "tensor"))
    start["layers"]["experts"]["up"] = jax.device_put(up, over)
    state = zerojax.shard_train_state(
        train_state(start, ADAM), mesh=mesh, experts=KEPT, axis="data", min_shard_size=1
    )
    assert state.params["layers"]["experts"]["up"].sharding.spec == P("expert", "data", "tensor")
    assert_close(trained(state), (metrics, params), 1e-4)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_open_on_other_sizes_of_the_axis(stage, tmp_path):
    state = placed("odd scan", "4x2", stage)
    step = zerojax.train_step(mixture.loss)
    state, _ = step(state, mixture.batch())
    zerojax.save(tmp_path / "kept", state)
    saved = jax.device_get((zerojax.gather_params(state), zerojax.unpad(state).opt_state))
    plain = {"experts": None, "axis": ("data", "expert")}
    places: list[Any] = [("2x4", {}), ("4x2", plain), ("2x2x2", {})]
    for mesh, options in places:
        like = placed("odd scan", mesh, 4 - stage, **options)
        back = zerojax.restore(tmp_path / "kept", like=like)
        assert_equal_bits((zerojax.gather_params(back), zerojax.unpad(back).opt_state), saved)
    zerojax.save(tmp_path / "plain", placed("odd scan", "4x2", 3, **plain))
    back = zerojax.restore(tmp_path / "plain", like=placed("odd scan", "2x4", stage))
    assert_equal_bits(zerojax.gather_params(back), mixture.params(**MODELS["odd scan"]))
    export_safetensors(tmp_path / "files", back)
    (file,) = (tmp_path / "files").glob("*.safetensors")
    arrays = safetensors.numpy.load(file.read_bytes())
    assert arrays["layers.experts.up"].shape == (3, 7, 11, 19)


def test_a_module_shows_its_experts_whole():
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.params = nnx.data(jax.tree.map(nnx.Param, mixture.params(**ODD)))

    def loss(net: Net, batch: Any) -> jax.Array:
        layers = net.params["layers"]
        layer = {name: layers[name][...] for name in ("mix", "router")}
        layer["experts"] = {name: value[...] for name, value in layers["experts"].items()}
        return mixture.loss({"embed": net.params["embed"][...], "layers": layer}, batch)

    metrics, *_ = on_one_device("odd", "adam")
    net = Net()
    optimizer = nnx.Optimizer(net, ADAM, wrt=nnx.Param)
    mesh = zerojax.mesh(data=4, expert=2)
    zerojax.nnx.shard(net, optimizer, mesh=mesh, experts=KEPT, min_shard_size=1)
    step = zerojax.nnx.train_step(loss)
    found = [step(net, optimizer, mixture.batch()) for _ in range(STEPS)]
    assert_close([(m["loss"], m["grad_norm"]) for m in found], metrics, 2e-5)
    up = net.params["layers"]["experts"]["up"]
    assert up.shape == (7, 11, 19)
    assert up.get_raw_value().addressable_shards[0].data.shape == (4, 11, 5)


def test_a_plan_says_where_experts_are(capsys, monkeypatch):
    monkeypatch.setattr(padding, "_WARNED", [])
    why = "because 2 devices do not divide 7 and 4 devices do not divide 19"
    with pytest.warns(UserWarning, match=why):
        plan = placed("odd", "4x2", 3).tx.plan
    assert "; experts over expert" in str(plan)
    assert "[8, 11, 20]  (expert, ·, data)" in str(plan)
    plan.show("params/layers/experts/up")
    said = capsys.readouterr().out
    assert "[4:7, :, 15:19]  device 7" in said and "replicated" not in said


def test_backward_does_not_update_experts():
    start = {"layers": {"experts": mixture.params(**MODELS["scan"])["layers"]["experts"]}}
    state = zerojax.shard_train_state(
        train_state(start, ADAM), mesh=zerojax.mesh(data=4, expert=2), experts=KEPT
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        layers = params["layers"]["experts"]
        turn = lambda x, p: (x + jnp.mean(p["up"]) + jnp.mean(p["bias"] + p["down"].sum(-1)), None)
        return jnp.mean(jax.lax.scan(turn, batch["y"], layers)[0])

    step = zerojax.train_step(loss, schedule=zerojax.Schedule(update="backward"))
    with pytest.raises(ValueError, match=r"its experts are apart\).*Pass Schedule"):
        step(state, mixture.batch())
