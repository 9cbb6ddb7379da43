"""ZeRO-3 by hand: `shards`, `gather` and `scan` against `jax.grad` of the plain program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests import draw
from tests.collectives import collectives
from tests.conftest import make_mesh
from zerojax import manual

LAYERS, DIM = 4, 16
PARAMS = {
    "embed": draw.normal(0, 32, DIM),
    "layers": {
        "w": draw.normal(1, LAYERS, DIM, DIM) / 4,
        "odd": jnp.ones((LAYERS, 1)),  # too short to be padded
    },
    "step": jnp.arange(LAYERS),
}
TOKENS = draw.integers(2, 32, 12, 5)


def whole_loss(params, tokens, scan=jax.lax.scan, gather=lambda x: x, **options):
    x = gather(params["embed"])[tokens]
    shift = x.sum() * 1e-3  # closed over by the body
    body = lambda x, p: (jnp.tanh(x @ p["w"]) * p["odd"].mean() + shift, x.mean())
    x, ys = scan(body, x, params["layers"], **options)
    return (x**2).mean() + ys.sum()


def placed(devices):
    """Over three devices `embed` rests as [33, 16], and `w` as [4, 18, 16]."""
    plan = zerojax.plan({"params": PARAMS}, stage=3, min_shard_size=1, mesh=make_mesh(devices))
    return plan, plan.place({"params": PARAMS})["params"]


def mapped(plan, function, out_specs):
    """A function of the parameters' shards, and of a batch if it takes one."""
    specs = manual.param_specs(plan)
    return lambda *args: jax.shard_map(
        lambda params, *batch: function(manual.shards(params, plan), *batch),
        mesh=plan.mesh,
        in_specs=(specs, P("data"))[: len(args)],
        out_specs=out_specs,
        check_vma=False,
    )(*args)


def grad_by_hand(plan, **options):
    def run(parts, tokens):
        def loss(parts):
            return whole_loss(parts, tokens, manual.scan, manual.gather, **options) / plan.size

        value, grads = jax.value_and_grad(loss, allow_int=True)(parts)
        grads["layers"]["odd"] = jax.lax.psum(grads["layers"]["odd"], "data")
        grads["step"] = parts["step"]  # an integer has no gradient
        marked = lambda g: hasattr(g, "dim")
        plain = jax.tree.map(lambda g: g.data if marked(g) else g, grads, is_leaf=marked)
        return jax.lax.psum(value, "data"), plain

    return jax.jit(mapped(plan, run, (P(), manual.param_specs(plan))))


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (4, {"prefetch": 0}),
        (4, {"prefetch": 1, "reverse": True}),
        (3, {"prefetch": 1}),
        (3, {"prefetch": 0, "unroll": 2, "length": LAYERS}),
    ],
)
def test_gradients_are_those_of_jax_grad(devices, options):
    plan, params = placed(devices)
    value, grads = grad_by_hand(plan, **options)(params, TOKENS)
    plain = {name: option for name, option in options.items() if name != "prefetch"}
    parts = TOKENS.reshape(devices, -1, *TOKENS.shape[1:])
    loss = functools.partial(whole_loss, **plain)
    mean = lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, parts))
    wanted_value, wanted = jax.jit(jax.value_and_grad(mean, allow_int=True))(PARAMS)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-6)
    for name in ("embed", "layers"):
        for grad, want in zip(*map(jax.tree.leaves, (grads[name], wanted[name])), strict=True):
            logical = np.zeros(grad.shape, np.float32)  # padding has no gradient
            logical[tuple(map(slice, want.shape))] = want
            np.testing.assert_allclose(grad, logical, rtol=1e-5, atol=1e-6)
    rows = -(-DIM // devices)
    assert grads["layers"]["w"].addressable_shards[0].data.shape == (LAYERS, rows, DIM)


@pytest.mark.parametrize("devices", [4, 3])
def test_each_layer_is_gathered_and_reduced_in_its_iteration(devices):
    plan, params = placed(devices)
    traced = grad_by_hand(plan, prefetch=0).trace(params, TOKENS)
    sent = list(collectives(traced.jaxpr))
    size = params["layers"]["w"].size  # with the padding
    inside = [(c.kind, c.moved) for c in sent if c.depth == 1]
    assert sorted(inside) == [("all-gather", size)] * 2 + [("reduce-scatter", size)]
    outside = [c for c in sent if c.depth == 0 and c.kind != "all-reduce"]
    assert {c.elements for c in outside} == {params["embed"].size}


def test_gathered_parameters_have_another_dtype_and_no_padding():
    plan, params = placed(3)
    run = mapped(plan, lambda parts: manual.gather(parts, jnp.bfloat16), P())
    whole = jax.jit(run)(params)
    narrow = lambda x: x.astype("bfloat16") if x.dtype == jnp.float32 else x
    jax.tree.map(np.testing.assert_array_equal, whole, jax.tree.map(narrow, PARAMS))
    assert whole["embed"].dtype == jnp.bfloat16 and whole["step"].dtype == jnp.int32
    sent = [c for c in collectives(jax.make_jaxpr(run)(params)) if c.kind == "all-gather"]
    dtypes = {c.dtype: c.moved for c in sent}
    assert dtypes.keys() == {"bfloat16", "int32"} and dtypes["int32"] == params["step"].size


def test_one_scan_reads_the_parameters_of_two_plans():
    """A student's and a teacher's: of one path and two dimensions, and of two paths."""
    w, x, mesh = PARAMS["layers"]["w"][:, :, :8], jnp.ones((2, DIM)), make_mesh(4)
    layer = lambda x, stacks: (jnp.tanh(x @ stacks[0]["w"] @ sum(jax.tree.leaves(stacks)).T), None)
    of = functools.partial(zerojax.plan, mesh=mesh, min_shard_size=1, stacked="")
    plan, renamed = (of({"params": {name: w}}) for name in "wv")
    for other in (renamed, of({"params": {"w": w}}, overrides={"w": P(None, None, "data")})):
        trees = [{leaf.path[-1]: w for leaf in each.params} for each in (plan, other)]

        def run(*trees):
            marked = tuple(map(manual.shards, trees, (plan, other)))
            return manual.scan(layer, x, marked)[0]

        specs = tuple(map(manual.param_specs, (plan, other)))
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        want, _ = jax.lax.scan(layer, x, tuple(trees))
        np.testing.assert_allclose(jax.jit(run)(*trees), want, rtol=1e-5)


def test_plain_arrays_pass():
    x, ys = manual.scan(lambda c, x: (c + x, c), 0, jnp.arange(4), reverse=True)
    assert int(x) == 6 and ys.tolist() == [6, 5, 3, 0]
    assert manual.gather({"a": 1}) == {"a": 1}
