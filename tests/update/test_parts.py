"""Updates in parts: which there are, and that together they give the numbers of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models import OPTIMIZERS
from tests.update.updates import LAYERS, as_numbers, update_of, values_of
from zerojax._update import parts as _parts

MORE = {
    "adan": lambda: optax.adan(1e-3),
    "lars": lambda: optax.lars(1e-3),
    "prodigy": lambda: optax.contrib.prodigy(1e-3),
    "if_finite": lambda: optax.apply_if_finite(optax.adamw(1e-3), 5),
    "adaptive_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.adamw(1e-3)),
}
ZOO = OPTIMIZERS | MORE
BY_LAYER = {
    "adamw", "lion", "momentum", "clip_schedule", "schedule_free", "inject_hyperparams", "adan",
}  # fmt: skip


def in_parts(update, values):
    """The results of an update, part after part and layer after layer."""
    inputs = list(zip(values, update.streamed, update.stacked, strict=True))
    free = _parts.run(
        update.beforehand(update.free), [None if on_host else v for v, on_host, _ in inputs]
    )
    before = [free.pop() for _ in update.before][::-1]
    results = dict(zip(update.free, free, strict=True))
    for part in update.parts:
        if part.by_layer:
            layers = [
                [v[i : i + 1] if is_stack else v for v, _, is_stack in inputs] + before
                for i in range(part.length)
            ]
            program = update.of_layer([part])
            made = zip(*(_parts.run(program, layer) for layer in layers), strict=True)
            done = map(jnp.concatenate, made)
        else:
            mine = [None if on_host and i not in part.inputs else v
                    for i, (v, on_host, _) in enumerate(inputs)]  # fmt: skip
            done = _parts.run(update.whole(part), mine)
        results.update(zip(part.outputs, done, strict=True))
    return [results[k] for k in range(len(update.full.outvars))]


@pytest.mark.parametrize("name", ZOO)
def test_parts_give_the_numbers_of_the_whole(name):
    function, shapes, update, _ = update_of(ZOO[name]())
    values = values_of(shapes)
    wanted = as_numbers(function(values))
    for got, want in zip(as_numbers(in_parts(update, values)), wanted, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(BY_LAYER))
def test_stacks_go_layer_by_layer(name):
    *_, update, names = update_of(ZOO[name]())
    found = {names[k]: part for part in update.parts for k in part.outputs}
    for stack in ("w", "up", "norm"):
        assert found[f"0/blocks/{stack}"].length == LAYERS
        assert found[f"0/blocks/{stack}"].way == "updated layer by layer"
    assert found["0/embed"].way == "updated at once"
    assert len(update.parts) == 4


@pytest.mark.parametrize(
    ("name", "parts", "why"),
    [
        ("lamb", 4, "reduce_sum mixes layers"),  # each by itself, for the norm of its update
        ("prodigy", 1, "reshape mixes leaves"),  # sums over all parameters
        ("multi_steps", 1, "the update reads it with other leaves"),  # a branch does
    ],
)
def test_what_mixes_layers_is_named(name, parts, why):
    *_, update, names = update_of(ZOO[name]())
    found = {names[k]: part for part in update.parts for k in part.outputs}
    assert len(update.parts) == parts
    assert found["0/blocks/w"].way == f"updated at once: {why}"


def test_a_norm_of_gradients_is_computed_before():
    *_, update, _ = update_of(ZOO["clip_schedule"]())
    assert update.before and not any(v.aval.shape for v, _ in update.before)
    program = update.of_layer(update.parts[:1])
    assert _parts.inputs_of(program) & set(range(len(update.streamed), 99))


def test_an_update_for_its_own_shapes_alone_goes_at_once():
    def update(updates, state, params=None):
        assert updates["blocks"]["w"].shape[0] == LAYERS
        return updates, jax.tree.map(jnp.add, state, updates)

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    *_, found, names = update_of(tx)
    ways = {names[k]: part.way for part in found.parts for k in part.outputs}
    assert ways["1/blocks/w"] == f"updated at once: {_parts.OTHER_PROGRAM}"


def test_a_mean_over_a_stack_is_not_taken_for_one_of_a_layer():
    """Its divisor is a number that the trace took from the shape."""

    def update(updates, state, params=None):
        state = jax.tree.map(lambda s, g: 0.9 * s + g / g.shape[0], state, updates)
        return state, state

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    *_, found, names = update_of(tx)
    ways = {names[k]: part.way for part in found.parts for k in part.outputs}
    assert ways["1/blocks/w"] == "updated at once: div mixes layers"
    assert ways["1/embed"] == "updated at once"


def test_loops_and_branches_keep_layers():
    def update(updates, state, params=None):
        def smoothed(s, g):
            s, _ = jax.lax.scan(lambda c, x: (0.5 * c + x * g, None), s, jnp.arange(3.0))
            s = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, s))[
                1
            ]
            return jax.lax.cond(jnp.float32(2) > 1, lambda s: s + 1, lambda s: s - 1, s)

        state = jax.tree.map(smoothed, state, updates)
        return state, state

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    function, shapes, found, _ = update_of(tx)
    assert [part.by_layer for part in found.parts].count(True) == 3
    values = values_of(shapes)
    for got, want in zip(in_parts(found, values), function(values), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_scan_over_the_layers_mixes_them():
    def update(updates, state, params=None):
        def running(s, g):
            return s + jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros_like(g[0]), g)[1]

        state = jax.tree.map(running, state, updates)
        return state, state

    tx = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    *_, found, _ = update_of(tx)
    assert not any(part.by_layer for part in found.parts)
