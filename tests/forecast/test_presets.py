"""Models by size: their parameters, their FLOPs, and that they train."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import _compat
from zerojax._forecast import mfu as _mfu, presets as _presets
from zerojax._hlo import known as _known

EXPERTS = "mixtral-8x7b"


@pytest.mark.parametrize("name", [name for name in _presets.PRESETS if name != EXPERTS])
def test_presets_have_the_size_of_their_name(name):
    size = name.removeprefix("llama-")
    number, unit = float(size[:-1]), {"m": 1e6, "b": 1e9, "t": 1e12}[size[-1]]
    # The paper's own names are loose: 40 layers of 1536 are no 1.38B.
    assert _presets.preset(name.upper()).n_params == pytest.approx(number * unit, rel=0.13)


def test_experts_have_the_size_that_their_makers_say():
    """Of which 12.9 billion work on a token: all but six of eight experts' weights."""
    mixtral = _presets.preset(EXPERTS)
    one = mixtral.layers * 3 * mixtral.hidden * mixtral.inner
    assert mixtral.n_params == pytest.approx(46.7e9, rel=1e-3)
    assert mixtral.n_params - 6 * one == pytest.approx(12.9e9, rel=2e-3)


def test_a_preset_counts_six_flops_for_each_parameter_and_token():
    """Kaplan's rule, less the table of positions, plus attention: 12 n d t."""
    gpt = dataclasses.replace(_presets.preset("124m"), tokens=256)
    params = gpt.shapes()
    forward = _mfu.matmul_flops(gpt.loss, params, gpt.batch(2))
    blocks = 12 * gpt.layers * gpt.hidden**2 + gpt.vocab * gpt.hidden
    attention = 4 * gpt.layers * gpt.hidden * 256  # q k and the values, for each token
    assert forward == pytest.approx(2 * 256 * (2 * blocks + attention), rel=1e-3)


def test_presets_train():
    gpt = _presets.Gpt(layers=2, hidden=32, heads=2, vocab=64, tokens=8)
    keys = jax.random.key(0)
    params = jax.tree.map(lambda s: 0.1 * jax.random.normal(keys, s.shape, s.dtype), gpt.shapes())
    tokens = jnp.arange(16).reshape(2, 8)
    losses = gpt.losses()
    assert list(losses) == ["none", "dots", "full"]
    step = jax.jit(jax.value_and_grad(losses["full"]))
    for remat in ("none", "dots"):
        grad = jax.value_and_grad(losses[remat])
        assert jax.eval_shape(grad, params, tokens) == jax.eval_shape(step, params, tokens)
    value, grads = step(params, tokens)
    new = optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))
    assert float(step(new, tokens)[0]) < float(value)
    state = jax.eval_shape(gpt.make_state)
    assert jax.tree.map(jnp.shape, state.params) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("name", ["7.5b", "llama-8b"])
def test_what_is_kept_for_backward_has_names(name):
    small = dict(layers=2, hidden=64, heads=8, vocab=64, tokens=8)
    gpt = dataclasses.replace(_presets.preset(name), **small)
    names = "q+k+v" if name.startswith("llama") else "qkv"

    def matmuls(remat):
        grad = jax.make_jaxpr(jax.grad(gpt.losses([remat])[remat]))(gpt.shapes(), gpt.batch(1))
        return [e.primitive.name for e in _compat.every_eqn(grad.jaxpr)].count("dot_general")

    kept = len(names.split("+"))
    assert matmuls("full") - matmuls(names) == kept, "which are not computed again"
    assert "down" in gpt.named, "whose output backward does not read"
    for one in {*gpt.named} - {"down"}:
        assert matmuls(one) < matmuls("full"), one
    assert matmuls("full") > matmuls(names) > matmuls("+".join(gpt.named))


def test_attention_of_cudnn_counts_the_same_flops():
    _compat.assume_cudnn()
    gpt = dataclasses.replace(_presets.preset("124m"), tokens=256)
    fused = dataclasses.replace(gpt, attention="cudnn")
    count = lambda model: _mfu.matmul_flops(model.loss, model.shapes(), model.batch(2))
    assert count(fused) == count(gpt)
    with pytest.raises(ValueError, match=r"no attention 'flash'. Name one of xla, cudnn"):
        count(dataclasses.replace(gpt, attention="flash"))


# -- experts

SMALL = _presets.Mixtral(
    layers=2, hidden=64, heads=4, vocab=128, tokens=16, kv_heads=2, inner=96, experts=4,
    compute=jnp.float32,
)  # fmt: skip
ROWS = 3
# Outputs are sums of numbers of about 1: how they are rounded, CPUs differ in, small ones the most.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


def layer_and_inputs():
    keys = iter(jax.random.split(jax.random.key(0), 99))
    blocks = SMALL.shapes()["blocks"]
    layer = {name: 0.2 * jax.random.normal(next(keys), s.shape[1:]) for name, s in blocks.items()}
    return layer, jax.random.normal(next(keys), (ROWS, SMALL.tokens, SMALL.hidden))


def through_all_experts(h, p):
    """Every token through every expert, and of these the two that the router prefers."""
    scores, chosen = jax.lax.top_k(h @ p["router"], 2)
    gate, up = (jnp.einsum("rtd,edf->rtef", h, p[name]) for name in ("gate", "up"))
    out = jnp.einsum("rtef,efd->rted", jax.nn.silu(gate) * up, p["down"])
    found = jnp.take_along_axis(out, chosen[..., None], 2)
    return (found * jax.nn.softmax(scores)[..., None]).sum(2)


def test_tokens_go_to_the_experts_that_their_router_chooses():
    p, h = layer_and_inputs()
    roomy = dataclasses.replace(SMALL, room=SMALL.experts)

    def grads(function):
        return jax.grad(lambda h, p: (function(h, p) ** 2).sum(), (0, 1))(h, p)

    np.testing.assert_allclose(roomy.fed_forward(h, p), through_all_experts(h, p), **ROUNDING)
    for found, wanted in zip(
        jax.tree.leaves(grads(roomy.fed_forward)),
        jax.tree.leaves(grads(through_all_experts)),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


def test_an_expert_without_room_gives_the_tokens_that_come_last_nothing():
    p, h = layer_and_inputs()
    p["router"] = jnp.zeros((SMALL.hidden, SMALL.experts))  # all to the first two
    room = SMALL.tokens * 2 // SMALL.experts
    found = SMALL.fed_forward(h, p)
    np.testing.assert_allclose(found[:, :room], through_all_experts(h, p)[:, :room], **ROUNDING)
    assert not found[:, room:].any() and found[:, :room].any()


def test_experts_count_the_flops_of_two_a_token():
    p, h = layer_and_inputs()
    tokens = ROWS * SMALL.tokens
    router, two = SMALL.hidden * SMALL.experts, 2 * 3 * SMALL.hidden * SMALL.inner
    assert _mfu.matmul_flops(SMALL.fed_forward, h, p) == 2 * tokens * (router + two)


@pytest.mark.gpu_code
def test_experts_are_sharded_gathered_and_compiled():
    """Stage 3 keeps its contract, and XLA multiplies no more than is counted."""
    model = dataclasses.replace(SMALL, hidden=256, inner=512, compute=jnp.bfloat16)
    found = zerojax.forecast(
        model.losses(["none"]), model.make_state, model.batch(16), gpus="8xH100", stages=3
    )
    (case,) = found.cases
    assert case.report.findings() == []
    assert case.parameters == pytest.approx(4 * model.n_params / 8, rel=0.01)
    gathered = 2 * 7 / 8 * (model.n_params - model.vocab * model.hidden)  # rows of the embedding
    assert case.report.totals["all-gather"] < 2.1 * gathered
    needed = case.mfu * case.step_seconds * found.gpu.flops
    assert case.report.replay.flops == pytest.approx(needed, rel=0.02)


def test_gpus_without_bfloat16_compute_in_float16():
    compute = lambda gpu: _presets.preset("124m", _known.named(gpu)).compute
    assert (compute("T4"), compute("L4"), compute("A100")) == (
        jnp.float16,
        jnp.bfloat16,
        jnp.bfloat16,
    )


def test_unknown_presets():
    with pytest.raises(ValueError, match=r"no preset '3x'. Name one of 124m, 350m"):
        _presets.preset("3x")
    for remat in ("some", "q+k+v", "qkv+"):
        with pytest.raises(ValueError, match=r"Name one of none, dots, full, or .*: qkv, attended"):
            _presets.preset("124m")._rematted(remat)
