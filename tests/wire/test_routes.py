"""Routes of two hops: weights gathered within and then between, gradients summed over replicas."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from tests.collectives import collectives
from zerojax._collectives import Held, brought_near, dispose, obtain, summed
from zerojax._wire.codecs import Blocks, Exact
from zerojax._wire.routes import Cut, Route, Wire

ROWS, COLUMNS = 16, 3
FULL = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
EACH = np.arange(8, dtype=np.float32).reshape(2, 4)  # a factor for each device


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


def cut(wire, dim=0):
    return Cut(dim, 2, jnp.dtype("float32"), wire)


def weighted(wire):
    """A loss whose gradient by the full weight is the weight times the device's factor."""

    def loss(shard, factor):
        return jnp.sum(obtain(Held(shard), cut(wire)) ** 2) * factor / 2

    return loss


# The near axis is the major one of the spec: what the first, far, hop gathers are neighbours.
IN_TWO_HOPS = Route(near=("a",), far=("b",))
OVER_REPLICAS = Route(near=("b",), replicas=("a",))
WIRES = {
    "sharded over both": ((("a", "b"),), Wire(Route(("a", "b")), Route(("a", "b")))),
    "sharded over both, two hops": ((("a", "b"),), Wire(IN_TWO_HOPS, IN_TWO_HOPS)),
    "replicas": (("b",), Wire(Route(("b",)), OVER_REPLICAS)),
}


@pytest.mark.parametrize(("spec", "wire"), WIRES.values(), ids=list(WIRES))
def test_every_device_obtains_the_full_weight(spec, wire, mesh):
    full = lambda shard, factor: obtain(Held(shard), cut(wire))[None]
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
    shard = lambda _, factor: dispose(FULL * factor, jnp.dtype("float32"), cut(wire))
    got = on_devices(shard, mesh, ("b",), ("b",))(FULL, EACH)
    np.testing.assert_array_equal(got, FULL * EACH.sum())


def test_a_replicated_parameter_is_all_reduced_over_both(mesh):
    everywhere = cut(Wire(reduce=Route(replicas=("a", "b"))), dim=None)
    grad = lambda _, factor: dispose(FULL * factor, jnp.dtype("float32"), everywhere)
    got = on_devices(grad, mesh, (), ())(FULL, EACH)
    np.testing.assert_array_equal(got, FULL * EACH.sum())


def test_gradients_are_reduced_in_the_dtype_of_their_route(mesh):
    wire = Wire(Route(("b",)), dataclasses.replace(OVER_REPLICAS, codec=Exact("bfloat16")))
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


def test_what_rests_over_fewer_axes_is_gathered_over_those_and_reduced_over_all(mesh):
    wire = Wire(Route(("a",)), IN_TWO_HOPS)

    def loss(shard, rest, factor):
        return jnp.sum(obtain(Held(shard, rest), cut(wire)) ** 2) * factor / 2

    def grad(rest, factor):
        unread = jnp.full((ROWS // 8, COLUMNS), jnp.nan)
        return jax.grad(loss)(unread, rest, factor)

    run = on_devices(grad, mesh, ("a",), (("a", "b"),))
    np.testing.assert_array_equal(run(FULL, EACH), FULL * EACH.sum())
    found = [(c.kind, c.axes, c.elements) for c in collectives(run.trace(FULL, EACH).jaxpr)]
    assert found == [
        ("all-gather", ("a",), ROWS * COLUMNS),
        ("reduce-scatter", ("a",), ROWS * COLUMNS),
        ("reduce-scatter", ("b",), ROWS * COLUMNS // 2),
    ]


def test_a_weight_that_was_brought_near_is_gathered_over_the_near_axes_alone(mesh):
    two_hops, both = cut(Wire(IN_TWO_HOPS, IN_TWO_HOPS)), (("a", "b"),)
    bring = on_devices(lambda shard, _: brought_near(Held(shard), two_hops)[0], mesh, both, ("a",))
    np.testing.assert_array_equal(bring(FULL, EACH), FULL)

    def loss(shard, near, factor):
        return jnp.sum(obtain(Held(shard), two_hops, (near,)) ** 2) * factor / 2

    def grad(near, factor):
        unread = jnp.full((ROWS // 8, COLUMNS), jnp.nan)
        return jax.grad(loss)(unread, near, factor)

    run = on_devices(grad, mesh, ("a",), both)
    np.testing.assert_array_equal(run(bring(FULL, EACH), EACH), FULL * EACH.sum())
    found = [(c.kind, c.axes) for c in collectives(run.trace(FULL, EACH).jaxpr)]
    assert [axes for kind, axes in found if kind == "all-gather"] == [("a",)]


def test_a_route_of_one_hop_brings_nothing_near():
    assert brought_near(Held(FULL), cut(Wire(Route(("a",))))) == ()


@pytest.mark.parametrize("route", [Route(("a", "b")), IN_TWO_HOPS], ids=["one hop", "two hops"])
def test_padding_is_dropped_after_the_gather_and_added_before_the_reduction(route, mesh):
    rows = ROWS - 3
    route = dataclasses.replace(route, padding=3)
    wire = Wire(route, route)
    full = np.concatenate([FULL[:rows], np.full((3, COLUMNS), np.nan, "float32")])
    obtained = lambda shard, _: obtain(Held(shard), cut(wire))[None]
    got = on_devices(obtained, mesh, (("a", "b"),), (("a", "b"),))(full, EACH)
    np.testing.assert_array_equal(got, np.broadcast_to(FULL[:rows], (8, rows, COLUMNS)))
    grad = on_devices(jax.grad(weighted(wire)), mesh, (("a", "b"),), (("a", "b"),))
    wanted = np.concatenate([FULL[:rows] * EACH.sum(), np.zeros((3, COLUMNS), "float32")])
    np.testing.assert_array_equal(grad(full, EACH), wanted)


LEVELS = ("rack", "node", "gpu")


def test_whatever_axes_codes_cross_each_shard_gets_its_own_part():
    """All orders of axes, codes over any of them. A part that lands elsewhere is off by 140%."""
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, LEVELS, axis_types=(AxisType.Auto,) * 3)
    orders = [o for n in (2, 3) for o in itertools.permutations(LEVELS, n)]
    cases = [
        (order, coded)
        for order in orders
        for n in range(1, len(order) + 1)
        for coded in itertools.combinations(order, n)
    ]

    def disposed(order, coded, grad):
        replicas = tuple(axis for axis in LEVELS if axis not in order)
        route = Route(order[:1], order[1:], replicas, Blocks("int8", block=64), padding=3)
        return summed([grad], [cut(Wire(reduce=route.coded_over(coded)))])[0]

    run = jax.shard_map(
        lambda each: [disposed(*case, each[0]) for case in cases],
        mesh=mesh,
        in_specs=PartitionSpec(LEVELS),
        out_specs=[PartitionSpec(order) for order, _ in cases],
        check_vma=False,
    )
    each = np.random.default_rng(0).normal(size=(8, 13, 64)).astype(np.float32)
    wanted = each.sum(0)
    for case, found in zip(cases, jax.jit(run)(each), strict=True):
        assert found.shape == (16, 64) and not np.any(found[13:]), case
        off = np.linalg.norm(found[:13] - wanted) / np.linalg.norm(wanted)
        assert 1e-4 < off < 2e-2, (case, off)
