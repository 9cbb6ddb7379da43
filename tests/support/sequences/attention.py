"""Attention in its forms: by the functions of JAX, and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tests.support.sequences import table as _t
from tests.support.sequences.table import (
    ATTENTION,
    DIM,
    GATHERS,
    HEADS,
    ROWS,
    TOKENS,
    UNEVEN,
    Case,
    case,
    heads_of,
    language_model,
    qkv_of,
    softmax_attention,
)

attend = jax.nn.dot_product_attention


def attending(attention, **mixer):
    """A language model whose layers attend by `attention(q, k, v)`."""

    def mix(p, x):
        return attention(*qkv_of(p, x)).reshape(x.shape) @ p["out"]

    return language_model(mix, **(ATTENTION | mixer))


@case("keys and values")
def attention_is_causal() -> Case:
    return attending(functools.partial(attend, is_causal=True))


@case("keys and values")
def attention_mask() -> Case:
    def attention(q, k, v):
        mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
        return attend(q, k, v, mask=mask[None, None])

    return attending(attention)


@case("keys and values")
def attention_bias() -> Case:
    """A learned one for each distance, as in T5 without its buckets."""

    def mix(p, x):
        at = jnp.arange(x.shape[1])
        bias = jnp.moveaxis(p["near"][jnp.clip(at[:, None] - at, 0, 7)], -1, 0)
        o = attend(*qkv_of(p, x), bias=bias[None], is_causal=True)
        return o.reshape(x.shape) @ p["out"]

    return language_model(mix, **ATTENTION, near=(8, HEADS))


@case("keys and values")
def attention_local_window() -> Case:
    return attending(functools.partial(attend, is_causal=True, local_window_size=(5, 0)))


@case("keys and values")
def attention_lengths() -> Case:
    """Rows of several lengths, which the call takes."""

    def loss(params, batch):
        lengths = batch["length"]

        def mix(p, x):
            q, k, v = qkv_of(p, x)
            o = attend(q, k, v, key_value_seq_lengths=lengths, query_seq_lengths=lengths)
            return o.reshape(x.shape) @ p["out"]

        x = _t.hidden_states(params, params["embed"][batch["ids"]], mix)
        real = jnp.arange(x.shape[1]) < lengths[:, None]
        return jnp.mean(jnp.where(real[..., None], x, 0)[..., 0] ** 2)

    batch = {"ids": _t.tokens(), "length": np.array([24, 9, 17, 1], np.int32)}
    return Case(_t.transformer_params(**ATTENTION), loss, batch)


@case("keys and values")
def attention_fp32_by_hand() -> Case:
    """GPT-2's, with tril and a large negative number."""

    def attention(q, k, v):
        return softmax_attention(q, k, v, jnp.tril(jnp.ones((q.shape[1],) * 2, bool)))

    return attending(attention)


@case("keys and values")
def attention_heads_first() -> Case:
    """Transposed to (rows, heads, tokens, dim), and batched matrix products."""

    def attention(q, k, v):
        q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        at = jnp.arange(scores.shape[-1])
        scores = scores + jnp.where(at[:, None] < at, jnp.finfo(scores.dtype).min, 0.0)
        return (jax.nn.softmax(scores, -1) @ v).swapaxes(1, 2)

    return attending(attention)


@case("keys and values")
def attention_of_one_row() -> Case:
    """Written for one row and one head, under two vmaps."""

    def one(q, k, v):
        scores = jnp.where(jnp.tri(len(q), dtype=bool), q @ k.T / q.shape[-1] ** 0.5, -jnp.inf)
        return jax.nn.softmax(scores) @ v

    return attending(jax.vmap(jax.vmap(one, 1, 1)))


@case("keys and values of a window")
def window_by_band() -> Case:
    def attention(q, k, v):
        at = jnp.arange(q.shape[1])
        ago = at[:, None] - at
        return softmax_attention(q, k, v, (ago >= 0) & (ago < 7))

    return attending(attention)


@case("keys and values")
def attention_buffer() -> Case:
    """GPT-2's mask: a constant of the longest context, cut to the length of the batch."""
    buffer = np.tril(np.ones((1, 1, 32, 32), bool))

    def attention(q, k, v):
        length = q.shape[1]
        return softmax_attention(q, k, v, buffer[:, :, :length, :length])

    return attending(attention)


@case("keys and values")
def window_by_cond() -> Case:
    """Gemma's: a flag of each layer in the scan says whether it sees a window, or all."""

    def mix(p, x):
        at = jnp.arange(x.shape[1])
        near = lambda: at[:, None] - at < 6
        near = jax.lax.cond(p["flag"][0] > 0.4, near, lambda: jnp.ones((len(at),) * 2, bool))
        seen = near & (at[:, None] >= at)
        q, k, v = (checkpoint_name(a, "qkv") for a in qkv_of(p, x))
        return softmax_attention(q, k, v, seen) @ p["out"]

    return language_model(mix, **ATTENTION, flag=(1,))


@case("keys and values")
def layers_by_cond() -> Case:
    """A layer that is skipped, as stochastic depth has it."""

    def mix(p, x):
        skip = lambda x: 0.5 * x
        return jax.lax.cond(p["flag"][0] > 0.4, lambda x: _t.causal(p, x), skip, x)

    return language_model(mix, **ATTENTION, flag=(1,))


@case("keys and values of chunks", UNEVEN)
def window_by_chunks() -> Case:
    """Longformer's: each chunk of queries sees its own and the one before."""

    def attention(q, k, v, size=3):
        rows, length, heads, dim = q.shape
        q, k, v = (a.reshape(rows, length // size, size, heads, dim) for a in (q, k, v))
        before = lambda a: jnp.pad(a, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1]
        k, v = (jnp.concatenate([before(a), a], 2) for a in (k, v))
        scores = jnp.einsum("bcqhd,bckhd->bchqk", q, k) / dim**0.5
        ago = jnp.arange(size)[:, None] + size - jnp.arange(2 * size)
        seen = (ago >= 0) & (ago < size + 1)
        real = (jnp.arange(length // size) > 0)[:, None, None] | (jnp.arange(2 * size) >= size)
        scores = jnp.where((seen & real)[None, :, None], scores, -1e9)
        o = jnp.einsum("bchqk,bckhd->bcqhd", jax.nn.softmax(scores), v)
        return o.reshape(rows, length, heads * dim)

    return attending(attention)


@case("keys and values")
def alibi() -> Case:
    def attention(q, k, v):
        at = jnp.arange(q.shape[1])
        slopes = 2.0 ** -(1 + jnp.arange(HEADS))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores += slopes[:, None, None] * (at - at[:, None])
        scores = jnp.where(at[:, None] >= at, scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return attending(attention)


@case("keys and values")
def multi_query_softcap() -> Case:
    """One head of keys, normed queries and keys, capped scores: Gemma's."""

    def mix(p, x):
        q = heads_of(x @ p["q"], 4)
        k, v = jnp.split(x @ p["kv"], 2, -1)
        q, k = norm_of(q), norm_of(k)
        scores = 5.0 * jnp.tanh(jnp.einsum("bqhd,bkd->bhqk", q, k) / 5.0)
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -2e38)
        o = jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(scores), v)
        return o.reshape(*x.shape[:2], -1) @ p["out"]

    norm_of = lambda a: a * jax.lax.rsqrt(jnp.square(a).mean(-1, keepdims=True) + 1e-6)
    return language_model(mix, jax.nn.silu, q=(DIM, 24), kv=(DIM, 12), out=(24, DIM))


@case("keys and values")
def attention_sinks() -> Case:
    """A learned score that takes part in the softmax and has no value: gpt-oss's."""

    def mix(p, x):
        q, k, v = qkv_of(p, x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
        sinks = jnp.broadcast_to(p["sinks"][:, None, None], (*scores.shape[:-1], 1))
        probs = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
        return jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(x.shape) @ p["out"]

    return language_model(mix, **ATTENTION, sinks=(HEADS,))


@case("keys and values, a block at a time", GATHERS)
def attention_by_blocks() -> Case:
    """Flash attention in plain JAX: a scan over blocks of keys, with running maxima and sums."""

    def attention(q, k, v, size=6):
        rows, length, heads, dim = q.shape
        at = jnp.arange(length)
        cut = lambda a: jnp.moveaxis(a.reshape(rows, length // size, size, heads, dim), 1, 0)

        def one(carry, block):
            top, total, o = carry
            k, v, first = block
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / dim**0.5
            seen = at[:, None] >= first + jnp.arange(size)
            scores = jnp.where(seen, scores, -1e9)
            new = jnp.maximum(top, scores.max(-1))
            probs, fade = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            o = o * fade[..., None] + jnp.einsum("bhqk,bkhd->bhqd", probs, v)
            return (new, total * fade + probs.sum(-1), o), None

        start = jnp.full((rows, heads, length), -1e9), jnp.zeros((rows, heads, length))
        start = (*start, jnp.zeros((rows, heads, length, dim)))
        firsts = jnp.arange(0, length, size)
        (_, total, o), _ = jax.lax.scan(jax.checkpoint(one), start, (cut(k), cut(v), firsts))
        return (o / total[..., None]).swapaxes(1, 2)

    return attending(attention)


@case("keys and values, a block of queries at a time")
def attention_by_queries() -> Case:
    """Memory-efficient attention by `lax.map` over blocks of queries."""

    def attention(q, k, v, size=8):
        length = q.shape[1]

        def one(first):
            part = jax.lax.dynamic_slice_in_dim(q, first, size, 1)
            seen = first + jnp.arange(size)[:, None] >= jnp.arange(length)
            return softmax_attention(part, k, v, seen)

        out = jax.lax.map(jax.checkpoint(one), jnp.arange(0, length, size))
        return jnp.moveaxis(out, 0, 1).reshape(q.shape)

    return attending(attention)


# -- positions


def interleaved(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def turned(x, cos, sin):
    half = x.shape[-1] // 2
    other = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * jnp.tile(cos, 2) + other * jnp.tile(sin, 2)


def by_complex(x, cos, sin):
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    y = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * jax.lax.complex(cos, sin)
    return jnp.stack([y.real, y.imag], -1).reshape(x.shape)


def rotary(rotate, positions_of=None):
    def loss(params, batch):
        ids = batch["ids"]
        at = batch["positions"] if "positions" in batch else jnp.arange(ids.shape[1])[None]
        angles = at[..., None] / 100 ** (jnp.arange(4) / 4)
        cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]

        def mix(p, x):
            q, k, v = qkv_of(p, x)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            return attend(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]

        x = _t.hidden_states(params, params["embed"][ids], mix)
        return _t.next_token_loss(x @ params["embed"].T, ids)

    batch = {"ids": _t.tokens()} | ({"positions": positions_of()} if positions_of else {})
    return Case(_t.transformer_params(**ATTENTION), loss, batch)


@case("keys and values")
def rope_interleaved() -> Case:
    return rotary(interleaved)


@case("keys and values")
def rope_halves() -> Case:
    return rotary(turned)


@case("keys and values")
def rope_complex() -> Case:
    return rotary(by_complex)


@case("keys and values")
def rope_of_positions() -> Case:
    """Positions come with the batch."""
    return rotary(turned, lambda: np.tile(np.arange(TOKENS, dtype=np.int32) % 11, (ROWS, 1)))


@case("keys and values")
def rope_table() -> Case:
    """Made once with numpy for a longer context, and sliced to the length of the batch."""
    angles = np.arange(64)[:, None] / 100 ** (np.arange(4) / 4)
    table = np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    def mix(p, x):
        cos, sin = jnp.asarray(table)[:, : x.shape[1], None]
        q, k, v = qkv_of(p, x)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        return attend(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]

    return language_model(mix, **ATTENTION)


@case("keys and values")
def learned_positions() -> Case:
    """A table of 32 positions, sliced."""

    def loss(params, ids):
        x = params["embed"][ids] + params["positions"][: ids.shape[1]]
        x = _t.hidden_states(params, x, _t.causal)
        return _t.next_token_loss(x @ params["embed"].T, ids)

    params = _t.transformer_params(**ATTENTION) | _t.weights(positions=(32, DIM))
    return Case(params, loss, _t.tokens())


@case("keys and values")
def sinusoids() -> Case:
    """The first transformer's, written into an array of zeros."""

    def loss(params, ids):
        length = ids.shape[1]
        angles = jnp.arange(length)[:, None] / 100 ** (jnp.arange(DIM // 2) * 2 / DIM)
        table = jnp.zeros((length, DIM)).at[:, ::2].set(jnp.sin(angles))
        table = table.at[:, 1::2].set(jnp.cos(angles))
        x = _t.hidden_states(params, params["embed"][ids] + table, _t.causal)
        return _t.next_token_loss(x @ params["embed"].T, ids)

    return Case(_t.transformer_params(**ATTENTION), loss, _t.tokens())


# -- documents and prefixes


def documents():
    """Segment ids and positions of packed rows, whose documents end between devices."""
    ends = draw_ends(ROWS)
    segments = (np.arange(TOKENS) >= ends[:, :, None]).sum(1).astype(np.int32)
    starts = np.maximum.accumulate(
        np.where(np.diff(segments, prepend=-1) != 0, np.arange(TOKENS), 0), axis=1
    )
    return segments, (np.arange(TOKENS) - starts).astype(np.int32)


def draw_ends(rows):
    return np.sort(_t.draw(3).choice(np.arange(2, TOKENS - 1), (rows, 3)), axis=1)


@case("keys and values")
def packed_documents() -> Case:
    """Tokens see those of their document; positions begin anew in each."""

    def loss(params, batch):
        segments = batch["segments"]
        same = segments[:, :, None] == segments[:, None]
        mask = (same & jnp.tri(same.shape[1], dtype=bool))[:, None]

        def mix(p, x):
            return attend(*qkv_of(p, x), mask=mask).reshape(x.shape) @ p["out"]

        x = params["embed"][batch["ids"]] + params["positions"][batch["positions"]]
        logits = _t.hidden_states(params, x, mix) @ params["embed"].T
        return _t.next_token_loss(logits, batch["ids"])

    segments, positions = documents()
    batch = {"ids": _t.tokens(), "segments": segments, "positions": positions}
    params = _t.transformer_params(**ATTENTION) | _t.weights(positions=(TOKENS, DIM))
    return Case(params, loss, batch)


@case("keys and values")
def prefix_mask() -> Case:
    """PaliGemma's: a prefix of each row is seen by all, as a cumulative sum of flags says."""

    def loss(params, batch):
        steps = jnp.cumsum(batch["begins"], axis=1)
        mask = (steps[:, None] <= steps[:, :, None])[:, None]

        def mix(p, x):
            return softmax_attention(*qkv_of(p, x), mask) @ p["out"]

        x = _t.hidden_states(params, params["embed"][batch["ids"]], mix)
        return _t.next_token_loss(x @ params["embed"].T, batch["ids"])

    begins = (np.arange(TOKENS) >= np.array([5, 11, 1, 17])[:, None]).astype(np.int32)
    batch = {"ids": _t.tokens(), "begins": begins}
    return Case(_t.transformer_params(**ATTENTION), loss, batch)
