"""ZeRO-3 by hand: `shards`, `gather` and `scan` against `jax.grad` of the plain program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.collectives import collectives

LAYERS, DIM = 4, 16
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "embed": jax.random.normal(KEYS[0], (32, DIM)),
    "layers": {
        "w": jax.random.normal(KEYS[1], (LAYERS, DIM, DIM)) / 4,
        "odd": jnp.ones((LAYERS, 3)),  # no dimension that 8 divides
    },
    "step": jnp.arange(LAYERS),
}
TOKENS = jax.random.randint(KEYS[2], (16, 5), 0, 32)


def layer(x, p):
    return jnp.tanh(x @ p["w"]) * p["odd"].mean(), x.mean()


def whole_loss(params, tokens, scan=jax.lax.scan, gather=lambda x: x, **options):
    x = gather(params["embed"])[tokens]
    shift = x.sum() * 1e-3  # closed over by the body
    body = lambda x, p: (layer(x, p)[0] + shift, x.mean())
    x, ys = scan(body, x, params["layers"], **options)
    return (x**2).mean() + ys.sum()


def grad_by_hand(plan, **options):
    specs = zerojax.param_specs(plan)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=plan.mesh, in_specs=(specs, P("data")), out_specs=(P(), specs),
        check_vma=False,
    )  # fmt: skip
    def run(params, tokens):
        def loss(parts):
            made = whole_loss(parts, tokens, zerojax.scan, zerojax.gather, **options)
            return made / plan.size

        parts = zerojax.shards(params, plan)
        value, grads = jax.value_and_grad(loss, allow_int=True)(parts)
        grads["layers"]["odd"] = jax.lax.psum(grads["layers"]["odd"], "data")
        grads["step"] = jnp.zeros_like(params["step"])
        marked = lambda g: hasattr(g, "dim")
        plain = jax.tree.map(lambda g: g.data if marked(g) else g, grads, is_leaf=marked)
        return jax.lax.psum(value, "data"), plain

    return run


def placed():
    plan = zerojax.plan({"params": PARAMS}, stage=3, min_shard_size=1)
    return plan, plan.place({"params": PARAMS})["params"]


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}, {"length": LAYERS}])
def test_equals_jax_grad(prefetch, options):
    plan, params = placed()
    value, grads = grad_by_hand(plan, prefetch=prefetch, **options)(params, TOKENS)
    loss = functools.partial(whole_loss, **options)
    parts = TOKENS.reshape(8, -1, *TOKENS.shape[1:])
    mean = lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, parts))
    want_value, want = jax.jit(jax.value_and_grad(mean, allow_int=True))(PARAMS)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    for name in ("embed", "layers"):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, grads[name], want[name])
    assert grads["layers"]["w"].addressable_shards[0].data.shape == (LAYERS, DIM // 8, DIM)


def test_gathers_and_scatters_each_layer_in_its_iteration():
    plan, params = placed()
    found = list(collectives(grad_by_hand(plan, prefetch=0).trace(params, TOKENS).jaxpr))
    size = PARAMS["layers"]["w"].size
    inside = [(c.kind, c.moved) for c in found if c.depth == 1]
    assert sorted(inside) == [("all-gather", size)] * 2 + [("reduce-scatter", size)]
    outside = [c for c in found if c.depth == 0 and c.kind != "all-reduce"]
    assert {c.elements for c in outside} == {PARAMS["embed"].size}


def test_gather_in_another_dtype():
    plan, params = placed()
    run = jax.shard_map(
        lambda p: zerojax.gather(zerojax.shards(p, plan), jnp.bfloat16),
        mesh=plan.mesh, in_specs=(zerojax.param_specs(plan),), out_specs=P(), check_vma=False,
    )  # fmt: skip
    whole = jax.jit(run)(params)
    assert whole["embed"].dtype == jnp.bfloat16 and whole["step"].dtype == PARAMS["step"].dtype
    np.testing.assert_array_equal(whole["embed"], PARAMS["embed"].astype(jnp.bfloat16))
    gathered = [c for c in collectives(jax.make_jaxpr(run)(params)) if c.kind == "all-gather"]
    assert {c.dtype for c in gathered} == {"bfloat16"}


def test_plain_arrays_pass():
    x, ys = zerojax.scan(lambda c, x: (c + x, c), 0, jnp.arange(4), reverse=True)
    assert int(x) == 6 and ys.tolist() == [6, 5, 3, 0]
    assert zerojax.gather({"a": 1}) == {"a": 1}


def test_shards_need_stage_3():
    plan = zerojax.plan({"params": PARAMS}, stage=2)
    with pytest.raises(ValueError, match=r"zerojax.plan\(state, stage=3\)"):
        zerojax.shards(PARAMS, plan)


def test_a_stack_sharded_along_its_layers_is_refused():
    stack = {"w": jnp.ones((8, 3))}
    spec = {"w": P("data")}
    plan = zerojax.plan({"params": stack}, stage=3, overrides=spec)

    def run(params):
        return zerojax.scan(lambda c, p: (c, p["w"]), 0.0, zerojax.shards(params, plan))[1]

    mapped = jax.shard_map(run, mesh=plan.mesh, in_specs=(spec,), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match="stacked="):
        jax.jit(mapped)(stack)


def test_shards_are_checked_against_the_plan():
    plan, params = placed()
    inside = lambda p: zerojax.gather(zerojax.shards(p, plan))
    with pytest.raises(ValueError, match=r"in_specs=zerojax.param_specs\(plan\)"):
        inside(params)  # whole, and outside of shard_map
    with pytest.raises(ValueError, match="not those of the plan"):
        zerojax.shards({"other": jnp.ones(8)}, plan)
