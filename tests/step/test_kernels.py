"""Pallas kernels in split sequences: each device runs its share of an axis of their grid."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import zerojax
from tests.support.compared import mesh_of

ROWS, TOKENS, HEADS, DIM, BLOCK = 2, 16, 4, 8, 4
SPLIT: dict[str, Any] = {"stage": 3, "min_shard_size": 0, "sequence": "sequence"}


def call(kernel: Any, like: jax.Array, **specs: Any) -> Any:
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True, **specs)


def attend(start, q, k, v, out):
    """Causal attention of queries from `start` on."""
    scores = q[...] @ k[...].T
    row, column = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, dim) for dim in (0, 1))
    scores = jnp.exp(jnp.where(start + row >= column, scores, -jnp.inf))
    out[...] = scores / scores.sum(-1, keepdims=True) @ v[...]


def by_vmap(q, k, v):
    one = lambda *xs: call(functools.partial(attend, 0), xs[0])(*xs)
    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v)


def by_grid(q, k, v, head=lambda h: h, asked=(2,)):
    """`head` says which keys a head has, `asked` which axes of the grid the kernel asks for."""
    group = q.shape[2] // k.shape[2]
    kernel = lambda *refs: attend(sum(map(pl.program_id, asked)) * BLOCK, *refs)
    ours = pl.BlockSpec((None, BLOCK, None, DIM), lambda b, h, i: (b, i, h, 0))
    keys = pl.BlockSpec((None, TOKENS, None, DIM), lambda b, h, i: (b, 0, head(h) // group, 0))
    grid, specs = (q.shape[0], HEADS, TOKENS // BLOCK), [ours, keys, keys]
    return call(kernel, q, grid=grid, in_specs=specs, out_specs=ours)(q, k, v)


def plain(q, k, v):
    k, v = (jnp.repeat(x, HEADS // x.shape[2], 2) for x in (k, v))
    scores = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k)) * jnp.tri(TOKENS)
    return jnp.einsum("bhts,bshd->bthd", scores / scores.sum(-1, keepdims=True), v)


def squares(x):
    def kernel(x, out):
        out[...] = x[...] ** 2

    spec = pl.BlockSpec((None, BLOCK, x.shape[2]), lambda b, i: (b, i, 0))
    grid = x.shape[0], x.shape[1] // BLOCK
    return call(kernel, x, grid=grid, in_specs=[spec], out_specs=spec)(x)


def with_gradient(kernel: Any, like: Any) -> Any:
    run = jax.custom_vjp(lambda *xs: kernel(*xs))
    run.defvjp(lambda *xs: (kernel(*xs), xs), lambda xs, grad: jax.vjp(like, *xs)[1](grad))
    return run


def loss_of(attention: Any, keys: int = HEADS) -> Any:
    def loss(params, x):
        x = with_gradient(squares, jnp.square)(x @ params["up"])
        q, k, v = jnp.split(x @ params["qkv"], [HEADS * DIM, (HEADS + keys) * DIM], -1)
        parts = [y.reshape(*y.shape[:2], -1, DIM) for y in (q, k, v)]
        out = with_gradient(attention, plain)(*parts).reshape(*x.shape[:2], -1)
        return jnp.mean((out @ params["down"]) ** 2)

    return loss


def params_of(keys: int = HEADS) -> Any:
    shapes = {"up": (32, 32), "qkv": (32, (HEADS + 2 * keys) * DIM), "down": (HEADS * DIM, 32)}
    each = zip(shapes.items(), jax.random.split(jax.random.key(0), 3), strict=True)
    return {name: jax.random.normal(key, shape) / 9 for (name, shape), key in each}


def batch(rows: int = ROWS) -> Any:
    return np.asarray(jax.random.normal(jax.random.key(1), (rows, TOKENS, 32)))


@pytest.mark.parametrize(
    ("attention", "keys", "size"),
    [(by_vmap, HEADS, 4), (by_vmap, HEADS, 2), (by_grid, HEADS, 4), (by_grid, 2, 2)],
)
def test_kernels_run_on_a_share_of_the_heads_and_of_the_tokens(attention, keys, size):
    loss, params, x = loss_of(attention, keys), params_of(keys), batch()
    state = zerojax.ModuleState.create(params, optax.sgd(1.0))
    mesh = mesh_of({"data": 2, "sequence": size})
    state = zerojax.shard_train_state(state, mesh=mesh, **SPLIT)
    step = zerojax.train_step(loss, donate=False)
    new, metrics = step(state, x)
    wanted, grads = jax.jit(jax.value_and_grad(loss))(params, x)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    close = lambda old, new, grad: np.testing.assert_allclose(old - new, grad, atol=1e-6)
    jax.tree.map(close, params, jax.device_get(new.params), grads)
    # Queries, keys, values and results, of one row.
    sent = (2 * HEADS + 2 * keys) * DIM * TOKENS * 4 // size
    kib = f"{sent / 1024:.1f} KiB of tokens in exchange for heads"
    assert kib in repr(step) and "all of an operand" not in repr(step)


@pytest.mark.parametrize(
    ("attention", "keys"),
    [
        (by_grid, 2),  # which 4 devices do not divide
        (functools.partial(by_grid, head=lambda h: HEADS - 1 - h), HEADS),
        (functools.partial(by_grid, asked=(1, 2)), HEADS),
    ],
)
def test_a_kernel_that_cannot_be_shared_is_refused(attention, keys):
    plan = zerojax.plan(
        {"params": params_of(keys)}, mesh=mesh_of({"data": 2, "sequence": 4}), **SPLIT
    )
    run = zerojax.value_and_grad(loss_of(attention, keys), plan)
    with pytest.raises(ValueError, match=r"pallas_call \(.* mixes tokens.*divide their heads"):
        jax.eval_shape(run, plan.abstract()["params"], batch())


def with_memory(x, **params: Any):
    """Sums over rows, which go from one place of the grid to the next in scratch memory."""

    def kernel(x, out, total):
        @pl.when(pl.program_id(1) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...]
        out[...] = total[...]

    spec = pl.BlockSpec((None, TOKENS, None, DIM), lambda h, b: (b, 0, h, 0))
    specs = {"grid": (HEADS, x.shape[0]), "in_specs": [spec], "out_specs": spec}
    params = {"compiler_params": pltpu.CompilerParams(**params)}
    return call(kernel, x, scratch_shapes=[pltpu.VMEM((TOKENS, DIM), "f")], **specs, **params)(x)


def with_written_input(x):
    def kernel(x, total, out):
        total[...] += x[...]
        out[...] = total[...]

    spec = pl.BlockSpec((None, TOKENS, None, DIM), lambda h, b: (b, 0, h, 0))
    whole = pl.BlockSpec((TOKENS, DIM), lambda h, b: (0, 0))
    specs = {"grid": (HEADS, x.shape[0]), "in_specs": [spec, whole], "out_specs": spec}
    return call(kernel, x, **specs)(x, jnp.zeros((TOKENS, DIM)))


def with_whole_alias(x):
    def kernel(x, out):
        out[...] = jnp.ones_like(out)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    half = pl.BlockSpec((None, TOKENS // 2, None, DIM), lambda b, h: (b, 0, h, 0))
    specs = {"in_specs": [whole], "out_specs": half, "input_output_aliases": {0: 0}}
    return call(kernel, x, grid=(x.shape[0], HEADS), **specs)(2 * x)


def with_dynamic_grid(x):
    def kernel(x, out):
        out[...] = 2 * x[...]

    spec = pl.BlockSpec((None, TOKENS, None, DIM), lambda b, h: (b, 0, h, 0))
    rows = jnp.int32(x.shape[0]) + (x[0, 0, 0, 0] > 99)
    return call(kernel, x, grid=(rows, HEADS), in_specs=[spec], out_specs=spec)(x)


def loss_of_heads(kernel: Any) -> Any:
    def loss(params, x):
        heads = (x @ params["up"]).reshape(*x.shape[:2], HEADS, DIM)
        return jnp.mean(heads) + jnp.mean(kernel(jax.lax.stop_gradient(heads)) ** 2)

    return loss


@pytest.mark.parametrize(
    "kernel", [with_memory, with_written_input, with_whole_alias, with_dynamic_grid]
)
def test_a_kernel_whose_places_know_of_each_other_is_refused(kernel):
    plan = zerojax.plan({"params": params_of()}, mesh=mesh_of({"data": 2, "sequence": 4}), **SPLIT)
    run = zerojax.value_and_grad(loss_of_heads(kernel), plan)
    with pytest.raises(ValueError, match=r"pallas_call .* mixes tokens.*scratch memory say which"):
        jax.eval_shape(run, plan.abstract()["params"], batch(4))


def test_a_kernel_says_along_which_axes_scratch_memory_keeps_nothing():
    semantics = (pltpu.PARALLEL, "arbitrary")
    loss = loss_of_heads(functools.partial(with_memory, dimension_semantics=semantics))
    plan = zerojax.plan({"params": params_of()}, mesh=mesh_of({"data": 1, "sequence": 4}), **SPLIT)
    got, _ = jax.jit(zerojax.value_and_grad(loss, plan))(params_of(), batch())
    np.testing.assert_allclose(got, loss(params_of(), batch()), rtol=1e-5)


def test_a_kernel_that_adds_up_along_its_grid_is_refused():
    def kernel(x, out):
        out[...] += x[...].sum(0)

    def loss(params, x):
        ours, sums = (
            pl.BlockSpec((BLOCK, 32), lambda i: (i, 0)),
            pl.BlockSpec((32,), lambda i: (0,)),
        )
        y = (x @ params["up"])[0]
        spec = {"grid": (TOKENS // BLOCK,), "in_specs": [ours], "out_specs": sums}
        return jnp.mean(call(kernel, y[0], **spec)(jax.lax.stop_gradient(y)))

    plan = zerojax.plan({"params": params_of()}, mesh=mesh_of({"data": 2, "sequence": 4}), **SPLIT)
    with pytest.raises(ValueError, match="pallas_call"):
        jax.eval_shape(zerojax.value_and_grad(loss, plan), plan.abstract()["params"], batch())
