"""Placing: values are kept, arrays go where the plan says, and what was passed stays as it is."""

import flax.struct
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh

LEAVES = st.tuples(
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 24]), max_size=3),
    st.sampled_from(["float32", "bfloat16", "int8", "bool", "complex64"]),
)
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


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(tree=TREES, stage=st.sampled_from([0, 3]), devices=st.sampled_from([1, 2, 6, 8]))
def test_placing_any_tree_keeps_values_and_follows_the_plan(tree, stage, devices):
    state = {"params": build(tree), "opt_state": ()}
    hypothesis.assume(jax.tree.leaves(state))
    plan = zerojax.plan(state, stage=stage, mesh=make_mesh(devices), min_shard_size=1)
    placed = plan.place(state)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    for leaf, before, after in zip(
        plan.leaves, jax.tree.leaves(state), jax.tree.leaves(placed), strict=True
    ):
        on_host = np.asarray(after)
        np.testing.assert_array_equal(before, on_host[tuple(map(slice, before.shape))])
        assert np.count_nonzero(on_host) == np.count_nonzero(before), "padding is zero"
        assert after.dtype == before.dtype and after.sharding.spec == leaf.spec
        assert after.addressable_shards[0].data.nbytes == leaf.bytes_per_device(plan.mesh)
        dims = [d for d in before.shape[int(leaf.stacked) :] if d]
        divides = any(d % devices == 0 for d in dims)
        worth = divides or any(-(-d // devices) * devices <= 2 * d for d in dims)
        assert (leaf.spec != P()) == (stage == 3 and devices > 1 and worth)
        assert (after.shape != before.shape) == (leaf.spec != P() and not divides)
        assert (leaf.reason is None) == worth
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
    shared, key = jnp.ones((16, 16)), jax.random.key(0)
    state = Odd({"a": shared, "b": shared, "empty": {}}, (), key, step=7)
    placed = zerojax.plan(state).place(state)
    assert placed.nothing is None and placed.step == 7 and placed.step.dtype == jnp.int32
    np.testing.assert_array_equal(*map(jax.random.key_data, (placed.key, key)))
    consume = jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)
    consume(placed)  # tied leaves do not share a buffer, or donation would fail
    assert not shared.is_deleted()


def test_numpy_arrays_may_be_changed_after_they_are_placed():
    """On CPUs, JAX shares the memory of those that start at a multiple of 64 bytes."""
    memory = np.zeros(64 * 16 * 4 + 64, np.uint8)
    array = memory[-memory.ctypes.data % 64 :][: 64 * 16 * 4].view(np.float32).reshape(64, 16)
    state, specs = {"params": {"w": array}, "opt_state": ()}, {"x": P("data"), "table": P()}
    placed = []
    for mesh in (make_mesh(1), make_mesh(8)):
        placed += [zerojax.plan(state, stage=stage, mesh=mesh).place(state) for stage in (0, 3)]
        placed += [zerojax.shard_batch({"x": array, "table": array}, mesh, batch_specs=specs)]
    array[:] = 7
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(placed))
