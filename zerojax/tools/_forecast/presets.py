"""Models by size, among them the ZeRO paper's, so that you can forecast without writing one."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zerojax._types import PyTree
from zerojax.tools._hlo.gpus import Gpu

REMATS = ("none", "dots", "full")
ATTENTIONS = ("xla", "cudnn")


@dataclasses.dataclass(frozen=True)
class Gpt:
    """A GPT-2: stacked layers in a scan, fp32 parameters cast to `compute`, learned positions, tied
    embeddings. The arrays of a layer have names: `remat` may name those to keep for backward."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 50304
    tokens: int = 1024
    compute: DTypeLike = jnp.bfloat16
    attention: str = "xla"  # "cudnn" is the fused kernel of GPUs

    named: ClassVar = ("qkv", "attended", "proj", "up", "down")  # the arrays of a layer

    def dims(self) -> PyTree:
        """Returns the shape of every parameter; those of `blocks` begin with the layers."""
        n, d = self.layers, self.hidden
        norms = {"norm1": (n, d), "norm2": (n, d)}
        attention = {"qkv": (n, d, 3 * d), "proj": (n, d, d)}
        blocks = norms | attention | {"up": (n, d, 4 * d), "down": (n, 4 * d, d)}
        return {"embed": (self.vocab, d), "pos": (self.tokens, d), "norm": (d,), "blocks": blocks}

    def shapes(self) -> PyTree:
        dims, treedef = jax.tree.flatten(self.dims(), is_leaf=lambda node: isinstance(node, tuple))
        return treedef.unflatten(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in dims)

    @property
    def n_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes()))

    def make_state(self) -> TrainState:
        params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes())
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-4))  # type: ignore

    def batch(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.tokens), jnp.int32)

    def losses(self, remats: Sequence[str] = REMATS) -> dict[str, Callable[..., PyTree]]:
        for remat in remats:
            self._rematted(remat)  # refuses it before anything compiles
        return {remat: functools.partial(self.loss, remat=remat) for remat in remats}

    def loss(self, params: PyTree, tokens: jax.Array, remat: str = "full") -> jax.Array:
        params = jax.tree.map(lambda leaf: leaf.astype(self.compute), params)
        x, _ = jax.lax.scan(self._rematted(remat), self.embedded(params, tokens), params["blocks"])
        logits = self.logits(params, x)[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def _rematted(self, remat: str) -> Callable[..., PyTree]:
        """Returns a layer that keeps for backward only as much as `remat` says."""
        kept = remat.split("+")
        policies = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
        if {*kept} <= {*self.named}:
            policies[remat] = jax.checkpoint_policies.save_only_these_names(*kept)
        if remat not in ("none", *policies):
            raise ValueError(
                f"no remat {remat!r}. Name one of {', '.join(REMATS)}, or the arrays to keep for "
                f"backward, joined by +: {', '.join(self.named)}."
            )
        return self.layer if remat == "none" else jax.checkpoint(self.layer, policy=policies[remat])

    def embedded(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        return params["embed"][tokens] + params["pos"]

    def logits(self, params: PyTree, x: jax.Array) -> jax.Array:
        return _norm(x, params["norm"]) @ params["embed"].T

    def layer(self, x: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
        rows, tokens, _ = x.shape
        qkv = checkpoint_name(_norm(x, p["norm1"]) @ p["qkv"], "qkv")
        qkv = qkv.reshape(rows, tokens, 3, self.heads, -1)
        attended = self.attended(*(qkv[:, :, i] for i in range(3))).reshape(x.shape)
        x = x + checkpoint_name(attended @ p["proj"], "proj")
        up = checkpoint_name(_norm(x, p["norm2"]) @ p["up"], "up")
        return x + checkpoint_name(jax.nn.gelu(up) @ p["down"], "down"), None

    def attended(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if self.attention not in ATTENTIONS:
            raise ValueError(
                f"no attention {self.attention!r}. Name one of {', '.join(ATTENTIONS)}."
            )
        attend = functools.partial(jax.nn.dot_product_attention, implementation=self.attention)
        return checkpoint_name(attend(q, k, v, is_causal=True), "attended")


@dataclasses.dataclass(frozen=True)
class Llama(Gpt):
    """A GPT with rotary positions, grouped-query attention, SwiGLU and a head of its own."""

    named: ClassVar = ("q", "k", "v", "attended", "proj", "gate", "up", "down")
    kv_heads: int = 8
    inner: int = 14336

    def dims(self) -> PyTree:
        n, d, kv = self.layers, self.hidden, self.hidden // self.heads * self.kv_heads
        norms = {"norm1": (n, d), "norm2": (n, d)}
        attention = {"q": (n, d, d), "k": (n, d, kv), "v": (n, d, kv), "proj": (n, d, d)}
        up, down = (n, d, self.inner), (n, self.inner, d)
        blocks = norms | attention | {"gate": up, "up": up, "down": down}
        head = {"embed": (self.vocab, d), "norm": (d,), "head": (d, self.vocab)}
        return head | {"blocks": blocks}

    def embedded(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        return params["embed"][tokens]

    def logits(self, params: PyTree, x: jax.Array) -> jax.Array:
        return _rms_norm(x, params["norm"]) @ params["head"]

    def layer(self, x: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
        rows, tokens, dim = x.shape
        h = _rms_norm(x, p["norm1"])
        q, k, v = (
            checkpoint_name(h @ p[name], name).reshape(rows, tokens, -1, dim // self.heads)
            for name in "qkv"
        )
        attended = self.attended(_rotated(q), _rotated(k), v).reshape(x.shape)
        x = x + checkpoint_name(attended @ p["proj"], "proj")
        return x + checkpoint_name(self.fed_forward(_rms_norm(x, p["norm2"]), p), "down"), None

    def fed_forward(self, h: jax.Array, p: PyTree) -> jax.Array:
        gate, up = (checkpoint_name(h @ p[name], name) for name in ("gate", "up"))
        return (jax.nn.silu(gate) * up) @ p["down"]


@dataclasses.dataclass(frozen=True)
class Mixtral(Llama):
    """A Llama with several experts, to the `top` of which a router sends each token.

    An expert has room for the tokens of a sequence that it would get if all experts got the same
    number, times `room`; it leaves out further ones. So a step computes, and counts, the FLOPs of
    `top` experts a token, on any GPUs. No loss balances the experts.
    """

    experts: int = 8
    top: int = 2
    room: float = 1.0

    def dims(self) -> PyTree:
        n, d, e = self.layers, self.hidden, self.experts
        up, down = (n, e, d, self.inner), (n, e, self.inner, d)
        dims = super().dims()
        dims["blocks"] |= {"router": (n, d, e), "gate": up, "up": up, "down": down}
        return dims

    def fed_forward(self, h: jax.Array, p: PyTree) -> jax.Array:
        tokens, dim = h.shape[1:]
        scores, experts = jax.lax.top_k((h @ p["router"]).astype(jnp.float32), self.top)
        shares = jax.nn.softmax(scores).astype(h.dtype)
        room = math.ceil(self.room * tokens * self.top / self.experts)
        slots, places = jax.vmap(lambda chosen: _dispatched(chosen, self.experts, room))(experts)
        read = jax.vmap(lambda rows, at: rows.at[at].get(mode="fill", fill_value=0))
        x = read(h, slots).reshape(-1, self.experts, room, dim)
        each = functools.partial(jnp.einsum, "retd,edf->retf", x)
        gate, up = (checkpoint_name(each(p[name]), name) for name in ("gate", "up"))
        out = jnp.einsum("retf,efd->retd", jax.nn.silu(gate) * up, p["down"])
        outputs = read(out.reshape(-1, self.experts * room, dim), places)
        return (outputs * shares[..., None]).sum(2)


# Name, layers, hidden size, heads: small ones, the paper's runs without model parallelism and its
# baselines; those with it, of which 17b is Turing-NLG.
GPTS = """
124m 12 768 12, 350m 24 1024 16, 1.16b 24 1920 16, 1.38b 40 1536 16, 1.5b 34 1920 16,
2.5b 54 1920 16, 4b 64 2304 24, 6b 52 3072 24, 7.5b 36 4096 32, 8b 72 3072 24, 10b 50 4096 32,
11b 54 4096 32, 12b 58 4096 32, 13b 62 4096 32,
17b 78 4256 28, 20b 98 4096 32, 40b 88 6144 32, 60b 132 6144 32, 80b 100 8192 64,
100b 125 8192 64, 120b 150 8192 64, 140b 175 8192 64, 170b 212 8192 64, 1t 128 25600 200
"""
PRESETS = {
    **{name: Gpt(int(n), int(d), int(h)) for name, n, d, h in map(str.split, GPTS.split(","))},
    "llama-8b": Llama(32, 4096, 32, vocab=128256),
    "llama-13b": Llama(40, 5120, 40, vocab=32000, inner=13824),
    "llama-70b": Llama(80, 8192, 64, vocab=128256, inner=28672),
    "llama-405b": Llama(126, 16384, 128, vocab=128256, inner=53248),
    "mixtral-8x7b": Mixtral(32, 4096, 32, vocab=32000),
}


def preset(name: str, /, **fields: PyTree) -> Gpt:
    """Returns a model by its size, with these fields."""
    if name.lower() not in PRESETS:
        raise ValueError(
            f"no preset {name!r}. Name one of {', '.join(PRESETS)}, or module:function."
        )
    model = PRESETS[name.lower()]
    names = [field.name for field in dataclasses.fields(model)]
    for field in fields.keys() - names:
        raise ValueError(
            f"--set {field}: there is no {field!r} in {type(model).__name__}. Its fields: "
            f"{', '.join(names)}."
        )
    return dataclasses.replace(model, **fields)


def on(model: Gpt, gpu: Gpu) -> Gpt:
    """Returns a model that computes in the 16 bits that a GPU has."""
    return dataclasses.replace(model, compute=jnp.dtype(gpu.half))


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-5) * scale).astype(x.dtype)


def _dispatched(experts: jax.Array, count: int, room: int) -> tuple[jax.Array, jax.Array]:
    """Gives the tokens of a sequence slots in the experts of their choice, (tokens, top).

    Returns the token in each slot, and the slot for each choice. Where a slot stays empty, or an
    expert is full, the number is out of range.
    """
    tokens, top = experts.shape
    chosen = jax.nn.one_hot(experts.reshape(-1), count, dtype=jnp.int32)
    before = (jnp.cumsum(chosen, 0) * chosen).sum(1) - 1  # earlier choices of the same expert
    slots = jnp.where(before < room, experts.reshape(-1) * room + before, count * room)
    inside = jnp.full(count * room, tokens).at[slots].set(jnp.arange(tokens * top) // top)
    return inside, slots.reshape(tokens, top)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary position embedding of (rows, tokens, heads, features)."""
    tokens, features = x.shape[1], x.shape[3]
    rates = 500000.0 ** (-jnp.arange(0, features, 2) / features)
    angles = jnp.arange(tokens)[:, None, None] * rates
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
