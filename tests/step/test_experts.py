"""Experts: a loss is the mean over the devices of what it is for each device's rows."""

import functools
import itertools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import shared_with_ci
from tests.support.compared import mesh_of
from tests.support.experts import CASES, KEPT, Case
from tests.support.reference import assert_near, split_aux
from zerojax.manual import dequantize

EACH = 2  # rows of a device
MESHES = {
    "4x2": {"data": 4, "expert": 2},
    "2x4": {"data": 2, "expert": 4},
    "1x8": {"data": 1, "expert": 8},
    "1x7": {"data": 1, "expert": 7},
}
# Each on one mesh in turn, some in CI; EVERYWHERE on all of them. All others are slow.
NAMES = """
switch qwen3 deepseek_v3 maxtext_sparse gpt_oss tutel expert_choice_by_row scan_over_experts
linen_vmap_with_rooms nnx_vmap
"""
QUICK = NAMES.split()
EVERYWHERE = ["switch"]
STEPS = {"mixtral": {"roll": True}, "qlora": {}}
# Exact, but loops that gather their experts first.
GAPS = {"loop_over_experts": "slice", "scan_skips_idle_experts": "scan"}
# A plan does not know that a loop over the first dimension is one over experts.
pytestmark = pytest.mark.filterwarnings("ignore:.*is scanned along dimension 0")


def turns() -> list[Any]:
    rows = []
    for at, name in enumerate(QUICK):
        for turn in range(4) if name in EVERYWHERE else [at]:
            rows.append((name, list(MESHES)[turn % 4], (turn + at // 4) % 4))
    return rows


def product() -> list[Any]:
    return [row for row in itertools.product(CASES, MESHES, range(4)) if row not in turns()]


def apart(name: str) -> dict[str, Any]:
    return {"experts": {"expert": CASES[name].experts}}


def slow_but(quick: Iterable[str]) -> list[Any]:
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in CASES]


def is_frozen(case: Case) -> Any:
    path = lambda at: f"/{jax.tree_util.keystr(at, simple=True, separator='/')}"
    frozen = lambda at, _: bool(re.search(case.frozen, path(at)))
    return jax.tree_util.tree_map_with_path(frozen, case.params)


def state_of(case: Case, tx: optax.GradientTransformation | None = None) -> Any:
    tx = optax.selective_transform(tx or optax.sgd(0.1), freeze_mask=is_frozen(case))
    state = zerojax.ModuleState.create(jax.tree.map(jnp.array, case.params), tx)
    return zerojax.quantize(state, case.codes) if case.codes else state


def decoded(case: Case) -> Any:
    return jax.device_get(dequantize(state_of(case).params)) if case.codes else case.params


def arguments(case: Case, rows: slice, device: int | None = None) -> tuple[Any, ...]:
    """The batch and the key, of all devices or of one."""
    batch = jax.tree.map(lambda x: x[rows], case.batch)
    if case.rng is None:
        return (batch,)
    return batch, case.rng if device is None else jax.random.fold_in(case.rng, device)


@functools.cache
def graded(name: str) -> Any:
    case = CASES[name].make()
    return jax.jit(jax.value_and_grad(lambda *args: split_aux(case.loss(*args)), has_aux=True))


def of_devices(name: str, params: Any) -> list[Any]:
    """((loss, aux), gradients) of the rows of each of 8 devices."""
    case, run = CASES[name].make(), graded(name)
    parts = [slice(EACH * i, EACH * (i + 1)) for i in range(8)]
    results = [run(params, *arguments(case, rows, i)) for i, rows in enumerate(parts)]
    return jax.device_get(results)


@functools.cache
def at_first(name: str) -> list[Any]:
    return of_devices(name, decoded(CASES[name].make()))


def mean(results: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.mean(xs, 0), *results)


def compare(name: str, sizes: dict[str, int], stage: int, **options: Any) -> None:
    case, close = CASES[name].make(), CASES[name].close
    state, mesh = state_of(case), mesh_of(sizes)
    plan = zerojax.plan(state, stage=stage, mesh=mesh, **options)
    run = zerojax.value_and_grad(case.loss, plan, has_aux=case.has_aux)
    args = arguments(case, slice(EACH * mesh.size))
    result, grads = jax.jit(run)(plan.place(state).params, *args)
    wanted = mean(at_first(name)[: mesh.size])
    assert_near(split_aux(result), wanted[0], "the loss and aux", close)

    def trained(frozen: bool, grad: Any, like: Any) -> Any:
        return None if frozen else np.asarray(grad)[tuple(map(slice, like.shape))]

    ours, theirs = (
        jax.tree.map(trained, is_frozen(case), of, wanted[1]) for of in (grads, wanted[1])
    )
    assert_near(ours, theirs, "gradients", close)


@pytest.mark.parametrize("name", slow_but(["switch"]))
def test_an_axis_of_rows(name):
    compare(name, {"data": 8}, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_device_learns_from_its_rows(name):
    case = CASES[name].make()
    params, losses = decoded(case), []
    tx = optax.selective_transform(optax.adam(1e-2), freeze_mask=is_frozen(case))
    opt_state, args = tx.init(params), arguments(case, slice(EACH))
    for _ in range(10):
        (loss, _), grads = graded(name)(params, *args)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert losses[-1] < 0.95 * losses[0], losses


# -- apart over an axis of the mesh


@pytest.mark.parametrize(("name", "mesh", "stage"), shared_with_ci(turns()))
def test_losses_and_gradients_are_means_over_devices(name, mesh, stage):
    compare(name, MESHES[mesh], stage, **apart(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "stage"), product())
def test_on_all_meshes_at_all_stages(name, mesh, stage):
    compare(name, MESHES[mesh], stage, **apart(name))


@pytest.mark.parametrize("name", slow_but(STEPS))
def test_three_steps_of_adam(name):
    case, tx = CASES[name].make(), optax.adam(1e-2, eps=1e-4)
    mesh = mesh_of(MESHES["2x4"])
    state = zerojax.shard_train_state(state_of(case, tx), stage=3, mesh=mesh, **apart(name))
    schedule = zerojax.Schedule(**STEPS.get(name, {}))
    step, args = zerojax.train_step(case.loss, schedule=schedule), arguments(case, slice(None))
    tx = optax.selective_transform(tx, freeze_mask=is_frozen(case))
    params = decoded(case)
    opt_state = tx.init(params)
    for _ in range(3):
        state, metrics = step(state, *args)
        (loss, _), grads = mean(of_devices(name, params))
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        assert_near(metrics["loss"], loss, "the loss", CASES[name].close)
    assert ("are rolled up" in repr(step)) == (schedule.roll is True)
    trained = dequantize(zerojax.gather_params(state))
    assert_near(trained, params, "parameters", 10 * CASES[name].close)


@pytest.mark.parametrize("name", slow_but(["gpt_oss", "tutel", "equinox", "scan_over_experts"]))
def test_rows_travel_and_what_gathers_experts_is_named(name):
    case, expects = CASES[name].make(), GAPS.get(name, CASES[name].expects)
    plan = zerojax.plan(state_of(case), stage=3, mesh=mesh_of(MESHES["2x4"]), **apart(name))
    step = zerojax.train_step(case.loss, plan=plan)
    step.trace(plan.abstract(), *arguments(case, slice(None)))
    gathers = set(re.findall(r"experts, gathered for (\w+)", repr(step)))
    assert gathers == ({expects} - {KEPT})
    assert ("of rows for their experts" in repr(step)) == (expects == KEPT or name == "gpt_oss")
