"""A pass of one's own: jaxpr in, jaxpr out, with a number for the metrics."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from zerojax._compat import make_jaxpr, run_jaxpr
from zerojax._step import grad


def with_sum_of_rows(loss):
    """The loss, whose metrics have the sum of a device's part of a microbatch."""
    count = len(loss.params)

    def both(*inputs):
        return *run_jaxpr(loss.jaxpr, inputs), jnp.sum(inputs[count])

    closed = jax.make_jaxpr(both)(*(v.aval for v in loss.jaxpr.invars))
    jaxpr = make_jaxpr(closed.jaxpr.eqns, closed.jaxpr.invars, closed.jaxpr.outvars)
    return dataclasses.replace(loss, jaxpr=jaxpr, metrics=("rows",), notes=("counts rows",))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_pass_adds_to_the_metrics(stage, accumulate, monkeypatch):
    rewritten = grad.rewritten
    monkeypatch.setattr(grad, "rewritten", lambda *args: with_sum_of_rows(rewritten(*args)))
    state = {"params": {"w": jnp.ones((16, 8))}}
    tx = optax.sgd(0.1)
    state = {**state, "opt_state": tx.init(state["params"])}
    plan = zerojax.plan(state, stage=stage, mesh=make_mesh(4), min_shard_size=0)
    loss = lambda params, x: (jnp.mean((x @ params["w"]) ** 2), {"largest": jnp.max(x)})
    step = zerojax.train_step(loss, plan=plan, tx=tx, accumulate=accumulate)
    batch = np.arange(16 * 16, dtype=np.float32).reshape(16, 16) / 100
    _, metrics = step(plan.place(state), batch)
    parts = batch.reshape(4 * accumulate, -1)
    assert metrics.keys() == {"loss", "grad_norm", "aux", "rows"}
    assert float(metrics["rows"]) == pytest.approx(parts.sum(1).mean())
    assert float(metrics["aux"]["largest"]) == pytest.approx(parts.max(1).mean())
    assert str(step).endswith("counts rows")
