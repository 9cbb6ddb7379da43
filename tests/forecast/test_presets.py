"""Models by size: their parameters, their FLOPs, what is kept for backward, and that they train."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.forecast import fakes

EXPERTS = "mixtral-8x7b"
UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


@pytest.fixture
def preset(run, monkeypatch):
    """A model by its size, with some of its fields changed, as the command line makes it."""

    def preset(name, gpus="8xH100", **settings):
        changed = [word for pair in settings.items() for word in ("--set", "{}={}".format(*pair))]
        with monkeypatch.context() as patch:
            calls = fakes.recorded(patch, "forecast", fakes.forecast(fakes.case(3, 30)))
            code, _, err = run("forecast", name, "--gpus", gpus, *changed)
        assert (code, err) == (0, "")
        _, make_state, *_ = calls[-1][0]
        return make_state.__self__

    return preset


def flops(function, *shapes):
    """The FLOPs of one call, as a step counts those of its loss."""
    state, arrays = {"params": {"x": jnp.ones(8)}, "opt_state": ()}, dict(enumerate(shapes))
    plan = zerojax.plan(state, stage=0, tx=optax.sgd(1.0))
    loss = lambda params, arrays: function(*arrays.values()).sum()
    step = zerojax.train_step(loss, plan=plan, tx=optax.sgd(1.0))
    return zerojax.tools.step_flops(step, state, arrays) / 3


def test_presets_have_the_size_of_their_name(preset, run):
    _, _, said = run("forecast", "3x")
    names = re.search(r"no preset '3x'. Name one of (.*), or module:function", said)[1].split(", ")
    assert len(names) == 29
    for name in {*names} - {EXPERTS}:
        size = name.removeprefix("llama-")
        wanted = float(size[:-1]) * UNITS[size[-1]]
        # The paper's own names are loose: 40 layers of 1536 are no 1.38B.
        assert preset(name.upper()).n_params == pytest.approx(wanted, rel=0.13), name
    mixtral = preset(EXPERTS)
    one = mixtral.layers * 3 * mixtral.hidden * mixtral.inner
    assert mixtral.n_params == pytest.approx(46.7e9, rel=1e-3), "as its makers say"
    # Of which 12.9 billion work on a token: all but six of eight experts' weights.
    assert mixtral.n_params - 6 * one == pytest.approx(12.9e9, rel=2e-3)
    half = {gpu: preset("124m", f"8x{gpu}").compute for gpu in ("T4", "L4", "A100")}
    assert half == {"T4": jnp.float16, "L4": jnp.bfloat16, "A100": jnp.bfloat16}


def flops_of(model):
    return flops(model.loss, model.shapes(), model.batch(2))


def test_a_preset_counts_six_flops_for_each_parameter_and_token(preset):
    """Kaplan's rule, less the table of positions, plus attention: 12 n d t."""
    gpt = preset("124m", tokens=256)
    blocks = 12 * gpt.layers * gpt.hidden**2 + gpt.vocab * gpt.hidden
    attention = 4 * gpt.layers * gpt.hidden * 256  # q k and the values, for each token
    assert flops_of(gpt) == pytest.approx(2 * 256 * (2 * blocks + attention), rel=1e-3)
    with pytest.raises(ValueError, match=r"no attention 'flash'. Name one of xla, cudnn"):
        flops_of(preset("124m", attention="flash"))


@pytest.mark.gpu_code
def test_attention_of_cudnn_counts_the_same_flops(preset):
    zerojax.aot.mesh("1xH100")
    assert flops_of(preset("124m", attention="cudnn")) == flops_of(preset("124m"))


@pytest.mark.parametrize(("name", "names"), [("7.5b", "qkv"), ("llama-8b", "q+k+v")])
def test_what_is_kept_for_backward_has_names(name, names, preset):
    gpt = preset(name, layers=2, hidden=64, heads=8, vocab=64, tokens=8)

    def matmuls(remat):
        grad = jax.make_jaxpr(jax.grad(gpt.losses([remat])[remat]))
        return str(grad(gpt.shapes(), gpt.batch(1))).count("dot_general[")

    assert list(gpt.losses()) == ["none", "dots", "full"]
    full, kept = matmuls("full"), len(names.split("+"))
    assert full - matmuls(names) == kept, "which are not computed again"
    assert "down" in gpt.named, "whose output backward does not read"
    assert all(matmuls(one) < full for one in {*gpt.named} - {"down"})
    assert matmuls(names) > matmuls("+".join(gpt.named)) >= matmuls("none")
    assert full > matmuls("dots") >= matmuls("none")


# -- experts

ROWS = 3
# Outputs are sums of numbers of about 1: how they are rounded, CPUs differ in, small ones the most.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def small(preset):
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "inner": 96, "experts": 4}
    found = preset(EXPERTS, vocab=128, tokens=16, **sizes)
    return dataclasses.replace(found, compute=jnp.float32)


@pytest.fixture
def layer(small):
    """A layer's weights, and what comes in."""
    random, blocks = np.random.default_rng(0), small.shapes()["blocks"]
    draw = lambda shape: random.normal(size=shape).astype(np.float32)
    weights = {name: 0.2 * draw(leaf.shape[1:]) for name, leaf in blocks.items()}
    return weights, draw((ROWS, small.tokens, small.hidden))


def through_all_experts(h, p):
    """Every token through every expert, and of these the two that the router prefers."""
    scores, chosen = jax.lax.top_k(h @ p["router"], 2)
    gate, up = (jnp.einsum("rtd,edf->rtef", h, p[name]) for name in ("gate", "up"))
    out = jnp.einsum("rtef,efd->rted", jax.nn.silu(gate) * up, p["down"])
    found = jnp.take_along_axis(out, chosen[..., None], 2)
    return (found * jax.nn.softmax(scores)[..., None]).sum(2)


def test_tokens_go_to_the_experts_that_their_router_chooses(small, layer):
    p, h = layer
    roomy = dataclasses.replace(small, room=small.experts)

    @jax.jit
    def outputs(h, p):
        def both(function):
            squared = lambda h, p: (function(h, p) ** 2).sum()
            return function(h, p), jax.grad(squared, (0, 1))(h, p)

        return both(roomy.fed_forward), both(through_all_experts)

    (found, found_grads), (wanted, wanted_grads) = outputs(h, p)
    np.testing.assert_allclose(found, wanted, **ROUNDING)
    for one, other in zip(*map(jax.tree.leaves, (found_grads, wanted_grads)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_an_expert_without_room_gives_the_tokens_that_come_last_nothing(small, layer):
    p, h = layer
    p["router"] = np.zeros((small.hidden, small.experts), np.float32)  # all to the first two
    room = small.tokens * 2 // small.experts
    found, wanted = jax.jit(small.fed_forward)(h, p), jax.jit(through_all_experts)(h, p)
    np.testing.assert_allclose(found[:, :room], wanted[:, :room], **ROUNDING)
    assert not np.any(found[:, room:]) and np.any(found[:, :room])


@pytest.mark.ci
def test_experts_are_sharded_gathered_and_compiled(small):
    """Stage 3 keeps its contract, and XLA multiplies no more than is counted."""
    losses, batch = small.losses(["none"]), small.batch(16)
    with fakes.cpus_for_gpus():
        found = zerojax.forecast(losses, small.make_state, batch, gpus="4xH100", stages=3)
    (case,) = found.cases
    assert case.report.findings() == []
    assert case.parameters == pytest.approx(4 * small.n_params / 4, rel=0.01)
    table = small.vocab * small.hidden  # which backward needs not
    assert case.report.totals["all-gather"] < 1.05 * 4 * 3 / 4 * (2 * small.n_params - table)
    needed = case.mfu * case.step_seconds * found.gpu.flops
    assert case.report.replay.flops == pytest.approx(needed, rel=0.02)
