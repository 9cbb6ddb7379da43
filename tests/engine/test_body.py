"""Scopes and loops: residuals that they keep for backward, and side effects inside of them."""

import jax
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.engine.losses import (
    BATCH,
    DIM,
    LAYERS,
    PARAMS,
    PROGRAMS,
    dense,
    end,
    kept_by_loops,
    scan,
    sharded_grad,
)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "name", ["plain_scan", "weight_normalisation", "mixed_dtypes", "mask_made_in_the_body",
             "remat_everything", "remat_all_but_names", "remat_in_the_middle"],
)  # fmt: skip
def test_no_loop_keeps_full_weights(name, stage):
    """Activations have 2 rows here (16 examples on 8 devices), so a weight is easy to tell."""
    grad, params = sharded_grad(PROGRAMS[name], stage)
    loops, kept = kept_by_loops(grad.trace(params, BATCH).jaxpr, least=DIM * DIM)
    assert loops >= 2, "one of forward, one of backward"
    assert kept == []


def test_loops_keep_full_weights_where_they_are_told_to():
    grad, params = sharded_grad(PROGRAMS["plain_scan"], 3, regather=False)
    _, kept = kept_by_loops(grad.trace(params, BATCH).jaxpr, least=DIM * DIM)
    assert (LAYERS, DIM, DIM) in kept


@pytest.mark.parametrize("stage", [0, 3])
def test_prints_inside_loops_and_remats_still_happen(stage):
    seen = []

    def loss(params, batch):
        def body(x, layer):
            jax.debug.callback(lambda: seen.append("layer"))
            return dense(x, layer)

        def quiet(x, w):
            jax.debug.callback(lambda: seen.append("remat"))
            return x @ w

        jax.checkpoint(quiet)(batch["x"], params["shared"])  # its output is not used
        return end(scan(body, batch["x"], params["a"]))

    plan = zerojax.plan({"params": PARAMS}, stage=stage, mesh=make_mesh())
    params = plan.place({"params": PARAMS})["params"]
    jax.block_until_ready(jax.jit(zerojax.value_and_grad(loss, plan))(params, BATCH))
    jax.effects_barrier()
    # How often XLA calls back for each device is its own affair.
    assert seen.count("layer") >= LAYERS and seen.count("remat") >= 1
