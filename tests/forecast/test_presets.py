"""Models by size: their parameters, their FLOPs, and that they train."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from zerojax import _compat
from zerojax._forecast import mfu as _mfu, presets as _presets
from zerojax._hlo import known as _known


@pytest.mark.parametrize("name", _presets.PRESETS)
def test_presets_have_the_size_of_their_name(name):
    size = name.removeprefix("llama-")
    number, unit = float(size[:-1]), {"m": 1e6, "b": 1e9, "t": 1e12}[size[-1]]
    # The paper's own names are loose: 40 layers of 1536 are no 1.38B.
    assert _presets.preset(name.upper()).n_params == pytest.approx(number * unit, rel=0.13)


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
    everything = f"{names}+attended+proj+up+down" + "+gate" * name.startswith("llama")
    assert matmuls("full") > matmuls(names) > matmuls(everything)


def test_attention_of_cudnn_counts_the_same_flops():
    _compat.assume_cudnn()
    gpt = dataclasses.replace(_presets.preset("124m"), tokens=256)
    fused = dataclasses.replace(gpt, attention="cudnn")
    count = lambda model: _mfu.matmul_flops(model.loss, model.shapes(), model.batch(2))
    assert count(fused) == count(gpt)
    with pytest.raises(ValueError, match=r"no attention 'flash'. Name one of xla, cudnn"):
        count(dataclasses.replace(gpt, attention="flash"))


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
    with pytest.raises(ValueError, match=r"no remat 'some'. Name one of none, dots, full"):
        _presets._rematted(lambda x: x, "some")
