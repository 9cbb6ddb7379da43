"""ZeRO-3 by hand: `shards`, `gather` and `scan` against `jax.grad` of the plain program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.collectives import collectives
from tests.conftest import make_mesh

LAYERS, DIM = 4, 16
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "embed": jax.random.normal(KEYS[0], (32, DIM)),
    "layers": {
        "w": jax.random.normal(KEYS[1], (LAYERS, DIM, DIM)) / 4,
        "odd": jnp.ones((LAYERS, 2)),  # too short to be padded
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


def placed(devices=8):
    """Over five devices `embed` rests as [35, 16], and `w` as [4, 20, 16]."""
    plan = zerojax.plan({"params": PARAMS}, stage=3, min_shard_size=1, mesh=make_mesh(devices))
    return plan, plan.place({"params": PARAMS})["params"]


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}, {"length": LAYERS}])
def test_equals_jax_grad(prefetch, options):
    plan, params = placed()
    grads = check_equal(plan, params, TOKENS, prefetch=prefetch, **options)
    assert grads["layers"]["w"].addressable_shards[0].data.shape == (LAYERS, DIM // 8, DIM)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_padded_parameters_equal_jax_grad(prefetch):
    plan, params = placed(devices=5)
    assert params["embed"].shape == (35, DIM) and params["layers"]["w"].shape == (LAYERS, 20, DIM)
    grads = check_equal(plan, params, TOKENS[:15], prefetch=prefetch)
    assert grads["layers"]["w"].addressable_shards[0].data.shape == (LAYERS, 4, DIM)
    for grad, padding in ((grads["embed"], 3 * DIM), (grads["layers"]["w"], LAYERS * 4 * DIM)):
        at = (slice(32, None),) if grad.ndim == 2 else (slice(None), slice(DIM, None))
        assert grad[at].size == padding and not np.any(grad[at])


def check_equal(plan, params, tokens, prefetch, **options):
    """Checks the loss and the gradients, at logical shapes, and returns these as they come."""
    value, grads = grad_by_hand(plan, prefetch=prefetch, **options)(params, tokens)
    loss = functools.partial(whole_loss, **options)
    parts = tokens.reshape(plan.size, -1, *tokens.shape[1:])
    mean = lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, parts))
    want_value, want = jax.jit(jax.value_and_grad(mean, allow_int=True))(PARAMS)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    for name in ("embed", "layers"):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        found = jax.tree.map(lambda g, w: g[tuple(map(slice, w.shape))], grads[name], want[name])
        jax.tree.map(close, found, want[name])
    return grads


@pytest.mark.parametrize("devices", [8, 5])
def test_gathers_and_scatters_each_layer_in_its_iteration(devices):
    plan, params = placed(devices)
    tokens = TOKENS[: 16 // devices * devices]
    found = list(collectives(grad_by_hand(plan, prefetch=0).trace(params, tokens).jaxpr))
    size = params["layers"]["w"].size  # with the padding
    inside = [(c.kind, c.moved) for c in found if c.depth == 1]
    assert sorted(inside) == [("all-gather", size)] * 2 + [("reduce-scatter", size)]
    outside = [c for c in found if c.depth == 0 and c.kind != "all-reduce"]
    assert {c.elements for c in outside} == {params["embed"].size}


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
    dtypes = {c.dtype: c.moved for c in gathered}
    assert dtypes.keys() == {"bfloat16", "int32"} and dtypes["int32"] == params["step"].size == 8


def test_gathered_parameters_have_no_padding():
    plan, params = placed(devices=5)
    shapes = []

    def inside(p):
        parts = zerojax.shards(p, plan)
        shapes.append((parts["embed"].full.shape, parts["embed"].data.shape))
        return zerojax.gather(parts)

    run = jax.shard_map(
        inside, mesh=plan.mesh, in_specs=(zerojax.param_specs(plan),), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(params), PARAMS)
    assert shapes[0] == ((32, DIM), (7, DIM))


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
    padded, _ = placed(devices=5)
    with pytest.raises(
        ValueError, match=r"\(32, 16\) here, and a device's part of it is \(7, 16\)"
    ):
        zerojax.shards(PARAMS, padded)
    with pytest.raises(ValueError, match=r"in_specs=zerojax.param_specs\(plan\)"):
        inside(params)  # whole, and outside of shard_map
    with pytest.raises(ValueError, match="not those of the plan"):
        zerojax.shards({"other": jnp.ones(8)}, plan)
