"""A checkpoint opens at any stage, on any devices: files hold each leaf whole, without padding."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from etils import epath
from flax import serialization
from flax.training import checkpoints as flax_checkpoints

import zerojax
from tests.checkpoint.states import (
    PARAMS,
    assert_holds,
    by_name,
    make_state,
    placed,
    trained,
    values,
    words,
)
from tests.conftest import make_mesh
from tests.support.reference import assert_equal_bits

MIXED = zerojax.Precision(param="bfloat16", master="float32")
LEVELS = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "gpu"))
GROUPS = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
PLACES = {
    "3 on 8": {"stage": 3, "mesh": make_mesh(8)},
    "0 on 1": {"stage": 0, "mesh": make_mesh(1)},
    "groups": {"groups": GROUPS, "mesh": LEVELS},
    "unpadded": {"stage": 3, "mesh": make_mesh(8), "pad": False},
    "on the host": {"stage": 3, "mesh": make_mesh(3), "offload": zerojax.Offload(min_bytes=0)},
}


def on_disk(path):
    """What plain Orbax reads in a checkpoint as numpy arrays, by name, in the shapes it notes."""
    handler, path = ocp.PyTreeCheckpointHandler(), epath.Path(path)
    is_leaf = lambda x: hasattr(x, "shape")
    tree = handler.metadata(path).tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), tree, is_leaf=is_leaf)
    found = by_name(handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy)))
    noted = [leaf.shape for leaf in jax.tree.leaves(tree, is_leaf=is_leaf)]
    assert noted == [np.shape(x) for x in found.values()]
    return found


def assert_same(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, want in wanted.items():
        np.testing.assert_array_equal(actual[name], want, err_msg=name)


def addresses(state):
    leaves = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float32 and x.size >= 128]
    return {s.data.unsafe_buffer_pointer() for x in leaves for s in x.addressable_shards}


def trained_in_place(state):
    """The state after a step, and in how many of its shards' memory it lies."""
    before = addresses(state)
    state = trained(state)
    return state, len(before & addresses(state))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What 7 devices trained and saved: its path, its values, and its state after another step."""
    state = trained(placed(devices=7, precision=MIXED))
    padded = {leaf.path for leaf in state.tx.plan.leaves if leaf.rest.padding}
    assert {"params/w", "opt_state/master/v", "opt_state/inner/1/v_col/w"} < padded
    found = types.SimpleNamespace(path=tmp_path_factory.mktemp("c") / "c", values=values(state))
    zerojax.save(found.path, state)
    found.after, found.reused = trained_in_place(state)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_what_7_devices_saved_opens_bit_equal_anywhere(saved, place):
    plan = zerojax.plan(make_state, precision=MIXED, **PLACES[place])
    assert plan._pads == (place not in ("0 on 1", "unpadded"))
    before = {id(x) for x in jax.live_arrays()}
    back = zerojax.restore(saved.path, plan)
    new = sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)
    assert_holds(back, saved.values, plan)
    assert new < 1.1 * sum(x.nbytes for x in jax.tree.leaves(back)), "a second copy"


def test_a_state_that_is_restored_as_it_was_trains_on(saved):
    """In place: its memory can be donated, which a file's reader keeps. A failure is silent."""
    back = zerojax.restore(saved.path, like=saved.after)
    assert_holds(back, saved.values, saved.after.tx.plan)
    back, reused = trained_in_place(back)
    assert_equal_bits(values(back), values(saved.after))
    assert reused == saved.reused > 0


def test_files_hold_leaves_whole_wherever_they_are_written(saved, tmp_path):
    """By 7 devices, by replicas, which share the writing of a shard, by one, and without a mesh."""
    path = saved.path
    assert_same(on_disk(path), saved.values)
    for place in ("groups", "0 on 1"):
        plan = zerojax.plan(make_state, precision=MIXED, **PLACES[place])
        state = zerojax.restore(path, plan)
        path = tmp_path / place
        zerojax.save(path, state)
        assert_same(on_disk(path), saved.values)
    whole = zerojax.unpad(state)
    for like in (whole, jax.eval_shape(lambda: whole)):
        back = zerojax.restore(path, like)
        assert all(x.sharding.device_set == {jax.devices()[0]} for x in jax.tree.leaves(back))
        assert_equal_bits(words(back), list(saved.values.values()))


def test_what_is_written_in_the_background_is_what_save_was_given(saved, tmp_path):
    """While the steps that follow donate it, at once: also what all devices have."""
    state, kept = zerojax.restore(saved.path, like=saved.after), {}
    with zerojax.Checkpoints(tmp_path, keep=None) as checkpoints:
        for n in range(1, 4):
            kept[n] = values(state)
            checkpoints.save(n, state)
            for _ in range(3):
                state = trained(state)
    for n, want in kept.items():
        assert_holds(zerojax.restore(tmp_path / str(n), saved.after), want, saved.after.tx.plan)


def test_each_device_reads_its_own_part(tmp_path):
    """Its devices read a leaf once between them, not once each."""
    rows = np.arange(8001.0 * 3, dtype=np.float32).reshape(8001, 3)
    plan = zerojax.plan({"params": {"w": rows}})
    zerojax.save(tmp_path / "c", plan.place({"params": {"w": rows}}), plan=plan)

    def bytes_read():
        name = "/tensorstore/kvstore/file/bytes_read"
        found = tensorstore.experimental_collect_matching_metrics(name)
        return sum(value["value"] for metric in found for value in metric["values"])

    before = bytes_read()
    back = zerojax.restore(tmp_path / "c", plan)["params"]["w"]
    assert 1.0 <= (bytes_read() - before) / rows.nbytes < 1.2
    assert [s.data.shape for s in back.addressable_shards] == [(1001, 3)] * 8


# -- others' checkpoints


def test_plain_orbax_and_flax_checkpoints_open_and_ours_opens_in_orbax(tmp_path):
    state = make_state().replace(key=None)
    plan = zerojax.plan(state, stage=3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", state)
    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    flax_checkpoints.save_checkpoint(tmp_path / "flax", state, 5)
    for path in ("plain", "managed/3", "flax/checkpoint_5"):
        back = zerojax.restore(tmp_path / path, plan)
        assert_holds(back, by_name(state), plan)
    back = serialization.from_bytes(state, serialization.to_bytes(state))
    assert_holds(plan.place(back), by_name(state), plan)
    assert zerojax.checkpoint.read_extras(tmp_path / "plain") == zerojax.checkpoint.Extras()
    zerojax.save(tmp_path / "ours", plan.place(state), step=1)
    with ocp.StandardCheckpointer() as checkpointer:
        back = checkpointer.restore(tmp_path / "ours")  # replicates what no longer divides
        whole = checkpointer.restore(tmp_path / "ours", state)
    assert_equal_bits(back["params"], PARAMS)
    assert_equal_bits(whole, state)


# -- states of other kinds


def test_a_tuple_is_saved_and_restored_by_its_plan(tmp_path):
    tx = optax.sgd(1e-2, momentum=0.9)
    state = (PARAMS, tx.init(PARAMS))
    plan = zerojax.plan(state, tx=tx)
    given = plan.place(state)
    zerojax.save(tmp_path / "c", given, plan=plan)
    with zerojax.Checkpoints(tmp_path / "many") as checkpoints:
        checkpoints.save(1, given, plan=plan)
        back, _ = checkpoints.resume(plan)
    assert_equal_bits(back, given)
    assert back[0]["w"].shape == (32, 11)
    assert_equal_bits(zerojax.restore(tmp_path / "c", state)[0], PARAMS)
    message = r"v: \[13, 33\] saved, \[13, 40\] wanted; .*or the diff.*padding.*plan as like="
    with pytest.raises(ValueError, match=message):
        zerojax.restore(tmp_path / "c", like=given)
    zerojax.save(tmp_path / "padded", given)
    with pytest.raises(ValueError, match=r"\[32, 11\] saved, \[31, 11\] wanted.*as plan="):
        zerojax.restore(tmp_path / "padded", like=plan)
    with pytest.raises(ValueError, match=r"missing from the state. Make a plan for this state"):
        zerojax.save(tmp_path / "other", {"params": PARAMS}, plan=plan)


def test_each_state_of_several_drops_its_own_padding(tmp_path):
    """One of them changed since it was placed, and has other leaves where some were padded."""
    pair = {"gen": placed(), "disc": placed(devices=5), "step": jnp.int32(3)}
    pair["new"] = pair["gen"].replace(params={"w": jnp.ones((35, 11))}, opt_state=(), key=None)
    pair["whole"] = zerojax.unpad(pair["gen"])
    zerojax.save(tmp_path / "c", pair)
    wanted = {"step": np.int32(3), "new/step": np.int32(0), "new/params/w": np.ones((35, 11))}
    for name, of in (("gen", "gen"), ("disc", "disc"), ("whole", "gen")):
        wanted |= {f"{name}/{path}": x for path, x in values(pair[of]).items()}
    assert_same(on_disk(tmp_path / "c"), wanted)
    assert_equal_bits(words(zerojax.restore(tmp_path / "c", like=pair)), words(pair))
