"""Mixtures without a dispatch, as tutorials have them: each expert computes all rows, or rows take
the weights of their expert."""

import jax
import jax.numpy as jnp

from tests.support.experts import table as _e
from tests.support.experts.capacity import BIASED, SHAPES
from tests.support.experts.dropless import best
from tests.support.experts.table import EXPERTS, Case, case
from tests.support.sequences.table import DIM


def gates_of(p, x, top=2):
    """(token, expert), 0 where it is not chosen."""
    weight, chosen = best(x @ p["router"], top)
    return jnp.sum(jax.nn.one_hot(chosen, EXPERTS) * weight[..., None], axis=-2)


def expert(w, x):
    return jax.nn.gelu(x @ w["up"] + w["bias_up"]) @ w["down"] + w["bias_down"]


def experts_of(p):
    return {name: w for name, w in p.items() if "up" in name or "down" in name}


def over_rows(combine):
    """A mixture of gates (expert, token), and of tokens (token, dim)."""

    def mixture(p, x):
        flat = x.reshape(-1, DIM)
        return combine(experts_of(p), gates_of(p, flat).T, flat).reshape(x.shape)

    return mixture


# -- one expert after the other


@case("up|down")
def scan_over_experts() -> Case:
    def combine(w, gates, x):
        def body(y, inputs):
            w, gate = inputs
            return y + gate[:, None] * expert(w, x), None

        return jax.lax.scan(body, jnp.zeros_like(x), (w, gates))[0]

    return _e.language_model(over_rows(combine), BIASED)


@case("up|down")
def scan_skips_idle_experts() -> Case:
    """Rematted, in layers that are scanned, too."""

    def combine(w, gates, x):
        @jax.checkpoint
        def body(y, inputs):
            w, gate = inputs
            add = lambda: y + gate[:, None] * expert(w, x)
            return jax.lax.cond(jnp.any(gate > 0), add, lambda: y), None

        return jax.lax.scan(body, jnp.zeros_like(x), (w, gates))[0]

    return _e.language_model(over_rows(combine), BIASED, scanned=lambda body: body)


@case("up|down")
def map_over_experts() -> Case:
    def combine(w, gates, x):
        return jnp.einsum("et,etd->td", gates, jax.lax.map(lambda w: expert(w, x), w))

    return _e.language_model(over_rows(combine), BIASED)


@case("up|down")
def loop_over_experts() -> Case:
    def combine(w, gates, x):
        y = jnp.zeros_like(x)
        for e in range(EXPERTS):
            y += gates[e][:, None] * expert(jax.tree.map(lambda w, e=e: w[e], w), x)
        return y

    return _e.language_model(over_rows(combine), BIASED)


@case("up|down", "scan")
def counted_loop() -> Case:
    def combine(w, gates, x):
        def body(e, y):
            return y + gates[e][:, None] * expert(jax.tree.map(lambda w: w[e], w), x)

        return jax.lax.fori_loop(0, EXPERTS, body, jnp.zeros_like(x))

    return _e.language_model(over_rows(combine), BIASED)


# -- all experts at once


@case("up|down")
def dense_mixture() -> Case:
    """As MaxText's without rooms."""

    def mixture(p, x):
        hidden = jax.nn.gelu(jnp.einsum("BSM,EMH -> BSEH", x, p["up"]) + p["bias_up"])
        y = jnp.einsum("BSEH,EHM -> BSEM", hidden, p["down"]) + p["bias_down"]
        return jnp.einsum("BSEM,BSE -> BSM", y, gates_of(p, x))

    return _e.language_model(mixture, BIASED)


@case("up|down")
def repeated_rows() -> Case:
    """A batched matmul of a copy of all rows for each expert; gates scale what goes in."""

    def combine(w, gates, x):
        scaled = jnp.tile(x[None], (EXPERTS, 1, 1)) * gates[..., None]
        return jnp.sum(jax.nn.silu(scaled @ w["up"]) @ w["down"], axis=0)

    return _e.language_model(over_rows(combine), SHAPES, scanned=jax.checkpoint)


@case("up|down")
def vmap_over_experts() -> Case:
    def combine(w, gates, x):
        y = jax.vmap(expert, in_axes=(0, None))(w, x)
        return jnp.einsum("te,etf->tf", gates.T, y)

    return _e.language_model(over_rows(combine), BIASED)


@case("up|down")
def outputs_of_chosen() -> Case:
    """All outputs, of which each row takes those of its experts."""

    def mixture(p, x):
        flat = x.reshape(-1, DIM)
        weight, chosen = best(flat @ p["router"], 2)
        y = jax.vmap(expert, in_axes=(0, None), out_axes=1)(experts_of(p), flat)
        y = jnp.take_along_axis(y, chosen[..., None], axis=1)
        return jnp.sum(y * weight[..., None], axis=1).reshape(x.shape)

    return _e.language_model(mixture, BIASED)


# -- weights for each row


@case("up|down", "gather")
def take_by_token() -> Case:
    def mixture(p, x):
        flat = x.reshape(-1, DIM)
        probs = jax.nn.softmax(flat @ p["router"])
        chosen = probs.argmax(-1)
        w = jax.tree.map(lambda w: jnp.take(w, chosen, axis=0), experts_of(p))
        hidden = jax.nn.gelu(jnp.einsum("td,tdf->tf", flat, w["up"]) + w["bias_up"])
        y = jnp.einsum("tf,tfd->td", hidden, w["down"]) + w["bias_down"]
        return (y * probs.max(-1, keepdims=True)).reshape(x.shape)

    return _e.language_model(mixture, BIASED)


@case("up|down", "gather")
def index_by_choice() -> Case:
    """Written for one token, in a tutorial's manner."""

    def of_token(p, x):
        weight, chosen = best(x @ p["router"], 2)
        y = [expert(jax.tree.map(lambda w, k=k: w[chosen[k]], experts_of(p)), x) for k in range(2)]
        return weight[0] * y[0] + weight[1] * y[1]

    mixture = jax.vmap(jax.vmap(of_token, (None, 0)), (None, 0))
    return _e.language_model(mixture, BIASED)
