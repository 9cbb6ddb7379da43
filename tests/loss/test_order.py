"""order="auto": which of the two orders a step takes, and that it is that step."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh
from zerojax.tools._hlo import known as _known

LAYERS, DIM, COUNT = 4, 64, 4
ROWS = jnp.ones((64, DIM))
FAST = zerojax.Rates(flops=1e12, memory=1e12, link=1e15, network=1e15, host=1e15)
COMPUTE = 4 * LAYERS * 2 * (len(ROWS) // 8 // COUNT) * DIM**2 / FAST.flops  # of a microbatch


def loss(params, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


def unrolled(params, x):
    for w in params["w"]:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def placed(mesh=None, **options):
    params = {"w": 0.1 * jax.random.normal(jax.random.key(0), (LAYERS, DIM, DIM))}
    state = zerojax.ModuleState.create(params, optax.adam(1e-3))
    mesh = mesh or make_mesh()
    return zerojax.shard_train_state(state, mesh=mesh, axis=mesh.axis_names, **options)


@pytest.fixture
def on(monkeypatch):
    """Makes the emulated devices GPUs with these rates and bytes of memory."""

    def as_gpus(memory=2**30, **rates):
        rates = dataclasses.replace(FAST, **rates)
        gpu = dataclasses.replace(_known.GPUS["H100"], memory=memory, given_rates=rates)
        monkeypatch.setattr(_known, "of_device_kind", lambda kind: gpu)

    return as_gpus


def gathers(state, order, loss=loss, **options):
    step = zerojax.train_step(loss, order=order, **{"accumulate": COUNT, "prefetch": 0} | options)
    every = collectives(step.trace(state, ROWS).jaxpr)
    return sum(c.moved for c in every if c.kind in ("all-gather", "reduce-scatter"))


def chosen(state, *args, **options):
    """By what a step sends: in layers, as much as one microbatch does."""
    orders = ("microbatches", "layers") if not args else ("microbatches",)
    sent = {gathers(state, order, *args, **options): order for order in orders}
    return sent[gathers(state, "auto", *args, **options)]


# Each microbatch gathers layers twice and reduces them once: 60% of its compute hides that.
SENT = 3 * LAYERS * DIM**2 * 4 * 7 / 8
COPIED = 2 * LAYERS * DIM**2 * 4 / 8  # from the host, of which 25% hides


@pytest.mark.parametrize(("share", "order"), [(0.99, "microbatches"), (1.01, "layers")])
def test_layers_go_first_where_what_is_sent_or_fetched_takes_longer_than_hides(on, share, order):
    on(link=SENT / (share * 0.6 * COMPUTE))
    assert chosen(placed()) == order
    on(host=COPIED / (share * 0.25 * COMPUTE))
    offload = zerojax.Offload(opt_state=False, params=True, min_bytes=0)
    assert chosen(placed(offload=offload)) == order


# Parameters, gradients, Adam's moments and two counters; of all microbatches, the inputs of all
# layers but the last, which no loop stacks up. They may take half of what 92% of memory leaves.
STATE, KEPT = 4 * LAYERS * DIM**2 * 4 // 8 + 8, (LAYERS - 1) * len(ROWS) // 8 * DIM * 4


@pytest.mark.parametrize(("extra", "order"), [(-100, "microbatches"), (100, "layers")])
def test_in_turn_where_what_all_keep_would_not_fit(on, extra, order):
    on(link=1e6, memory=int((STATE + 2 * KEPT + extra) / 0.92))
    assert chosen(placed(), prefetch=1) == order


def test_in_turn_where_nothing_is_gained(on):
    assert chosen(placed()) == "microbatches", "emulated devices are no GPUs"
    on(link=1e6)
    assert chosen(placed(), unrolled) == "microbatches", "there are no layers"
    elements = lambda p, x: jnp.mean(jax.lax.scan(lambda x, w: (x * w[0], None), x, p["w"])[0] ** 2)
    # On one device nothing is sent. Stage 1 sums full gradients over microbatches, and sends once.
    for state, fn in ((placed(make_mesh(1)), elements), (placed(stage=1), loss)):
        steps = (
            zerojax.train_step(fn, accumulate=COUNT, order=o) for o in ("auto", "microbatches")
        )
        one, turn = (str(step.trace(state, ROWS).jaxpr) for step in steps)
        assert one == turn


def test_the_step_is_that_of_the_order_and_verified_as_such(on, compiled):
    on(link=1e6)
    state = placed()
    reports = {}
    for order in ("layers", "auto"):
        step = zerojax.train_step(loss, accumulate=COUNT, order=order, donate=False)
        report = zerojax.audit(step, state, ROWS)
        reports[order] = report.accumulate, sorted(report.totals.items())
    assert reports["auto"] == reports["layers"] and reports["auto"][0] == 1
    assert zerojax.verify(step, state, ROWS).ok
    step(state, ROWS)
    before = len(compiled)
    step(state, ROWS)
    assert len(compiled) == before, "it is decided once for shapes"
