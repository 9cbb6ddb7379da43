"""Steps of mixtures whose experts stay apart: the numbers of one device, wherever they rest."""

import functools
from typing import Any

import jax
import optax
import pytest

import zerojax
from tests.support import mixture
from tests.support.reference import assert_close, train_state

KEPT = {"expert": "experts"}
ADAM = optax.adam(1e-2, eps=1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2, eps=1e-3))
MUON = optax.contrib.muon(0.02)
TX = {"adam": ADAM, "clipped": CLIPPED, "muon": MUON}
EVEN: dict[str, Any] = {"experts": 8, "layers": 0, "width": 12, "inner": 20}
ODD: dict[str, Any] = {"experts": 7, "layers": 0, "width": 11, "inner": 19}
MODELS = {"even": EVEN, "odd": ODD, "scan": EVEN | {"layers": 3}, "odd scan": ODD | {"layers": 3}}
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
    state = train_state(mixture.params(**MODELS[model]), tx)
    return zerojax.shard_train_state(state, stage, mesh=zerojax.mesh(**sizes), **options)


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


@pytest.mark.parametrize(("model", "mesh", "stage"), turns())
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


INT8 = zerojax.Precision(moments="int8")
GROUPS = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
ON_HOST = zerojax.Offload(opt_state=True, params=True, min_bytes=0)


@pytest.mark.parametrize(
    ("model", "mesh", "stage", "tx", "placing", "stepping"),
    [
        ("odd", "4x2", 3, "clipped", {}, {}),
        ("odd", "2x2x2", 1, "muon", {}, {"accumulate": 2}),
        ("odd scan", "2x4", 3, "muon", {}, {}),
        ("odd scan", "4x2", 2, "clipped", {}, {"accumulate": 2}),
        ("scan", "2x2x2", 3, "adam", {}, {"accumulate": 2, "order": "layers"}),
        ("odd scan", "4x2", 3, "adam", {"offload": ON_HOST}, {}),
        ("even", "2x2x2", 3, "adam", {"groups": GROUPS, "axis": None}, {"accumulate": 2}),
        ("odd", "2x2x2", 1, "adam", {"groups": {"opt_state": "expert"}, "axis": None}, {}),
        ("scan", "2x4", 3, "clipped", {}, {"update": "backward"}),
        ("loop", "2x4", 3, "adam", {}, {"roll": True}),
    ],
)
def test_options_change_no_number(model, mesh, stage, tx, placing, stepping):
    metrics, _, params = on_one_device(model, tx)
    names = ("order", "update", "roll")
    schedule = zerojax.Schedule(**{k: v for k, v in stepping.items() if k in names})
    stepping = {k: v for k, v in stepping.items() if k not in names} | {"schedule": schedule}
    found, after = trained(placed(model, mesh, stage, TX[tx], **placing), **stepping)
    assert_close(found, metrics, 2e-5)
    assert_close(after, params, 1e-4)
