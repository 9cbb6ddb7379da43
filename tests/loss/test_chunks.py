"""Losses in chunks of rows: exact, and the head travels once, however many chunks there are."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Literal

import zerojax
from tests.conftest import make_mesh
from tests.support import draw
from tests.support.collectives import collectives, every_equation
from tests.support.reference import assert_close
from tests.support.schedules import value_and_grad
from zerojax import _fence

DIM, VOCAB, LAYERS = 16, 96, 3
PARAMS = {"layers": draw.normal(0, LAYERS, DIM, DIM), "head": draw.normal(1, DIM, VOCAB)}
BATCH = {"x": draw.normal(2, 16, 12, DIM), "labels": jnp.arange(16 * 12).reshape(16, 12) % VOCAB}
# Very uneven: some devices, and some microbatches, have no true element.
BATCH["mask"] = jnp.arange(16 * 12).reshape(16, 12) % 7 < jnp.arange(16)[:, None] // 4


def in_one_piece(loss_of, x, labels, size):
    return loss_of((x, labels))


def by_map(loss_of, x, labels, size):
    """As docs/loss.md has it. What is left over is a piece of its own."""
    return jax.lax.map(jax.checkpoint(loss_of), (x, labels), batch_size=size)


def by_scan(loss_of, x, labels, size):
    split = lambda rows: rows[: len(rows) // size * size].reshape(-1, size, *rows.shape[1:])
    step = jax.checkpoint(lambda _, rows: (None, loss_of(rows)))
    _, losses = jax.lax.scan(step, None, (split(x), split(labels)))
    rest = jax.checkpoint(loss_of)((x[losses.size :], labels[losses.size :]))
    return jnp.concatenate([losses.reshape(-1), rest])


def in_python(loss_of, x, labels, size):
    parts = [(x[at : at + size], labels[at : at + size]) for at in range(0, len(x), size)]
    return jnp.concatenate([jax.checkpoint(loss_of)(part) for part in parts])


WAYS = [by_map, by_scan, in_python]


def loss(way, size, compute="float32"):
    def loss_fn(params, batch):
        params = jax.tree.map(lambda leaf: leaf.astype(compute), params)
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
        x, _ = jax.lax.scan(layer, batch["x"].astype(compute), params["layers"])

        def loss_of(row):
            logits = (row[0] @ params["head"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, row[1])

        losses = way(loss_of, x.reshape(-1, DIM), batch["labels"].reshape(-1), size)
        return zerojax.mean(losses, where=batch["mask"].reshape(-1))

    return loss_fn


@pytest.fixture(scope="module")
def plan():
    return zerojax.plan({"params": PARAMS}, stage=3, mesh=make_mesh(), stacked="layers")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "accumulate", "prefetch"), [(8, 1, 0), (5, 2, 1)])
def test_chunks_have_the_masked_mean_and_gradients_of_one_device(
    way, size, accumulate, prefetch, plan
):
    params = plan.place({"params": PARAMS})["params"]
    options = {"accumulate": accumulate, "prefetch": prefetch}
    value, grads = jax.jit(value_and_grad(loss(way, size), plan, **options))(params, BATCH)

    one_device = jax.value_and_grad(loss(in_one_piece, size))
    wanted, wanted_grads = jax.jit(one_device)(PARAMS, BATCH)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    assert_close(grads, wanted_grads, 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [8, 7])  # of 24 rows: 3 chunks, or 3 and a rest
def test_the_head_is_gathered_and_reduced_once_for_all_chunks(way, size, plan):
    """In the dtype in which the chunks use it; the gradient of all chunks is one array."""
    for prefetch, gathers in ((0, 2), (1, 1)):
        grad = value_and_grad(loss(way, size, "bfloat16"), plan, prefetch=prefetch)
        jaxpr = jax.make_jaxpr(grad)(plan.abstract()["params"], BATCH)
        moved = [c for c in collectives(jaxpr) if c.elements == DIM * VOCAB]
        assert {c.dtype for c in moved} == {"bfloat16"} and {c.times for c in moved} == {1}
        kinds = [c.kind for c in moved]
        assert kinds.count("all-gather") == gathers and kinds.count("reduce-scatter") == 1
        assert len(kinds) == gathers + 1


@pytest.mark.parametrize("size", [8, 7])
def test_backward_waits_for_the_chunks_of_forward(size, plan, monkeypatch):
    """It needs nothing of them: XLA would run them last, and keep head and rows until then."""
    monkeypatch.setattr(_fence, "mixes_up_collectives", lambda mesh: False)  # as on GPUs
    grad = value_and_grad(loss(by_map, size, "bfloat16"), plan, prefetch=1)
    jaxpr = jax.make_jaxpr(grad)(plan.abstract()["params"], BATCH)
    (body,) = [e.params["jaxpr"] for e in every_equation(jaxpr) if e.primitive.name == "shard_map"]
    head = next(e.outvars[0] for e in body.eqns if e.outvars[0].aval.shape == (DIM, VOCAB))
    readers = [n for n, eqn in enumerate(body.eqns) if head in eqn.invars]
    half = len(readers) // 2
    assert half == 1 + (size == 7), "the chunks, and the rest"
    for forward in readers[:half]:
        needs = {*body.eqns[forward].outvars}
        for eqn in body.eqns:
            if not needs.isdisjoint(v for v in eqn.invars if not isinstance(v, Literal)):
                needs.update(eqn.outvars)
        for backward in readers[half:]:
            assert needs.issuperset(body.eqns[backward].outvars)
