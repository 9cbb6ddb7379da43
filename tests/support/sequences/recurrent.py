"""Recurrences over tokens: linear attention, state spaces, cells."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.sequences import table as _t
from tests.support.sequences.table import (
    ATTENTION,
    DIM,
    HEADS,
    ROWS,
    TOKENS,
    UNEVEN,
    Case,
    case,
    language_model,
    qkv_of,
)


def positive(x):
    return jax.nn.elu(x) + 1


@case("sums over tokens")
def linear_attention() -> Case:
    """Not causal."""

    def mix(p, x):
        q, k, v = qkv_of(p, x)
        q, k = positive(q), positive(k)
        state = jnp.einsum("bkhd,bkhe->bhde", k, v)
        total = jnp.einsum("bqhd,bhd->bqh", q, k.sum(1))
        o = jnp.einsum("bqhd,bhde->bqhe", q, state) / total[..., None]
        return o.reshape(x.shape) @ p["out"]

    return language_model(mix, **ATTENTION)


@case("sums of the blocks before")
def linear_attention_by_cumsum() -> Case:
    def mix(p, x):
        q, k, v = qkv_of(p, x)
        q, k = positive(q), positive(k)
        state = jnp.cumsum(jnp.einsum("bthd,bthe->bthde", k, v), axis=1)
        total = jnp.einsum("bthd,bthd->bth", q, jnp.cumsum(k, axis=1))
        o = jnp.einsum("bthd,bthde->bthe", q, state) / total[..., None]
        return o.reshape(x.shape) @ p["out"]

    return language_model(mix, **ATTENTION)


@case("a state, from device to device")
def linear_attention_by_scan() -> Case:
    def mix(p, x):
        q, k, v = (jnp.moveaxis(a, 1, 0) for a in qkv_of(p, x))

        def step(state, token):
            q, k, v = token
            state = state + jnp.einsum("bhd,bhe->bhde", positive(k), v)
            return state, jnp.einsum("bhd,bhde->bhe", positive(q), state)

        dim = DIM // HEADS
        _, o = jax.lax.scan(step, jnp.zeros((len(x), HEADS, dim, dim)), (q, k, v))
        return jnp.moveaxis(o, 0, 1).reshape(x.shape) @ p["out"] / 8

    return language_model(mix, **ATTENTION)


@case("the state of each chunk, from device to device", UNEVEN)
def linear_attention_by_chunks() -> Case:
    """Attention within chunks, and a scan over their states: GLA's and RetNet's form."""

    def mix(p, x, size=6):
        rows, length, _ = x.shape
        cut = lambda a: a.reshape(rows, length // size, size, HEADS, -1)
        q, k, v = map(cut, qkv_of(p, x))
        decay = 0.9 ** jnp.arange(size)
        ago = jnp.arange(size)[:, None] - jnp.arange(size)
        inside = jnp.where(ago >= 0, 0.9 ** jnp.maximum(ago, 0), 0)
        o = jnp.einsum("bcqhd,bckhd,qk,bckhe->bcqhe", q, k, inside, v)
        states = jnp.einsum("bckhd,k,bckhe->cbhde", k, decay[::-1], v)
        step = lambda s, new: (0.9**size * s + new, s)
        _, before = jax.lax.scan(step, jnp.zeros_like(states[0]), states)
        o = o + jnp.einsum("bcqhd,q,cbhde->bcqhe", q, 0.9 * decay, before)
        return o.reshape(x.shape) @ p["out"] / 8

    return language_model(mix, **ATTENTION)


@case("the product and the state of each block")
def associative_scan() -> Case:
    """A linear recurrence with real and learned decays, by `lax.associative_scan`: LRU, S5."""

    def mix(p, x):
        decay = jnp.broadcast_to(jax.nn.sigmoid(p["decay"] + 1), x.shape)

        def join(a, b):
            return a[0] * b[0], b[0] * a[1] + b[1]

        _, h = jax.lax.associative_scan(join, (decay, x @ p["inside"]), axis=1)
        return h @ p["out"] + p["skip"] * x

    return language_model(mix, decay=(DIM,), inside=(DIM, DIM), out=(DIM, DIM), skip=(DIM,))


@case("the product and the state of each block")
def s5() -> Case:
    """Complex states, and a vmap over rows."""

    def join(a, b):
        return b[0] * a[0], b[0] * a[1] + b[1]

    def mix(p, x):
        turn = jnp.exp(-jax.nn.softplus(p["decay"]) + 1j * p["turn"])
        b, c = (p[f"{name}_real"] + 1j * p[f"{name}_imag"] for name in ("in", "out"))

        def of_row(x):
            _, h = jax.lax.associative_scan(join, (jnp.tile(turn, (len(x), 1)), x @ b))
            return (h @ c).real

        return jax.nn.gelu(jax.vmap(of_row)(x) + p["skip"] * x)

    shapes = {"in_real": (DIM, 6), "in_imag": (DIM, 6), "out_real": (6, DIM), "out_imag": (6, DIM)}
    return language_model(mix, decay=(6,), turn=(6,), skip=(DIM,), **shapes)


@case("a halo of 3 tokens; a state, from device to device")
def mamba() -> Case:
    """Selective: steps, inputs and outputs of the state depend on the token."""

    def mix(p, x):
        h, gate = jnp.split(x @ p["inside"], 2, -1)
        padded = jnp.pad(h, ((0, 0), (3, 0), (0, 0)))
        h = sum(padded[:, i : i + x.shape[1]] * p["kernel"][i] for i in range(4))
        h = jax.nn.silu(h)
        b, c, low = jnp.split(h @ p["select"], [3, 6], -1)
        delta = jax.nn.softplus(low @ p["delta"])
        decay = jnp.exp(-delta[..., None] * jnp.exp(p["decay"]))
        inputs = (delta * h)[..., None] * b[:, :, None]

        def step(state, token):
            decay, inputs, c = token
            state = decay * state + inputs
            return state, jnp.einsum("bds,bs->bd", state, c)

        by_token = jax.tree.map(lambda a: a.swapaxes(0, 1), (decay, inputs, c))
        _, y = jax.lax.scan(step, jnp.zeros((len(x), DIM, 3)), by_token)
        return (y.swapaxes(0, 1) * jax.nn.silu(gate)) @ p["out"]

    return language_model(
        mix, inside=(DIM, 2 * DIM), kernel=(4, DIM), select=(DIM, 8), delta=(2, DIM),
        decay=(DIM, 3), out=(DIM, DIM),
    )  # fmt: skip


@case("a halo of one token; a state, from device to device")
def rwkv() -> Case:
    """Its fourth form: running sums with decay, kept from overflow by a running maximum."""

    def mix(p, x):
        before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)
        mixed = x * p["now"] + before * (1 - p["now"])
        k, v, r = jnp.split(mixed @ p["kvr"], 3, -1)
        decay, bonus = -jnp.exp(p["decay"]), p["bonus"]

        def step(carry, token):
            top, total, count = carry
            k, v = token
            new = jnp.maximum(top, bonus + k)
            a, b = jnp.exp(top - new), jnp.exp(bonus + k - new)
            out = (a * total + b * v) / (a * count + b)
            new = jnp.maximum(top + decay, k)
            a, b = jnp.exp(top + decay - new), jnp.exp(k - new)
            return (new, a * total + b * v, a * count + b), out

        zero = jnp.zeros((len(x), DIM))
        start = zero - 1e9, zero, zero
        _, wkv = jax.lax.scan(step, start, (k.swapaxes(0, 1), v.swapaxes(0, 1)))
        return (jax.nn.sigmoid(r) * wkv.swapaxes(0, 1)) @ p["out"]

    return language_model(
        mix, now=(DIM,), kvr=(DIM, 3 * DIM), decay=(DIM,), bonus=(DIM,), out=(DIM, DIM)
    )


@case("a state, from device to device")
def gated_cell() -> Case:
    """A GRU, over tokens from both ends."""

    def cell(p, h, x):
        both = jnp.concatenate([h, x], -1)
        z, r = jnp.split(jax.nn.sigmoid(both @ p["gates"]), 2, -1)
        new = jnp.tanh(jnp.concatenate([r * h, x], -1) @ p["new"])
        h = (1 - z) * h + z * new
        return h, h

    def mix(p, x):
        def run(x, reverse):
            step = lambda h, x: cell(p, h, x)
            _, y = jax.lax.scan(step, jnp.zeros_like(x[0]), x, reverse=reverse)
            return y

        x = x.swapaxes(0, 1)
        return jnp.concatenate([run(x, False), run(x, True)], -1).swapaxes(0, 1) @ p["out"]

    def loss(params, batch):
        x = _t.hidden_states(params, batch["x"], mix)
        return jnp.mean((x - batch["y"]) ** 2)

    shape = (ROWS, TOKENS, DIM)
    batch = {"x": _t.normal(*shape), "y": _t.normal(*shape, seed=1)}
    shapes = {"gates": (2 * DIM, 2 * DIM), "new": (2 * DIM, DIM), "out": (2 * DIM, DIM)}
    return Case(_t.transformer_params(**shapes), loss, batch)


@case("a state, from device to device")
def loop_over_tokens() -> Case:
    """A `fori_loop` that reads one token a turn: no leaf is differentiated through it."""

    def loss(params, batch):
        x = _t.hidden_states(params, params["embed"][batch["ids"]], _t.causal)

        def discounted(t, returns):
            at = TOKENS - 1 - t
            after = returns[:, jnp.minimum(at + 1, TOKENS - 1)] * (t > 0)
            return returns.at[:, at].set(batch["rewards"][:, at] + 0.9 * after)

        returns = jax.lax.fori_loop(0, TOKENS, discounted, jnp.zeros_like(batch["rewards"]))
        return jnp.mean((x @ params["value"] - returns[..., None]) ** 2)

    batch = {"ids": _t.tokens(), "rewards": np.tanh(_t.normal(ROWS, TOKENS))}
    params = _t.transformer_params(**ATTENTION) | _t.weights(value=(DIM, 1))
    return Case(params, loss, batch)
