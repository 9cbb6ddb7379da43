"""Checkpoints: the same tree at every stage, strict borders, bytes accounted for."""

import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training import checkpoints as flax_checkpoints

import zerojax
from tests.checkpoint.damage import files_of
from tests.checkpoint.states import BATCH, loss_fn, make_state, place, plan_of, trained, words
from tests.reference import assert_equal_bits

PLACES = list(itertools.product((0, 1, 2, 3), (1, 2, 4, 8)))


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
    with pytest.raises(TypeError, match=r"nothing of placement. Pass zerojax.plan\(make_state"):
        zerojax.restore(tmp_path, make_state)


def test_what_is_no_array_is_refused_before_any_file_is_made(tmp_path):
    for bad in ("adam", object(), np.array(["a"])):
        with pytest.raises(TypeError, match=r"params/name is a \w+( of <U1)?, not an array. Make"):
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


SAVING = """
import resource, sys
import jax, jax.numpy as jnp, zerojax
jax.config.update("jax_num_cpu_devices", 8)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
state = zerojax.shard_train_state({"params": {"w": jnp.ones((64, 1024, 256))}})
with zerojax.Checkpoints(sys.argv[1], every=1, keep=2) as checkpoints:
    for n in range(16):
        checkpoints.save(n + 1, state)
        checkpoints.wait()
        early = peak() if n == 2 else early if n > 2 else None
print(peak() / early)
"""


@pytest.mark.slow
def test_a_process_that_saves_64_mib_again_and_again_stays_as_large(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", SAVING, tmp_path], capture_output=True, text=True, check=True
    )
    assert float(ran.stdout) < 1.1
