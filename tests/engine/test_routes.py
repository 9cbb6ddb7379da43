"""Routes of two hops: weights gathered within and then between, gradients summed over replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from tests.collectives import collectives
from zerojax._collectives import Cut, Exact, Held, Route, Wire, dispose, obtain

ROWS, COLUMNS = 16, 3
FULL = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
EACH = np.arange(8, dtype=np.float32).reshape(2, 4)  # a factor for each device
CUT = Cut(0, 2, jnp.dtype("float32"))


@pytest.fixture
def mesh():
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def on_devices(function, mesh, spec, out_specs):
    """`function(shard, factor)` on each device, for a parameter that is sharded by `spec`."""
    specs = (PartitionSpec(*spec), PartitionSpec("a", "b"))
    mapped = jax.shard_map(
        lambda shard, factor: function(shard, factor[0, 0]),
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(*out_specs),
        check_vma=False,
    )
    return jax.jit(mapped)


def weighted(wire):
    """A loss whose gradient by the full weight is the weight times the device's factor."""

    def loss(shard, factor):
        return jnp.sum(obtain(Held(shard), CUT, wire) ** 2) * factor / 2

    return loss


IN_TWO_HOPS = Route(("b",), then=("a",))
WIRES = {
    # `then` is the major axis of the spec: what the first hop gathers are neighbours.
    "sharded over both": ((("a", "b"),), Wire(IN_TWO_HOPS, Route(("a", "b")))),
    "replicas": (("b",), Wire(Route(("b",)), IN_TWO_HOPS)),
}


@pytest.mark.parametrize(("spec", "wire"), WIRES.values(), ids=list(WIRES))
def test_every_device_obtains_the_full_weight(spec, wire, mesh):
    full = lambda shard, factor: obtain(Held(shard), CUT, wire)[None]
    got = on_devices(full, mesh, spec, (("a", "b"),))(FULL, EACH)
    assert got.shape == (8, ROWS, COLUMNS)
    for each in np.asarray(got):
        np.testing.assert_array_equal(each, FULL)


@pytest.mark.parametrize(("spec", "wire"), WIRES.values(), ids=list(WIRES))
def test_each_shard_gets_its_part_of_the_gradient_of_all_devices(spec, wire, mesh):
    each = lambda shard, factor: jax.grad(weighted(wire))(shard, factor)[None, None]
    got = np.asarray(on_devices(each, mesh, spec, ("a", "b"))(FULL, EACH))
    parts = np.split(FULL * EACH.sum(), 4 if spec == ("b",) else 8)
    for a, b in np.ndindex(2, 4):
        np.testing.assert_array_equal(got[a, b], parts[(4 * a + b) % len(parts)])


def test_dispose_is_the_gradients_route(mesh):
    _, wire = WIRES["replicas"]
    shard = lambda _, factor: dispose(FULL * factor, jnp.dtype("float32"), CUT, wire)
    got = on_devices(shard, mesh, ("b",), ("b",))(FULL, EACH)
    np.testing.assert_array_equal(got, FULL * EACH.sum())


def test_a_replicated_parameter_is_all_reduced_over_both(mesh):
    cut = Cut(None, 2, jnp.dtype("float32"))
    wire = Wire(Route(()), IN_TWO_HOPS)
    grad = lambda _, factor: dispose(FULL * factor, jnp.dtype("float32"), cut, wire)
    got = on_devices(grad, mesh, (), ())(FULL, EACH)
    np.testing.assert_array_equal(got, FULL * EACH.sum())


def test_gradients_are_reduced_in_the_dtype_of_their_route(mesh):
    wire = Wire(Route(("b",)), Route(("b",), Exact("bfloat16"), then=("a",)))
    run = on_devices(jax.grad(weighted(wire)), mesh, ("b",), ("b",))
    found = [(c.kind, c.dtype, c.elements) for c in collectives(run.trace(FULL, EACH).jaxpr)]
    assert found == [
        ("all-gather", "float32", ROWS * COLUMNS),
        ("reduce-scatter", "bfloat16", ROWS * COLUMNS),
        ("all-reduce", "bfloat16", ROWS * COLUMNS // 4),
    ]
    got = run(FULL, EACH)
    assert got.dtype == jnp.float32  # the shard's own
    np.testing.assert_allclose(got, FULL * EACH.sum(), rtol=2**-6)
