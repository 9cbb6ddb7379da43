"""Placing: values are kept, arrays go where the plan says, and what does not fit is refused."""

import flax.struct
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.models import gpt, mlp
from tests.placed import place, shardings
from tests.reference import assert_close, assert_equal_bits, make_state
from tests.shapes import params_plan, shape
from zerojax._state.stacks import layer_dims

LEAVES = st.tuples(
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 24]), max_size=4),
    st.sampled_from(["float32", "bfloat16", "int8", "bool", "complex64"]),
)
SPECS = {"x": P("data"), "table": P()}
TREES = st.recursive(
    LEAVES.map(lambda leaf: ("leaf", leaf)) | st.none(),
    lambda kids: (
        st.dictionaries(st.sampled_from("abcd"), kids, max_size=3) | st.lists(kids, max_size=3)
    ),
    max_leaves=6,
)


def build(tree):
    match tree:
        case ("leaf", (dims, dtype)):
            return np.arange(np.prod(dims, dtype=int)).reshape(dims).astype(jnp.dtype(dtype))
        case dict():
            return {k: build(v) for k, v in tree.items()}
        case list():
            return [build(v) for v in tree]
    return None


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(tree=TREES, stage=st.integers(0, 3), devices=st.sampled_from([1, 2, 6, 8]))
def test_placing_any_tree_keeps_values_and_follows_the_plan(tree, stage, devices):
    state = {"params": build(tree), "opt_state": ()}
    hypothesis.assume(jax.tree.leaves(state))
    hypothesis.assume(2 not in layer_dims(state["params"], None).values())  # loops within loops
    plan = zerojax.plan(state, stage=stage, mesh=make_mesh(devices), min_shard_size=1)
    placed = plan.place(state)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    for leaf, before, after in zip(
        plan.leaves, jax.tree.leaves(state), jax.tree.leaves(placed), strict=True
    ):
        after_on_host = np.asarray(after)
        np.testing.assert_array_equal(before, after_on_host[tuple(map(slice, before.shape))])
        assert np.count_nonzero(after_on_host) == np.count_nonzero(before), "padding is zero"
        assert after.dtype == before.dtype and after.sharding.spec == leaf.spec
        shard = after.addressable_shards[0].data
        assert shard.nbytes == leaf.bytes_per_device(plan.mesh)
        dims = [d for d in before.shape[int(leaf.stacked) :] if d]
        divides = any(d % devices == 0 for d in dims) and before.size > 0
        worth = any(-(-d // devices) * devices <= 2 * d for d in dims) and before.size > 0
        assert (leaf.spec != P()) == (stage == 3 and devices > 1 and (divides or worth))
        assert (after.shape != before.shape) == (leaf.spec != P() and not divides)
        assert (leaf.reason is None) == ((divides or worth) and before.ndim > 0)
    # numpy's own copy of the parameters comes back whole
    back = zerojax.gather_params(placed, plan)
    equal = lambda got, want: np.testing.assert_array_equal(got, want, strict=True)
    jax.tree.map(equal, back, state["params"])


@flax.struct.dataclass
class Odd:
    params: dict
    opt_state: tuple
    key: jax.Array
    nothing: None = None
    step: int = 0


def test_keys_scalars_nones_and_tied_leaves_are_placed():
    shared = jnp.ones((16, 16))
    state = Odd({"a": shared, "b": shared, "empty": {}}, (), jax.random.key(0), step=7)
    plan = zerojax.plan(state, stage=3)
    placed = plan.place(state)
    assert placed.nothing is None and placed.step == 7 and placed.step.dtype == jnp.int32
    np.testing.assert_array_equal(
        jax.random.key_data(placed.key), jax.random.key_data(jax.random.key(0))
    )
    consume = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
    consume(placed)  # tied leaves do not share a buffer, or donation would fail
    assert not shared.is_deleted()


def test_place_refuses_another_tree_and_moves_nothing():
    plan = params_plan({"w": shape(16, 16)})
    with pytest.raises(TypeError, match=r"leaf params/w is the shape.*function that makes"):
        plan.place({"params": {"w": shape(16, 16)}})
    with pytest.raises(ValueError, match=r"params/w is float32\[8, 16\].*Make a plan"):
        plan.place({"params": {"w": jnp.ones((8, 16))}})
    with pytest.raises(ValueError, match=r"params/v is not in the plan.*Make a plan"):
        plan.place({"params": {"w": jnp.ones((16, 16)), "v": jnp.ones(3)}})
    with pytest.raises(ValueError, match=r"params/w is missing.*Make a plan"):
        plan.place({"params": {}, "opt_state": jnp.ones(1)})


def test_born_sharded_equals_made_and_placed():
    made = gpt(False)
    make = lambda: make_state(made, optax.adamw(1e-3))
    born, moved = zerojax.shard_train_state(make), zerojax.shard_train_state(make())
    assert jax.tree.leaves(shardings(born)) == jax.tree.leaves(shardings(moved))
    assert_equal_bits(born.params, moved.params)
    step = zerojax.train_step(made.loss)
    assert_equal_bits(step(born, made.batch)[0].params, step(moved, made.batch)[0].params)


def test_placing_again_changes_the_stage_and_keeps_the_values():
    made = mlp(False)
    state = place(made, 3)
    step = zerojax.train_step(made.loss)
    state, _ = step(state, made.batch)
    moved = zerojax.shard_train_state(state, 1)
    assert moved.params["in"]["w"].sharding.spec == P()
    assert_equal_bits(moved.params, state.params)
    once_more, _ = step(moved, made.batch)
    assert_close(once_more.params, step(state, made.batch)[0].params, 1e-6)


def test_gather_params_takes_any_tree():
    made = mlp(False)
    state = place(made)
    for tree in (state, state.params, state.opt_state[0].mu):
        gathered = zerojax.gather_params(tree)
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(gathered))
        assert gathered["in"]["w"].shape == made.params["in"]["w"].shape
    scalar = zerojax.gather_params({"scale": jax.device_put(2.0)})["scale"]
    assert scalar.shape == () and scalar == 2


@pytest.mark.parametrize("devices", [1, 8])
def test_numpy_arrays_may_be_changed_after_they_are_placed(devices):
    """On CPUs, JAX shares the memory of those that start at a multiple of 64 bytes."""
    memory, mesh = np.zeros(64 * 16 * 4 + 64, np.uint8), make_mesh(devices)
    array = memory[-memory.ctypes.data % 64 :][: 64 * 16 * 4].view(np.float32).reshape(64, 16)
    state = {"params": {"w": array}, "opt_state": ()}
    placed = [zerojax.plan(state, stage=stage, mesh=mesh).place(state) for stage in (0, 3)]
    placed.append(zerojax.shard_batch({"x": array, "table": array}, mesh, batch_specs=SPECS))
    array[:] = 7
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(placed))
