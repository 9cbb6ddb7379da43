"""order="auto": which of the two orders a step takes, and that it is that step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh
from tests.models import gpt
from tests.reference import assert_close, make_state
from zerojax._hlo import gpus as _gpus, known as _known
from zerojax._loss import order as _order
from zerojax._verify import verify as _verify

LAYERS, DIM, COUNT = 4, 64, 4
ROWS = jnp.ones((64, DIM))
FAST = zerojax.Rates(flops=1e12, memory=1e12, link=1e15, network=1e15, host=1e15)


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
        given = dataclasses.replace(FAST, **rates)
        gpu = dataclasses.replace(_known.GPUS["H100"], memory=memory, given_rates=given)
        monkeypatch.setattr(_known, "of_device_kind", lambda kind: gpu)

    return as_gpus


def chosen(state, loss=loss, accumulate=COUNT, **options):
    step = zerojax.train_step(loss, accumulate=accumulate, order="auto", **options)
    return step.settled(state, ROWS).recipe.options.order


def matmul_seconds(flops):
    """Of a microbatch: forward, forward again, and two in backward."""
    rows = len(ROWS) // 8 // COUNT
    return 4 * LAYERS * 2 * rows * DIM**2 / flops


def sent_bytes():
    """Of a microbatch: two all-gathers and a reduce-scatter of all layers."""
    return 3 * LAYERS * DIM**2 * 4 * 7 / 8


NEAR = [(0.99, "microbatches"), (1.01, "layers")]


@pytest.mark.parametrize(("share", "order"), NEAR)
def test_layers_go_first_where_collectives_take_longer_than_compute_hides(on, share, order):
    hidden = _order.SENDS_HIDDEN * matmul_seconds(FAST.flops)
    on(link=sent_bytes() / (share * hidden))
    assert chosen(placed(), prefetch=0) == order


@pytest.mark.parametrize(
    ("slow", "order"), [("network", "layers"), ("link", "layers"), ("", "microbatches")]
)
def test_each_level_of_a_mesh_counts(on, slow, order, monkeypatch):
    monkeypatch.setattr(_order._mesh, "_hosts", lambda mesh: np.arange(8).reshape(2, 4) // 4)
    on(**{slow: 1e6} if slow else {})
    mesh = zerojax.mesh(node=2, gpu=4)
    assert chosen(placed(mesh)) == order


@pytest.mark.parametrize(("share", "order"), NEAR)
def test_parameters_that_come_from_the_host_count_too(on, share, order):
    copied = 2 * LAYERS * DIM**2 * 4 / 8  # in forward and in backward
    on(host=copied / (share * _order.COPIES_HIDDEN * matmul_seconds(FAST.flops)))
    state = placed(offload=zerojax.Offload(opt_state=False, params=True, min_bytes=0))
    assert chosen(state, prefetch=0) == order
    assert chosen(state, accumulate=1) == "microbatches"


def test_in_turn_where_what_all_keep_would_not_fit(on):
    # Of all microbatches, the inputs of all layers but the last, which no loop stacks up.
    kept = (LAYERS - 1) * len(ROWS) // 8 * DIM * 4
    state = placed()
    plan = zerojax.plan(state)
    used = sum(plan.bytes_per_device().values()) + plan.gradient_bytes()
    for extra, order in ((-2000, "microbatches"), (2000, "layers")):
        usable = used + kept / _order.MOST_KEPT + extra
        on(memory=int(usable / _gpus.USABLE_MEMORY), link=1e6)
        assert chosen(state, prefetch=1) == order


def test_in_turn_where_there_are_no_layers_or_no_gpus(on):
    assert chosen(placed()) == "microbatches"  # emulated devices are no GPUs
    on(link=1e6)
    assert chosen(placed(), unrolled) == "microbatches"
    assert chosen(placed()) == "layers"


def test_what_is_reduced_once_is_no_reason(on):
    """Stage 1 sums full gradients over microbatches."""
    on(link=1e6)
    assert chosen(placed(stage=1)) == "microbatches"
    assert chosen(placed(stage=2)) == "layers"


def test_the_step_is_that_of_the_order(on):
    """Run, lowered, audited, in `value_and_grad`: each layer is gathered once a step."""
    on(link=1e6)
    model, found = gpt(remat=True), {}
    for order in ("microbatches", "layers", "auto"):
        state = zerojax.shard_train_state(make_state(model, optax.adam(1e-2, eps=1e-3)), stage=3)
        step = zerojax.train_step(model.loss, accumulate=2, order=order)
        report = zerojax.audit(step, state, model.batch)
        grads = zerojax.value_and_grad(model.loss, zerojax.plan(state), accumulate=2, order=order)
        value = jax.make_jaxpr(grads)(state.params, model.batch)
        found[order] = (
            report.accumulate,
            sorted(report.totals.items()),
            len(list(collectives(value))),
        )
        state, metrics = step(state, model.batch)
        found[order, "state"] = jax.device_get((state, metrics))
        assert step._cache_size() == 1
        step.clear_cache()
        assert step._cache_size() == 0
    assert found["auto"] == found["layers"] != found["microbatches"]
    got, want = (jax.tree.leaves(found[order, "state"]) for order in ("auto", "microbatches"))
    assert_close(got, want, 1e-6)


def test_verify_checks_the_gradients_of_the_order(on, monkeypatch):
    on(link=1e6)
    seen = []
    run = _verify.loss_and_grads
    noted = lambda loss, plan, options, *args: (
        seen.append(options) or run(loss, plan, options, *args)
    )
    monkeypatch.setattr(_verify, "loss_and_grads", noted)
    step = zerojax.train_step(loss, accumulate=COUNT, order="auto")
    assert zerojax.verify(step, placed(), ROWS).ok
    assert [options.order for options in seen] == ["layers"]


def test_in_turn_where_nothing_is_sent(on):
    on()
    elements = lambda p, x: jnp.mean(jax.lax.scan(lambda x, w: (x * w[0], None), x, p["w"])[0] ** 2)
    assert chosen(placed(make_mesh(1)), elements) == "microbatches"


def test_it_is_decided_once_for_shapes(on, monkeypatch):
    on(link=1e6)
    asked = []
    faster = _order.faster
    monkeypatch.setattr(_order, "faster", lambda *args: asked.append(1) or faster(*args))
    state, step = placed(), zerojax.train_step(loss, accumulate=COUNT, order="auto")
    for rows in (64, 64, 128):
        state, _ = step(state, jnp.ones((rows, DIM)))
    assert len(asked) == 2
