"""What collectives over axes of the user's own serve: activations of an operation, or gradients."""

import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support.reference import train_state

ROWS, TOKENS, DIM, VOCAB, EXPERTS = 4, 32, 64, 256, 2  # rows of two devices that share them
BATCH = jax.ShapeDtypeStruct((4 * ROWS, TOKENS), jnp.int32)
SHAPES = {"embed": (VOCAB, DIM), "up": (DIM, 2 * DIM), "down": (2 * DIM, DIM)}
SPECS = {"embed": P("own", "data"), "up": P("data", "own"), "down": P("own", "data")}


def make_state(shapes=SHAPES):
    return train_state({k: jnp.ones(v) for k, v in shapes.items()}, optax.adam(1e-3))


def split(params, tokens):
    """A matmul's sum has as many elements as a device's part of the embedding."""
    x = params["embed"][tokens]
    x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean((x @ params["embed"].T) ** 2)


def over(x, dim):
    spec = [P.UNCONSTRAINED] * x.ndim
    spec[dim] = "own"
    return jax.lax.with_sharding_constraint(x, P(*spec))


def mixed(params, tokens):
    """Rows are split over the axis, and meet the experts of other devices."""
    x = over(params["embed"][tokens] @ params["mix"], 0)
    x = over(over(x.reshape(-1, EXPERTS, TOKENS // EXPERTS, DIM), 0), 1)
    x = over(over(jnp.einsum("retd,edf->retf", x, params["up"]), 1), 0)
    return jnp.mean(x**2)


def audited(loss, specs, shapes=SHAPES, mesh=None):
    mesh = mesh or zerojax.mesh(data=4, own=2)
    plan = zerojax.plan(lambda: make_state(shapes), mesh=mesh, overrides=specs)
    batch = zerojax.aot.batch(BATCH, plan)
    step = zerojax.train_step(loss, plan=plan)
    report = zerojax.audit(step, plan.abstract(), batch, plan=plan)
    assert report.findings() == []
    return report, [one for one in report.traffic if one.axes == ("own",)]


def line(loss, text):
    lines, first = inspect.getsourcelines(loss)
    return first + next(at for at, one in enumerate(lines) if text in one)


@pytest.mark.parametrize("gpus", [None, pytest.param("8xH100", marks=pytest.mark.gpu_code)])
def test_sums_of_activations_are_of_an_operation(gpus):
    mesh = gpus and zerojax.aot.mesh(gpus, (4, 2), ("data", "own"))
    report, sums = audited(split, SPECS, mesh=mesh)
    large = [one for one in sums if one.parts[0].size >= ROWS * TOKENS * DIM]
    assert len(large) >= 4 and {one.kind for one in large} == {"all-reduce"}
    assert not any(one.paths for one in large), str(report)
    assert all(one.sends for one in large if one.scope), "older XLA names none that it joins"
    places = {one.serves.rpartition("/")[2] for one in large}
    embedded, summed = line(split, '["embed"][tokens]'), line(split, '["down"]')
    assert f"test_own_axes.py:{embedded}" in places and f"test_own_axes.py:{summed}" in places
    assert {*report.loss_totals} >= {"activations/gather", "activations/dot_general"}
    assert re.search(rf" own .* activations/dot_general: .*own_axes.py:{summed}\n", str(report))


def test_gradients_that_are_summed_over_an_own_axis_are_of_their_parameters():
    shapes = {"embed": (VOCAB, DIM), "mix": (DIM, DIM), "up": (EXPERTS, DIM, DIM)}
    report, sent = audited(mixed, {"up": P("own", "data")}, shapes)
    summed = {path for one in sent if one.kind == "all-reduce" for path in one.paths}
    assert summed == {"params/mix"}, str(report)
    exchanges = {one.serves for one in sent if one.kind == "all-to-all"}
    assert exchanges and all(x.startswith("activations/sharding_constraint") for x in exchanges)
    assert all(f"test_own_axes.py:{line(over, 'return')}" in one for one in exchanges)
