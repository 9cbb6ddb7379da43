"""Audits of models on CPU devices, with remat, so that stage 3 gathers twice."""

import functools

import optax

import zerojax
from tests.models import MODELS
from tests.reference import divided, make_state

STAGES = (0, 1, 2, 3)
N = 8


@functools.cache
def audited(model, stage):
    """(report, plan, compiled): models with remat, so that stage 3 gathers twice."""
    made = MODELS[model](True)
    state = zerojax.shard_train_state(make_state(made, optax.adamw(1e-3)), stage)
    plan = state.tx.plan
    compiled = zerojax.train_step(made.loss).lower(state, made.batch).compile()
    return zerojax.audit(compiled, plan=plan), plan, compiled


def params_of(model):
    """By name: the parameters that the devices share, and the others."""
    return divided({"params": MODELS[model](True).params})


def sent_for(report, kind):
    """Bytes by parameter; of joined operations each array has its own."""
    found = {}
    for one in report.traffic:
        for part in one.parts if one.kind == kind else ():
            factor = {"all-gather": N - 1, "all-reduce": 2 * (N - 1) / N}.get(kind, (N - 1) / N)
            path = ", ".join(part.paths)
            found[path] = found.get(path, 0) + part.nbytes * factor * one.trips
    return found
