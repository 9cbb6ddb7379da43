"""Experts: losses and gradients of the rows of each device, averaged."""

import functools
import itertools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.support.compared import mesh_of
from tests.support.experts import CASES
from tests.support.reference import split_aux

MESHES = {"8": {"data": 8}, "7": {"data": 7}}


@functools.cache
def of_device(name: str) -> Any:
    case = CASES[name].make()
    return jax.jit(jax.value_and_grad(lambda *args: split_aux(case.loss(*args)), has_aux=True))


@functools.cache
def on_devices(name: str) -> list[Any]:
    """((loss, aux), gradients) of the rows of each of 8 devices."""
    case, results = CASES[name].make(), []
    for index in range(8):
        rows = jax.tree.map(lambda x, i=index: x[2 * i : 2 * i + 2], case.batch)
        key = () if case.rng is None else (jax.random.fold_in(case.rng, index),)
        results.append(jax.device_get(of_device(name)(case.params, rows, *key)))
    return results


def assert_near(actual: Any, wanted: Any, close: float, what: str) -> None:
    """Every element within `close` of the largest of all leaves."""
    most = max((np.abs(x).max() for x in jax.tree.leaves(wanted)), default=1)
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, b), a in zip(paths, jax.tree.leaves(actual), strict=True):
        assert a.shape == b.shape, f"{what}{jax.tree_util.keystr(path)}: {a.shape}, not {b.shape}"
        off = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0)
        assert off <= close * most, f"{what}{jax.tree_util.keystr(path)}: off by {off / most:.1e}"


def compare(name: str, mesh: str, stage: int) -> None:
    row, sizes = CASES[name], MESHES[mesh]
    case, devices = row.make(), int(np.prod(list(sizes.values())))
    plan = zerojax.plan({"params": case.params}, stage=stage, mesh=mesh_of(sizes))
    run = zerojax.value_and_grad(case.loss, plan, has_aux=case.has_aux)
    params = plan.place({"params": case.params})["params"]
    batch = jax.tree.map(lambda x: x[: 2 * devices], case.batch)
    key = () if case.rng is None else (case.rng,)
    result, grads = jax.jit(run)(params, batch, *key)
    unpadded = lambda grad, param: grad[tuple(map(slice, param.shape))]
    grads = jax.tree.map(unpadded, jax.device_get(grads), case.params)
    wanted = jax.tree.map(lambda *xs: np.mean(xs, 0), *on_devices(name)[:devices])
    assert_near(split_aux(result), wanted[0], row.close, "the loss")
    assert_near(grads, wanted[1], row.close, "gradients")


@pytest.mark.parametrize("name", CASES)
def test_rows_of_each_device(name):
    compare(name, "8", 3)


@pytest.mark.parametrize("name", CASES)
def test_a_model_learns(name):
    case = CASES[name].make()
    params, tx = case.params, optax.adam(1e-2)
    key = () if case.rng is None else (case.rng,)
    losses, opt_state, rows = [], tx.init(params), jax.tree.map(lambda x: x[:2], case.batch)
    for _ in range(8):
        (loss, _), grads = of_device(name)(params, rows, *key)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert losses[-1] < 0.95 * losses[0], losses
