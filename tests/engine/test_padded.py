"""Padded weights in loops: exact, gathered once, never copied to drop or add their padding."""

import math
import re

import jax
import numpy as np
import pytest
from jax.extend import core as jex_core

import zerojax
from tests.collectives import collectives, scans_of
from tests.conftest import make_mesh, mostly_slow
from tests.engine.losses import BATCH, DIM, LAYERS, PARAMS, PROGRAMS, kept_by_loops
from tests.reference import assert_close
from zerojax._forecast import presets

DEVICES = 7
PADDED = math.ceil(DIM / DEVICES) * DEVICES
ROWS = jax.tree.map(lambda x: x[: 2 * DEVICES], BATCH)
NARROW = {"mixed_dtypes", "wider_before_the_scan", "unstacked"}  # bfloat16 somewhere
QUICK = {
    "plain_scan", "several_stacks", "remat_nothing", "remat_everything", "remat_in_the_middle",
    "groups_under_remat", "frozen_inside", "weight_normalisation", "weights_in_the_carry",
}  # fmt: skip


def padded_grad(loss, **options):
    """Returns the gradients of parameters that all rest padded."""
    plan = zerojax.plan({"params": PARAMS}, mesh=make_mesh(DEVICES), min_shard_size=1)
    params = plan.place({"params": PARAMS})["params"]
    assert params["a"]["w"].shape == (LAYERS, PADDED, DIM)
    return jax.jit(zerojax.value_and_grad(loss, plan, **options)), params, plan


def assert_no_padding(grads, plan):
    """Asserts that gradients are padded as their parameters, with zeros."""
    for got, leaf in zip(jax.tree.leaves(grads), plan.params, strict=True):
        rest = np.array(got)
        rest[tuple(map(slice, leaf.shape))] = 0
        assert got.shape == leaf.padded_shape and not rest.any(), leaf.path


@pytest.mark.parametrize(
    ("name", "prefetch"),
    mostly_slow(
        [(name, prefetch) for name in PROGRAMS for prefetch in (0, 1)],
        lambda name, prefetch: name in QUICK and (prefetch or name == "remat_nothing"),
    ),
)
def test_gradients_match_jax_grad_and_their_padding_is_zero(name, prefetch):
    wanted_loss, wanted = jax.jit(jax.value_and_grad(PROGRAMS[name]))(PARAMS, ROWS)
    grad, params, plan = padded_grad(PROGRAMS[name], prefetch=prefetch)
    value, grads = grad(params, ROWS)
    tolerance = 2e-2 if name in NARROW else 1e-6
    assert float(value) == pytest.approx(float(wanted_loss), rel=tolerance)
    assert_no_padding(grads, plan)
    logical = jax.tree.map(lambda g, p: g[tuple(map(slice, p.shape))], grads, PARAMS)
    assert_close(logical, wanted, tolerance)


def test_what_a_user_put_into_the_padding_is_in_no_gradient():
    """The gradients of these weights are written over them."""
    grad, params, plan = padded_grad(PROGRAMS["remat_nothing"], prefetch=0)
    _, grads = grad(jax.tree.map(lambda x: x + 1, params), ROWS)
    assert_no_padding(grads, plan)


@pytest.mark.parametrize("name", ["plain_scan", "remat_nothing", "remat_everything"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_no_weight_is_kept_for_backward_open_or_closed(name, prefetch):
    """`everything` would keep what is opened inside the checkpoint."""
    grad, params, _ = padded_grad(PROGRAMS[name], prefetch=prefetch)
    loops, stacked = kept_by_loops(grad.trace(params, ROWS).jaxpr, DIM * DIM)
    assert loops and not stacked


def test_layers_are_gathered_and_reduced_along_their_first_dimension():
    """XLA reads and writes a part of an array in place if it is contiguous."""
    grad, params, _ = padded_grad(PROGRAMS["remat_nothing"], prefetch=1)
    jaxpr = grad.trace(params, ROWS).jaxpr
    loops = [e for e in scans_of(jaxpr, nested=True) if LAYERS - 2 <= e.params["length"] <= LAYERS]
    found = [eqn for loop in loops for eqn in _eqns(loop.params["jaxpr"])]
    gathers = [e for e in found if e.primitive.name == "all_gather"]
    scatters = [e for e in found if e.primitive.name == "reduce_scatter"]
    assert gathers and {e.params["all_gather_dimension"] for e in gathers} == {0}
    assert scatters and {e.params["scatter_dimension"] for e in scatters} == {0}
    assert not [e for e in found if e.primitive.name == "pad" and e.outvars[0].aval.ndim > 1]


def _eqns(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from _eqns(inner)


def test_without_regathering_a_weight_is_kept_once():
    grad, params, _ = padded_grad(PROGRAMS["plain_scan"], regather=False, prefetch=0)
    _, stacked = kept_by_loops(grad.trace(params, ROWS).jaxpr, DIM * DIM)
    assert stacked == [(LAYERS, DIM, DIM)]


def test_each_padded_weight_is_gathered_twice_and_reduced_once():
    grad, params, plan = padded_grad(PROGRAMS["plain_scan"], prefetch=0)
    found = list(collectives(grad.trace(params, ROWS).jaxpr))
    total = sum(math.prod(x.padded_shape) for x in plan.params if x.path.startswith("params/a"))
    assert sum(c.moved for c in found if c.kind == "all-gather") == 2 * total
    assert sum(c.moved for c in found if c.kind == "reduce-scatter") == total


@pytest.mark.gpu_code
def test_on_gpus_nothing_copies_a_weight_for_its_padding():
    mesh = zerojax.aot.mesh("20xH100", per_host=4)
    model = presets.Gpt(8, 1024, 8, vocab=1024, tokens=128)
    plan = zerojax.plan(model.make_state, mesh=mesh)
    assert all(leaf.rest.padding for leaf in plan.params)
    batch = zerojax.aot.batch(model.batch(4 * plan.size), plan)
    text = zerojax.train_step(model.loss).lower(plan.abstract(), batch).compile().as_text()
    if jax.__version_info__ < (0, 12):
        return  # its XLA has cuBLAS read and write in place outside of loops only
    fused = re.findall(r"^  %(\S+) = \(?bf16\[(\d+),1024\]\S* fusion\(", text, re.MULTILINE)
    copied = [rows for name, rows in fused if re.match("wrapped_slice|loop_(slice|pad)", name)]
    # XLA copies what is multiplied before a GELU, and the table of embeddings outside the loops.
    assert copied.count("4096") <= 4 and set(copied) <= {"4096", "1040"}
    in_place = set(re.findall(r"%dynamic_slice_fusion\S* = \(?bf16\[(\d+),1024\]", text))
    assert {"3080", "1040", "4100"} <= in_place  # where gradients are written
