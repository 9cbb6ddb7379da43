"""Sequences that the library splits over a mesh axis: losses and gradients of one device."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import shared_with_ci
from tests.support.compared import mesh_of
from tests.support.reference import assert_near, split_aux
from tests.support.sequences import CASES, GATHERS, SPLIT, Case
from tests.support.sequences.table import heads_of, normal

MESHES = {
    "2x4": {"data": 2, "sequence": 4},
    "1x8": {"data": 1, "sequence": 8},
    "1x7": {"data": 1, "sequence": 7},
}
# Each on one mesh in turn, some in CI; EVERYWHERE on all of them. All others are slow.
NAMES = """
attention_is_causal attention_local_window attention_by_queries window_by_chunks alibi
rope_of_positions packed_documents bert t5 whisper vit diffusion batch_norm linen_scan_grouped
linen_dropout nnx_loop equinox flat_labels chunked_by_scan losses_by_token preferences
same_convolution shift_by_roll running_mean max_pooling_with_ties argmax_over_tokens sorted_tokens
learned_steps physics experts_with_capacity linear_attention_by_scan associative_scan mamba
accelerate_4177_windows accelerate_4177_linear gated_cell verl_2857_by_token
"""
QUICK = NAMES.split()
EVERYWHERE = ["linen_scan_grouped", "t5", "accelerate_4177_windows"]
STEPS = ["linen_loop_repeated", "accelerate_4177_linear", "verl_2857_by_sequence"]


def turns() -> list[Any]:
    rows = []
    for at, name in enumerate(QUICK):
        for turn in range(3) if name in EVERYWHERE else [at]:
            rows.append((name, list(MESHES)[turn % 3], (at + turn // 3) % 4))
    return rows


def product() -> list[Any]:
    return [row for row in itertools.product(CASES, MESHES, range(4)) if row not in turns()]


# Exact, but operations that have no rule yet make an operand whole.
GAPS = ["attention_by_queries", "mlp_mixer"]


def sequences(name: str) -> zerojax.Sequences:
    """Where a case expects to be split, no more may be gathered than the ids of segments."""
    is_split = CASES[name].expects == SPLIT and name not in GAPS
    return zerojax.Sequences("sequence", most_gathered=0.01 if is_split else math.inf)


def arguments(case: Case) -> tuple[Any, ...]:
    return (case.batch,) if case.rng is None else (case.batch, case.rng)


@functools.cache
def on_one_device(name: str, parts: int) -> Any:
    """(loss, gradients, aux). What is drawn, and statistics, are those of parts of the rows: the
    axis of the rows has a key for each."""
    case = CASES[name].make()
    parts = parts if case.rng is not None or case.fields else 1
    loss = functools.partial(case.loss, **case.fields)
    run = jax.jit(jax.value_and_grad(lambda *args: split_aux(loss(*args)), has_aux=True))
    results = []
    for index in range(parts):
        cut = lambda x, i=index: np.split(x, parts)[i]
        key = () if case.rng is None else (jax.random.fold_in(case.rng, index),)
        results.append(run(case.params, jax.tree.map(cut, case.batch), *key))
    joined = lambda *xs: np.concatenate(xs) if xs[0].ndim and not case.fields else np.mean(xs, 0)
    (value, aux), grads = jax.device_get(results[0])
    if parts > 1:
        value, grads = jax.tree.map(lambda *xs: np.mean(xs, 0), *[(r[0][0], r[1]) for r in results])
        aux = jax.tree.map(joined, *[r[0][1] for r in results])
    return value, grads, aux


def compare(name: str, mesh: str, stage: int) -> None:
    case, sizes = CASES[name].make(), MESHES[mesh]
    plan = zerojax.plan(
        {"params": case.params}, stage=stage, mesh=mesh_of(sizes), sequence=sequences(name)
    )
    options = {} if case.specs is None else {"batch_specs": case.specs}
    loss = functools.partial(case.loss, **case.fields)
    run = zerojax.value_and_grad(loss, plan, has_aux=case.has_aux, **options)
    params = plan.place({"params": case.params})["params"]
    result, grads = jax.jit(run)(params, *arguments(case))
    value, aux = split_aux(result)
    unpadded = lambda grad, param: grad[tuple(map(slice, param.shape))]
    grads = jax.tree.map(unpadded, jax.device_get(grads), case.params)
    wanted = on_one_device(name, sizes["data"])
    assert_near(value, wanted[0], "the loss")
    assert_near(grads, wanted[1], "gradients")
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted[2]):
        assert_near(dict(jax.tree_util.tree_leaves_with_path(aux))[path], leaf, f"aux {path}")


@pytest.mark.parametrize(("name", "mesh", "stage"), shared_with_ci(turns()))
def test_losses_and_gradients_are_those_of_one_device(name, mesh, stage):
    compare(name, mesh, stage)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "stage"), product())
def test_on_all_meshes_at_all_stages(name, mesh, stage):
    compare(name, mesh, stage)


@pytest.mark.parametrize("name", STEPS)
def test_three_steps_of_adam(name):
    case = CASES[name].make()
    tx = optax.adam(1e-2, eps=1e-4)
    made = lambda: zerojax.ModuleState.create(jax.tree.map(jnp.array, case.params), tx)
    mesh = mesh_of(MESHES["2x4"])
    state = zerojax.shard_train_state(made(), stage=3, mesh=mesh, sequence=sequences(name))
    step = zerojax.train_step(case.loss)

    @jax.jit
    def plain(state, batch):
        loss, grads = jax.value_and_grad(case.loss)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    wanted = made()
    for _ in range(3):
        state, metrics = step(state, case.batch)
        wanted, loss = plain(wanted, case.batch)
        assert_near(metrics["loss"], loss, "the loss")
    assert_near(zerojax.gather_params(state), wanted.params, "parameters")


@pytest.mark.parametrize("name", [name for name, row in CASES.items() if row.expects == GATHERS])
def test_an_operand_that_would_be_made_whole_is_refused(name):
    case = CASES[name].make()
    least = zerojax.Sequences("sequence", most_gathered=0)
    plan = zerojax.plan({"params": case.params}, mesh=mesh_of(MESHES["2x4"]), sequence=least)
    options = {} if case.specs is None else {"batch_specs": case.specs}
    run = jax.jit(zerojax.value_and_grad(case.loss, plan, has_aux=case.has_aux, **options))
    with pytest.raises(ValueError, match=r"mixes tokens.*most_gathered=0%"):
        run.trace(case.params, *arguments(case))


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "sends"),
    [
        (24, 48, 2, "36.0 KiB of keys and values"),  # too few heads
        (96, 24, 4, "18.0 KiB of keys and values"),
        (24, 96, 4, "22.5 KiB of tokens in exchange for heads"),
        (24, 24, 4, "9.0 KiB of tokens in exchange for heads"),
    ],
)
def test_attention_sends_the_cheaper_of_keys_and_heads(queries, keys, heads, sends):
    """In each of 3 layers."""

    def loss(params, batch):
        def layer(x, w):
            q, k, v = (heads_of(a @ w, heads) for a in (x, batch["y"], batch["y"]))
            probs = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bqhk", q, k))
            return jnp.einsum("bkhd,bqhk->bqhd", v, probs).reshape(x.shape), None

        return jnp.mean(jax.lax.scan(layer, batch["x"], params["w"])[0] ** 2)

    lines = traced(loss, {"x": normal(4, queries, 16), "y": normal(4, keys, 16)})[0]
    assert lines == [f"{sends} in forward", "4 B of sums over tokens in forward"]


def traced(loss: Any, *args: Any) -> tuple[list[str], str]:
    """What a step says that devices receive, and its jaxpr."""
    make = lambda: zerojax.ModuleState.create({"w": jnp.ones((3, 16, 16))}, optax.sgd(0.1))
    plan = zerojax.plan(make, mesh=mesh_of(MESHES["2x4"]), sequence="sequence")
    step = zerojax.train_step(loss, plan=plan)
    jaxpr = str(step.trace(plan.abstract(), *args).jaxpr)
    lines = [line.split("receives ")[1] for line in repr(step).splitlines() if "receives" in line]
    return lines, jaxpr


def test_random_numbers_are_drawn_for_a_block():
    def loss(params, x, rng):
        x = x @ params["w"][0]
        return jnp.mean(jnp.where(jax.random.bernoulli(rng, 0.8, x.shape), x, 0) ** 2)

    jaxpr = traced(loss, normal(4, 24, 16), jax.random.key(0))[1]
    assert "random_bits" not in jaxpr and "threefry2x32" in jaxpr
