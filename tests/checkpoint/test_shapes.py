"""Leaves that rest padded: files hold their logical shapes, and any devices open them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from safetensors.numpy import load_file

import zerojax
import zerojax.nnx
from tests.checkpoint.states import words
from tests.conftest import make_mesh
from tests.processes import completed
from tests.reference import assert_equal_bits
from zerojax._checkpoint import shapes as _shapes
from zerojax._plan.padding import padded_shapes
from zerojax._state.state import leaves_with_paths

# No number of devices from 2 to 8 divides a dimension of `w`. The 33 columns of `v` end on the
# seventh of 8 devices: the last one has nothing but padding.
SHAPES = {"w": (31, 11), "v": (13, 33), "scale": (3,)}


def make_params():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    pairs = zip(SHAPES.items(), keys, strict=True)
    return {name: 1 + jax.random.uniform(key, shape) for (name, shape), key in pairs}


def make_state(tx=None):
    return TrainState.create(apply_fn=None, params=make_params(), tx=tx or optax.adam(1e-2))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2) + jnp.mean(params["v"] ** 2) + params["scale"].sum()


def trained(state, devices):
    step = zerojax.train_step(loss_fn)
    batch = np.random.default_rng(0).normal(size=(devices * 2, 31)).astype(np.float32)
    return jax.block_until_ready(step(state, batch)[0])


def grid(*shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, ("node", "gpu")[-len(shape) :])


def logical(state):
    """The values of a placed state on the host by name, without what its plan says is padding."""
    plan = state.tx.plan
    pairs = zip(words(state), plan.leaves, strict=True)
    return {leaf.path: np.asarray(x)[tuple(map(slice, leaf.shape))] for x, leaf in pairs}


def on_disk(path):
    """What plain Orbax finds in a checkpoint and reads as numpy arrays, by name."""
    handler, path = ocp.PyTreeCheckpointHandler(), epath.Path(path)
    is_leaf = lambda x: hasattr(x, "shape")
    tree = handler.metadata(path).tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), tree, is_leaf=is_leaf)
    values = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    found = {leaf.name: leaf.value for leaf in leaves_with_paths(values)}
    noted = [leaf.shape for leaf in jax.tree.leaves(tree, is_leaf=is_leaf)]
    assert noted == [np.shape(x) for x in found.values()]
    return found


def assert_same(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, want in wanted.items():
        np.testing.assert_array_equal(actual[name], want, err_msg=name)


def assert_holds(state, want):
    """Its logical values are those wanted, its shapes those of its plan, its padding zero."""
    plan = state.tx.plan
    assert [x.shape for x in jax.tree.leaves(state)] == [x.padded_shape for x in plan.leaves]
    assert_same(logical(state), want)
    for value, leaf in zip(jax.tree.leaves(state), plan.leaves, strict=True):
        full = np.array(value)
        full[tuple(map(slice, leaf.shape))] = 0
        assert not full.any(), leaf.path
        assert value.sharding.is_equivalent_to(leaf.rest.sharding(plan.mesh), value.ndim)


GROUPS = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
PLACES = {
    "3 on 8": {"stage": 3, "mesh": make_mesh(8)},
    "2 on 5": {"stage": 2, "mesh": make_mesh(5)},
    "1 on 3": {"stage": 1, "mesh": make_mesh(3)},
    "3 on 1": {"stage": 3, "mesh": make_mesh(1)},
    "(2, 3)": {"mesh": grid(2, 3), "groups": GROUPS},
    "(2, 4)": {"mesh": grid(2, 4), "groups": GROUPS},
    "unpadded": {"stage": 3, "mesh": make_mesh(8), "pad": False},
}


@pytest.fixture(scope="module", params=["adam", "adafactor", "masters"])
def saved(request, tmp_path_factory):
    """A state that 7 devices trained and saved: its maker, options, values and path."""
    options = {}
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    tx = optax.adam(1e-2) if request.param != "adafactor" else tx
    if request.param == "masters":
        options = {"precision": zerojax.Precision(param="bfloat16", master="float32")}
    make = functools.partial(make_state, tx)
    state = zerojax.shard_train_state(make, mesh=make_mesh(7), **options)
    state = trained(state, 7)
    padded = [leaf.path for leaf in state.tx.plan.leaves if leaf.rest.padding]
    assert {"params/w", "params/v"} < set(padded) and any("opt_state" in path for path in padded)
    path = tmp_path_factory.mktemp(request.param) / "c"
    zerojax.save(path, state)
    return make, options, state, path


def test_plain_orbax_reads_logical_shapes_and_values(saved):
    _, _, state, path = saved
    assert_same(on_disk(path), logical(state))


@pytest.mark.parametrize("place", PLACES)
def test_what_7_devices_saved_opens_bit_equal_anywhere(saved, place):
    make, options, state, path = saved
    plan = zerojax.plan(make, **PLACES[place], **options)
    assert plan.pads == (place not in ("3 on 1", "unpadded"))
    assert_holds(zerojax.restore(path, plan), logical(state))


def test_fewer_and_fewer_devices_pass_a_state_on(saved, tmp_path):
    """As a run of 400 GPUs is moved to 384, to one host, to a notebook."""
    make, options, state, _ = saved
    wanted = logical(state)
    for devices in (6, 3, 1):
        path = tmp_path / f"for {devices}"
        zerojax.save(path, state)
        plan = zerojax.plan(make, mesh=make_mesh(devices), **options)
        state = zerojax.restore(path, plan)
    assert_holds(state, wanted)


def test_a_placed_state_is_restored_as_it_was(saved):
    _, _, state, path = saved
    back = zerojax.restore(path, like=state)
    assert_equal_bits(words(back), words(state))
    assert back.tx.plan == state.tx.plan
    assert_equal_bits(trained(back, 7), trained(state, 7))


@pytest.mark.parametrize("place", ["(2, 3)", "1 on 3"])
def test_replicas_and_groups_save_logical_shapes_too(tmp_path, place):
    """Replicas share the writing of a shard, in smaller chunks."""
    state = zerojax.shard_train_state(make_state, **PLACES[place])
    zerojax.save(tmp_path / "c", state)
    assert_same(on_disk(tmp_path / "c"), logical(state))
    assert_holds(zerojax.restore(tmp_path / "c", zerojax.plan(make_state)), logical(state))


@pytest.mark.gpu_code
def test_plans_of_many_devices_ask_files_for_the_same_shapes():
    params = {"w": jax.ShapeDtypeStruct((50257, 1021), "float32")}
    rests = {}
    for count in (400, 384):
        plan = zerojax.plan({"params": params}, mesh=zerojax.aot.mesh(f"{count}xH100"))
        rests[count] = plan.abstract()["params"]["w"].shape
        assert padded_shapes(plan.abstract(), plan) == {"params/w": (50257, 1021)}
    assert rests == {400: (50400, 1021), 384: (50304, 1021)}


def test_orbax_without_a_target_restores_what_no_longer_divides_replicated(tmp_path):
    state = zerojax.shard_train_state(make_state)
    zerojax.save(tmp_path / "c", state)
    with ocp.StandardCheckpointer() as checkpointer:
        back = checkpointer.restore(tmp_path / "c")
    assert_equal_bits(back["params"], make_params())
    assert back["params"]["w"].sharding.is_fully_replicated


def test_the_file_has_no_chunk_of_nothing_but_padding(tmp_path):
    """`v` has 33 columns in shards of 5: the last of 8 devices has none of them."""
    zerojax.save(tmp_path / "c", zerojax.shard_train_state(make_state))
    base = {"driver": "file", "path": f"{tmp_path}/c/"}
    store = _shapes.ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = {key.decode() for key in store.list().result()}
    assert {key for key in keys if key.startswith("params.v/")} == {
        "params.v/.zarray",
        *[f"params.v/0.{i}" for i in range(7)],
    }
    assert sum(key.startswith("params.w/") for key in keys) == 9  # 31 rows on 8 devices, and header


def test_each_device_reads_its_own_part(tmp_path):
    """Its devices read a leaf once between them, not once each."""
    rows = jnp.arange(8001.0 * 3).reshape(8001, 3)
    plan = zerojax.plan({"params": {"w": rows}})
    zerojax.save(tmp_path / "c", plan.place({"params": {"w": rows}}), plan=plan)
    metrics = _shapes.ts.experimental_collect_matching_metrics

    def bytes_read():
        found = metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for metric in found for value in metric["values"])

    before = bytes_read()
    back = zerojax.restore(tmp_path / "c", plan)["params"]["w"]
    assert 1.0 <= (bytes_read() - before) / rows.nbytes < 1.2
    assert [s.data.shape for s in back.addressable_shards] == [(1001, 3)] * 8


# -- states of other kinds


def test_a_tuple_is_saved_and_restored_by_its_plan(tmp_path):
    params = make_params()
    plan = zerojax.plan((params, optax.adam(1e-2).init(params)), tx=optax.adam(1e-2))
    placed = plan.place((params, optax.adam(1e-2).init(params)))
    zerojax.save(tmp_path / "c", placed, plan=plan)
    with zerojax.Checkpoints(tmp_path / "many") as checkpoints:
        checkpoints.save(1, placed, plan=plan)
        back, _ = checkpoints.resume(plan)
    assert_equal_bits(back, placed)
    assert back[0]["w"].shape == (32, 11)
    whole = zerojax.restore(tmp_path / "c", (params, optax.adam(1e-2).init(params)))
    assert_equal_bits(whole[0], params)


def test_a_tuple_without_its_plan_is_told_of_padding(tmp_path):
    state = (make_params(), ())
    plan = zerojax.plan(state)
    placed = plan.place(state)
    zerojax.save(tmp_path / "c", placed, plan=plan)
    message = (
        r"0/v: \[13, 33\] saved, \[13, 40\] wanted; 0/w: \[31, 11\] saved, \[32, 11\] wanted "
        r"\(keep=.*; or padding makes the difference.*pass that as like="
    )
    with pytest.raises(ValueError, match=message):
        zerojax.restore(tmp_path / "c", like=placed)
    zerojax.save(tmp_path / "padded", placed)
    with pytest.raises(ValueError, match=r"\[32, 11\] saved, \[31, 11\] wanted.*it as plan="):
        zerojax.restore(tmp_path / "padded", like=plan)
    with pytest.raises(ValueError, match=r"missing from the state. Make a plan for this state"):
        zerojax.save(tmp_path / "other", {"params": state[0]}, plan=plan)
    with pytest.raises(TypeError, match=r"plan= takes a plan, got"):
        zerojax.save(tmp_path / "other", placed, plan=3)
    assert not (tmp_path / "other").exists()


def test_each_state_of_several_drops_its_own_padding(tmp_path):
    pair = {"gen": zerojax.shard_train_state(make_state), "step": jnp.int32(3)}
    pair["disc"] = zerojax.shard_train_state(make_state, mesh=make_mesh(5))
    zerojax.save(tmp_path / "c", pair)
    assert_same(
        on_disk(tmp_path / "c"),
        {"step": np.int32(3)}
        | {
            f"{name}/{path}": x
            for name in ("gen", "disc")
            for path, x in logical(pair[name]).items()
        },
    )
    back = zerojax.restore(tmp_path / "c", like=pair)
    assert_equal_bits(jax.tree.leaves(back), jax.tree.leaves(pair))


def test_a_state_that_changed_since_it_was_placed_is_saved_as_it_is(tmp_path):
    state = zerojax.shard_train_state(make_state)
    whole = zerojax.logical(state)
    other = state.replace(params={"new": jnp.ones((32, 11))}, opt_state=())
    for name, changed in (("whole", whole), ("other", other)):
        zerojax.save(tmp_path / name, changed)
        want = {leaf.name: leaf.value for leaf in leaves_with_paths(changed)}
        assert_same(on_disk(tmp_path / name), want)
    assert_equal_bits(words(zerojax.restore(tmp_path / "whole", like=whole)), words(whole))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(31, 11, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def nnx_state(devices, **options):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, mesh=make_mesh(devices), **options)
    return model, optimizer


def test_an_nnx_model_crosses_device_counts(tmp_path):
    state = zerojax.nnx.state(*nnx_state(7))
    assert state.params["layer"]["kernel"].shape == (35, 11)
    zerojax.save(tmp_path / "c", state)
    model, optimizer = nnx_state(8)
    back = zerojax.restore(tmp_path / "c", zerojax.nnx.state(model, optimizer))
    assert back.params["layer"]["kernel"].shape == (32, 11)
    assert_equal_bits(zerojax.gather_params(back), zerojax.gather_params(state))
    assert on_disk(tmp_path / "c")["opt_state/0/mu/layer/kernel"].shape == (31, 11)


# -- loops and several processes


def test_a_loop_that_writes_in_the_background_saves_logical_shapes(tmp_path):
    state, kept = zerojax.shard_train_state(make_state, mesh=make_mesh(7)), {}
    with zerojax.Checkpoints(tmp_path, keep=None) as checkpoints:
        for n in range(1, 4):
            state = trained(state, 7)
            kept[n] = logical(state)
            checkpoints.save(n, state)
    for n, want in kept.items():
        assert_same(on_disk(tmp_path / str(n) / "default"), want)
        assert_holds(zerojax.restore(tmp_path / str(n), zerojax.plan(make_state)), want)
    with zerojax.Checkpoints(tmp_path) as checkpoints:
        back, extras = checkpoints.resume(zerojax.plan(make_state, mesh=make_mesh(5)))
    assert extras.step == 3
    assert_holds(back, kept[3])


def test_processes_save_and_restore_logical_shapes(tmp_path):
    """Two processes of four devices pad 260 to 264, of eight to 272."""

    def run(name, devices):
        options = {"directory": tmp_path / "c", "steps": 2, "dim": 65, "devices": devices}
        pairs = [(f"--{key}", value) for key, value in options.items()]
        arguments = [x for pair in pairs for x in pair]
        ended = completed(2, tmp_path / f"{name} logs", *arguments, "--export", tmp_path / name)
        return ended.said(r"^from (\d+)"), load_file(next((tmp_path / name).glob("*.safetensors")))

    started, eight = run("eight", 4)
    restarted, sixteen = run("sixteen", 8)
    assert (started, restarted) == ("0", "2")
    found = on_disk(tmp_path / "c" / "2" / "default")
    up, down = found["params/layers/w1"], found["params/layers/w2"]
    assert (up.shape, down.shape) == ((2, 65, 260), (2, 260, 65))
    layers = {f"layers.{n}.up": up[n].T for n in range(2)}  # the names that they export by
    layers |= {f"layers.{n}.down": down[n] for n in range(2)}
    assert_same(layers | {"bias": found["params/bias"]}, eight)
    assert_same(sixteen, eight)
    assert found["opt_state/0/mu/layers/w2"].shape == (2, 260, 65)


# -- safetensors


@pytest.mark.parametrize("given", ["state", "params", "tuple"])
def test_safetensors_hold_logical_shapes(tmp_path, given):
    state = zerojax.shard_train_state(make_state)
    tree = {"state": state, "params": state.params, "tuple": (state.params, ())}[given]
    plan = None if given == "state" else state.tx.plan
    zerojax.export_safetensors(tmp_path / "c", tree, plan=plan)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    assert_equal_bits(load_file(file), make_params())
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in make_params().values())


def test_safetensors_are_read_into_padded_shards(tmp_path):
    zerojax.export_safetensors(tmp_path / "c", make_params())
    state = zerojax.shard_train_state(make_state)
    tupled = zerojax.plan((make_params(), ()))
    for like in (zerojax.plan(make_state), state, tupled):
        params = zerojax.import_safetensors(tmp_path / "c", like=like)
        assert_equal_bits(params, state.params)
        assert [s.data.shape for s in params["v"].addressable_shards] == [(13, 5)] * 8
    with pytest.raises(ValueError, match=r"v: \[13, 33\] saved, \[13, 40\] wanted.*like="):
        zerojax.import_safetensors(tmp_path / "c", like=state.params)
    with pytest.raises(ValueError, match=r"params/scale is missing from the state"):
        zerojax.export_safetensors(tmp_path / "d", {"w": state.params["w"]}, plan=tupled)
