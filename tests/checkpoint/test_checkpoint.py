"""Checkpoints: the same tree at every stage, strict borders, bytes accounted for."""

import errno
import fcntl
import itertools
import json
import os
import pathlib
import pickle
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import serialization, struct
from flax.training import checkpoints as flax_checkpoints
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import make_mesh
from tests.reference import assert_equal_bits
from zerojax._checkpoint import files as _files

PLACES = list(itertools.product((0, 1, 2, 3), (1, 2, 4, 8)))


class State(TrainState):
    key: jax.Array = struct.field(default=None)  # type: ignore[assignment]


def make_state(width=64):
    k1, k2 = jax.random.split(jax.random.key(0))
    params = {
        "layer": {"w": jax.random.normal(k1, (16, width)), "b": jnp.zeros(width)},
        "head": [jax.random.normal(k2, (width, 8), jnp.bfloat16)],
    }
    mask = {"layer": {"w": True, "b": False}, "head": [True]}
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.add_decayed_weights(0.1), mask),
        optax.adam(1e-2),
    )
    return State.create(apply_fn=None, params=params, tx=tx, key=jax.random.key(7))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["layer"]["w"] + params["layer"]["b"])
    return jnp.mean((hidden @ params["head"][0].astype(jnp.float32)) ** 2)


BATCH = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def place(stage=3, devices=8, make=make_state):
    return zerojax.shard_train_state(make, stage, mesh=make_mesh(devices))


def plan_of(stage, devices, make=make_state):
    return zerojax.plan(make, stage=stage, mesh=make_mesh(devices))


def words(tree):
    """The leaves as comparable arrays; of keys, their words."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]


def trained(state, steps=2):
    step = zerojax.train_step(loss_fn)
    for _ in range(steps):
        state, _ = jax.block_until_ready(step(state, BATCH))
    return state


def check_crossing(tmp_path, written, read):
    state = trained(place(*written))
    want = words(jax.device_get(words(state)))
    zerojax.save(tmp_path / "c", state)
    for stage, devices in read:
        plan = plan_of(stage, devices)
        back = zerojax.restore(tmp_path / "c", plan)
        assert_equal_bits(words(back), want)
        places = [leaf.sharding for leaf in jax.tree.leaves(back)]
        pairs = zip(places, jax.tree.leaves(back), plan.shardings, strict=True)
        assert all(have.is_equivalent_to(wants, x.ndim) for have, x, wants in pairs)
        assert jax.tree.structure(back) == jax.tree.structure(plan.abstract())
        if (stage, devices) == written:
            assert_equal_bits(words(trained(back)), words(trained(state)))


@pytest.mark.parametrize("written", [(0, 1), (1, 4), (2, 2), (3, 8)])
def test_a_state_opens_at_other_stages_and_device_counts(tmp_path, written):
    check_crossing(tmp_path, written, [(0, 1), (3, 2), (1, 8), written])


@pytest.mark.slow
@pytest.mark.parametrize("written", PLACES)
def test_every_stage_and_device_count_opens_at_every_other(tmp_path, written):
    check_crossing(tmp_path, written, PLACES)


def test_like_may_be_a_placed_an_unplaced_or_an_abstract_state(tmp_path):
    state = trained(place())
    zerojax.save(tmp_path / "c", state)
    placed = zerojax.restore(tmp_path / "c", state)
    assert placed.params["layer"]["w"].sharding == state.params["layer"]["w"].sharding
    for like in (make_state(), jax.eval_shape(make_state)):
        whole = zerojax.restore(tmp_path / "c", like)
        assert {x.sharding.device_set.pop() for x in jax.tree.leaves(whole)} == {jax.devices()[0]}
        assert_equal_bits(words(whole), words(placed))
    assert zerojax.train_step(loss_fn)(placed, BATCH)  # it carries the plan


def test_a_restored_state_donates_like_a_fresh_one(tmp_path):
    """The step's output must lie where its input lay: a failed donation is silent."""

    def reused(state):
        before = addresses(state)
        after = addresses(zerojax.train_step(loss_fn)(state, BATCH)[0])
        return len(before & after)

    def addresses(state):
        leaves = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float32 and x.size >= 512]
        return {s.data.unsafe_buffer_pointer() for x in leaves for s in x.addressable_shards}

    fresh = trained(place(), 1)
    zerojax.save(tmp_path / "c", fresh)
    again = zerojax.restore(tmp_path / "c", plan_of(3, 8))
    assert reused(fresh) == reused(again) > 0


def test_a_restore_leaves_no_second_copy_behind(tmp_path):
    zerojax.save(tmp_path / "c", place())
    before = {id(x) for x in jax.live_arrays()}
    back = zerojax.restore(tmp_path / "c", plan_of(3, 8))
    new = [x for x in jax.live_arrays() if id(x) not in before]
    assert sum(x.nbytes for x in new if x.nbytes > 64) == sum(
        x.nbytes for x in jax.tree.leaves(back) if x.nbytes > 64
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_saving_does_not_race_donation(tmp_path, stage):
    plan = plan_of(stage, 8)
    state = plan.place(make_state())
    step = zerojax.train_step(loss_fn)
    with zerojax.Checkpoints(tmp_path, keep=None) as checkpoints:
        saved = {}
        for n in range(1, 5):
            saved[n] = jax.device_get(words(state))
            checkpoints.save(n, state, force=True)
            for _ in range(3):  # donates what is being written, at once
                state, _ = jax.block_until_ready(step(state, BATCH))
        checkpoints.wait()
    for n, want in saved.items():
        assert_equal_bits(words(zerojax.restore(tmp_path / str(n), plan)), want)


# -- what travels along


def test_step_rng_data_and_metadata_travel_along(tmp_path):
    class Iterator:
        def get_state(self):
            return b"\x00at 12"

    metadata = {"run": "a", "lr": 1e-3, "shape": (2, [3]), "mean": np.arange(3, dtype=np.float16)}
    rng = jax.random.key(3, impl="rbg")
    zerojax.save(
        tmp_path / "c", place(), step=12, rng=rng, data=Iterator(), metadata=metadata
    )  # fmt: skip
    extras = zerojax.read_extras(tmp_path / "c")
    assert (extras.step, extras.data) == (12, b"\x00at 12")
    assert extras.rng.dtype == rng.dtype
    assert_equal_bits(words([extras.rng]), words([rng]))
    mean = extras.metadata.pop("mean")
    assert extras.metadata == {"run": "a", "lr": 1e-3, "shape": (2, [3])}
    assert mean.dtype == np.float16 and mean.tolist() == [0, 1, 2]


def test_extras_that_are_not_data_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"metadata/model is a function.*Make it numbers, strings"):
        zerojax.save(tmp_path / "c", place(), metadata={"model": loss_fn})
    with pytest.raises(TypeError, match=r"metadata/a is a dict with the keys \[1\]"):
        zerojax.save(tmp_path / "c", place(), metadata={"a": {1: 2}})


# -- strict by default, and how to allow it


def test_a_missing_leaf_is_an_error_that_names_it(tmp_path):
    state = {"params": {"a": jnp.ones((8, 8))}}
    more = {"params": {"a": jnp.zeros((8, 8)), "b": jnp.full(3, 5.0)}}
    zerojax.save(tmp_path / "c", state)
    with pytest.raises(ValueError, match=r"not in the checkpoint: params/b \(keep=<path regex>"):
        zerojax.restore(tmp_path / "c", more)
    back = zerojax.restore(tmp_path / "c", more, keep="params/b$")
    assert back["params"]["a"].sum() == 64 and back["params"]["b"].sum() == 15
    with pytest.raises(ValueError, match=r"no value for it, only a shape. Give a placed state"):
        zerojax.restore(tmp_path / "c", jax.eval_shape(lambda: more), keep="b$")
    with pytest.raises(ValueError, match=r"keep='\(' is no regular expression.*Escape"):
        zerojax.restore(tmp_path / "c", more, keep="(")


def test_an_extra_leaf_is_an_error_that_names_it(tmp_path):
    zerojax.save(tmp_path / "c", place())
    like = {"params": make_state().params}
    with pytest.raises(ValueError, match=r"only in the checkpoint: .* and \d+ more \(ignore=<path"):
        zerojax.restore(tmp_path / "c", like)
    back = zerojax.restore(tmp_path / "c", like, ignore="^(opt_state|step|key)")
    assert_equal_bits(back, like)


def test_a_reshaped_leaf_is_an_error_that_names_it(tmp_path):
    zerojax.save(tmp_path / "c", {"params": {"w": jnp.ones((8, 4))}})
    like = {"params": {"w": jnp.zeros((4, 8))}}
    with pytest.raises(
        ValueError, match=r"another shape: params/w: \[8, 4\] saved, \[4, 8\] wanted \(keep="
    ):
        zerojax.restore(tmp_path / "c", like)
    assert_equal_bits(zerojax.restore(tmp_path / "c", like, keep="params/w"), like)


def test_a_retyped_leaf_is_an_error_that_names_it(tmp_path):
    zerojax.save(tmp_path / "c", {"params": {"w": jnp.full((8, 4), 1.5), "n": jnp.arange(3)}})
    like = {"params": {"w": jnp.zeros((8, 4), jnp.bfloat16), "n": jnp.arange(3)}}
    with pytest.raises(ValueError, match=r"params/w: float32 saved, bfloat16 wanted \(cast=True"):
        zerojax.restore(tmp_path / "c", like)
    back = zerojax.restore(tmp_path / "c", like, cast=True)["params"]["w"]
    assert back.dtype == jnp.bfloat16 and np.all(np.asarray(back, np.float32) == 1.5)
    like["params"]["n"] = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"params/n: int32 saved, float32 wanted"):
        zerojax.restore(tmp_path / "c", like, cast=True)


# -- others' checkpoints


def test_plain_orbax_and_flax_checkpoints_open(tmp_path):
    state = make_state().replace(key=None)
    plan = zerojax.plan(state, stage=3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", state)
    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
    flax_checkpoints.save_checkpoint(tmp_path / "flax", state, 5)
    for path in ("plain", "managed/3", "flax/checkpoint_5"):
        back = zerojax.restore(tmp_path / path, plan)
        assert_equal_bits(back, state)
        assert back.params["layer"]["w"].addressable_shards[0].data.shape == (2, 64)
    assert zerojax.read_extras(tmp_path / "plain") == zerojax.Extras()


def test_plain_orbax_opens_ours(tmp_path):
    state = place().replace(key=None)
    zerojax.save(tmp_path / "c", state, step=1)
    with ocp.StandardCheckpointer() as checkpointer:
        assert_equal_bits(checkpointer.restore(tmp_path / "c", state), state)


# -- damage


def files_of(path):
    return sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file() and p.stat().st_size)


def damage_all(path, how):
    """Each file in turn: damaged, given to the caller, and put back."""
    for file in files_of(path):
        whole = file.read_bytes()
        how(file, whole)
        yield file
        file.write_bytes(whole)


def flip(file, whole):
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])


DAMAGE = {
    "truncated": lambda file, whole: file.write_bytes(whole[:-1]),
    "flipped": flip,
    "deleted": lambda file, whole: file.unlink(),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_to_any_file_is_an_error_that_names_it(tmp_path, how):
    state, plan = place(), plan_of(3, 8)
    zerojax.save(tmp_path / "c", state)
    noted = json.loads((tmp_path / "c" / "zerojax_checksums.json").read_text())
    seen = 0
    for file in damage_all(tmp_path / "c", DAMAGE[how]):
        name = file.relative_to(tmp_path / "c").as_posix()
        if name in noted:
            seen += 1
            with pytest.raises(ValueError, match=rf"{name} (is damaged|is missing|has)"):
                zerojax.restore(tmp_path / "c", plan)
    assert seen == len(noted) >= 6
    assert_equal_bits(words(zerojax.restore(tmp_path / "c", plan)), words(state))


def test_extras_are_read_without_the_rest_but_checked(tmp_path, monkeypatch):
    zerojax.save(tmp_path / "c", place(), step=4)
    read = []
    monkeypatch.setattr(_files, "_size_and_crc", lambda file, real=_files._size_and_crc: (
        read.append(file.name) or real(file)))  # fmt: skip
    assert zerojax.read_extras(tmp_path / "c").step == 4 and read == ["_METADATA"]
    metadata = tmp_path / "c" / "_METADATA"
    metadata.write_text(metadata.read_text().replace('"step": 4', '"step": 5'))
    with pytest.raises(ValueError, match=r"_METADATA is damaged.*Restore another"):
        zerojax.read_extras(tmp_path / "c")


def test_a_damaged_list_of_checksums_is_named(tmp_path):
    zerojax.save(tmp_path / "c", place())
    listing = tmp_path / "c" / "zerojax_checksums.json"
    listing.write_text(listing.read_text()[:-5])
    with pytest.raises(ValueError, match=r"zerojax_checksums.json is not the list of checksums"):
        zerojax.restore(tmp_path / "c", plan_of(3, 8))


# -- who may write where


def test_nothing_is_overwritten(tmp_path):
    zerojax.save(tmp_path / "c", place(), step=1)
    before = {p: p.read_bytes() for p in files_of(tmp_path)}
    with pytest.raises(ValueError, match=r"c exists, and nothing is overwritten. Save to a new"):
        zerojax.save(tmp_path / "c", place(), step=2)
    assert {p: p.read_bytes() for p in files_of(tmp_path)} == before


def test_a_path_without_a_complete_checkpoint_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"nothing at .*zerojax.save"):
        zerojax.restore(tmp_path / "c", plan_of(3, 8))
    (tmp_path / "c.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(ValueError, match=r"c.orbax-checkpoint-tmp is one that was not finished"):
        zerojax.restore(tmp_path / "c", plan_of(3, 8))


def test_a_directory_of_checkpoints_names_them(tmp_path):
    with zerojax.Checkpoints(tmp_path / "loop", keep=None) as checkpoints:
        for n in (5, 10, 100):
            checkpoints.save(n, place())
    message = r"is no checkpoint, but has some: 5, 10, 100. Give one of them: .*/loop/100"
    with pytest.raises(ValueError, match=message):
        zerojax.restore(tmp_path / "loop", plan_of(3, 8))


def test_a_file_of_flax_says_how_to_open_it(tmp_path):
    state, plan = make_state().replace(key=None), zerojax.plan(make_state().replace(key=None))
    path = tmp_path / "state.msgpack"
    path.write_bytes(serialization.to_bytes(state))
    with pytest.raises(ValueError, match=r"is a file.*flax.serialization.from_bytes\(make_state"):
        zerojax.restore(path, plan)
    assert_equal_bits(plan.place(serialization.from_bytes(state, path.read_bytes())), state)


def test_a_function_is_no_place_to_restore_to(tmp_path):
    with pytest.raises(TypeError, match=r"says nothing of places. Pass zerojax.plan\(make_state"):
        zerojax.restore(tmp_path, make_state)


def test_what_is_no_array_is_refused_before_any_file_is_made(tmp_path):
    for bad in ("adam", object(), np.array(["a"])):
        with pytest.raises(TypeError, match=r"params/name is a \w+, not an array. Make it a sta"):
            zerojax.save(tmp_path / "c", {"params": {"w": jnp.ones(2), "name": bad}})
    with pytest.raises(ValueError, match=r"no leaves, so there is nothing to save"):
        zerojax.save(tmp_path / "c", {})
    assert not any(tmp_path.iterdir())


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    zerojax.save("~/c", place())
    assert (tmp_path / "c" / "_METADATA").exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"/file/c cannot be written \(.*Choose another directory"):
        zerojax.save(tmp_path / "file" / "c", place())


def test_a_second_writer_to_one_path_is_refused(tmp_path):
    target, lock = epath.Path(tmp_path / "c"), epath.Path(tmp_path / ".c.lock")
    with _files.only_writer(target, lock):
        with pytest.raises(ValueError, match=r"something else is writing to .*/c. Give each"):
            zerojax.save(tmp_path / "c", place())
        assert not (tmp_path / "c").exists()
    zerojax.save(tmp_path / "c", place())
    assert not lock.exists()


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(match=r"c.lock cannot be locked \(Function not.*nothing else writes"):
        zerojax.save(tmp_path / "c", place())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Orbax's
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # threads, failing
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    """As a limit on the size of files: to the writer both are a write that fails."""
    small = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 64))}})
    noise = jax.random.normal(jax.random.key(0), (1024, 1024))
    large = zerojax.shard_train_state({"params": {"w": noise}})
    with zerojax.Checkpoints(tmp_path / "loop") as checkpoints:
        checkpoints.save(1, small)
        checkpoints.wait()
        before = {p: p.read_bytes() for p in files_of(tmp_path / "loop" / "1")}
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(ValueError, match=r"Failed writing: .*/one.*/d/\w+.*too large"):
                zerojax.save(tmp_path / "one", large)
            checkpoints.save(2, large)
            with pytest.raises(ValueError, match=r"Failed writing: .*/loop/2.*/d/\w+.*too large"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert checkpoints.steps() == [1] and not (tmp_path / "one").exists()
        assert {p: p.read_bytes() for p in files_of(tmp_path / "loop" / "1")} == before
        assert_equal_bits(checkpoints.resume(small)[0], small)
        checkpoints.save(3, large)  # with room again, it goes on
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
    zerojax.save(tmp_path / "one", large)


def test_reading_a_checkpoint_runs_no_code_from_it(tmp_path):
    """An audit hook sees every class that an unpickler looks up."""
    state = {"params": {"w": jnp.ones(8)}}
    zerojax.save(tmp_path / "c", state, metadata={"blob": pickle.dumps(pathlib.Path("x"))})
    code = f"""
import sys, jax.numpy as jnp, zerojax
def hook(event, args):
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickled {{args}}")
sys.addaudithook(hook)
state = zerojax.restore({str(tmp_path / "c")!r}, {{"params": {{"w": jnp.zeros(8)}}}})
blob = zerojax.read_extras({str(tmp_path / "c")!r}).metadata["blob"]
print(float(state["params"]["w"].sum()), type(blob).__name__)
import pickle
try:
    pickle.loads(blob)
except RuntimeError as error:
    print(error)
"""
    root = str(pathlib.Path(zerojax.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert ran.stdout.startswith("8.0 bytes\nunpickled ('pathlib"), ran.stderr


def test_leaves_without_elements_come_back(tmp_path):
    """Orbax refuses them; some models train with them all the same."""
    rows = jnp.arange(8.0)
    state = {"params": {"none": jnp.zeros((0, 3), "bfloat16"), "w": rows}}
    placed = zerojax.shard_train_state(state, min_shard_size=1)
    zerojax.save(tmp_path / "one", placed)
    with zerojax.Checkpoints(tmp_path / "many") as checkpoints:
        checkpoints.save(1, placed)
    for path in (tmp_path / "one", tmp_path / "many" / "1"):
        for like in (zerojax.plan(state, stage=1), placed):
            back = zerojax.restore(path, like=like)
            none = back["params"]["none"]
            assert none.shape == (0, 3) and none.dtype == jnp.bfloat16
            assert isinstance(none.sharding, jax.sharding.NamedSharding)
            np.testing.assert_array_equal(back["params"]["w"], rows)
    with pytest.raises(ValueError, match=r"not in the checkpoint: params/none"):
        filled = {"none": jnp.zeros((2, 3), "bfloat16"), "w": rows}
        zerojax.restore(tmp_path / "one", like={"params": filled})
    zerojax.save(tmp_path / "full", {"params": filled})
    with pytest.raises(ValueError, match=r"params/none: \[2, 3\] saved, \[0, 3\] wanted"):
        zerojax.restore(tmp_path / "full", like=placed)
    zerojax.save(tmp_path / "empty", {"none": jnp.zeros((0, 3))})
    assert zerojax.restore(tmp_path / "empty", {"none": jnp.ones((0, 3))})["none"].shape == (0, 3)
