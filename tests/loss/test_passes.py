"""A pass of one's own: jaxpr in, jaxpr out, with a number for the metrics."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from zerojax._compat import run_jaxpr
from zerojax._passes.one_device import as_one_device
from zerojax._step import grad

ONES = np.ones(16, np.float32)  # a constant of the pass


def with_sum_of_rows(loss):
    """The loss, whose metrics have the sum of a device's part of a microbatch."""
    count = len(loss.params)

    def both(*inputs):
        return *run_jaxpr(loss.jaxpr, inputs), jnp.sum(inputs[count] * ONES)

    return loss.retraced(both, metrics=("rows",)).noting("counts rows")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_pass_adds_to_the_metrics(stage, accumulate, monkeypatch):
    rewritten = grad.rewritten

    def first(loss, plan, *others):
        run = functools.partial(with_sum_of_rows, loss)
        return rewritten(as_one_device(run, plan.mesh, plan.batch_axes), plan, *others)

    monkeypatch.setattr(grad, "rewritten", first)
    state = {"params": {"w": jnp.ones((16, 8))}}
    tx = optax.sgd(0.1)
    state = {**state, "opt_state": tx.init(state["params"])}
    plan = zerojax.plan(state, stage=stage, mesh=make_mesh(4), min_shard_size=0)
    mean = lambda params, x: zerojax.mean((x @ params["w"]) ** 2, where=x[:, :1] > 0.5)
    loss = lambda params, x: (mean(params, x), {"largest": jnp.max(x)})
    step = zerojax.train_step(loss, plan=plan, tx=tx, accumulate=accumulate)
    batch = np.arange(16 * 16, dtype=np.float32).reshape(16, 16) / 100
    _, metrics = step(plan.place(state), batch)
    parts = batch.reshape(4 * accumulate, -1)
    assert metrics.keys() == {"loss", "grad_norm", "aux", "rows"}
    assert float(metrics["rows"]) == pytest.approx(parts.sum(1).mean())
    assert float(metrics["aux"]["largest"]) == pytest.approx(parts.max(1).mean())
    assert str(step).endswith("counts rows")
