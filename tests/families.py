"""One small transformer in every family of models, and its loop on one device, in the family's
own style."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh

import zerojax
import zerojax.nnx
from tests.models import gpt_loss, gpt_params

LAYERS, DIM, HEADS, VOCAB, TOKENS, ROWS = 2, 32, 4, 64, 12, 16
BATCH = jax.random.randint(jax.random.key(0), (ROWS, TOKENS), 0, VOCAB)
MASK = np.tril(np.ones((TOKENS, TOKENS), bool))
# Keys have no bias: softmax takes it out, and its gradient would be rounding noise.


class Family(NamedTuple):
    """`make` makes a state, or nnx's model and optimizer; `loss` takes what the family's does."""

    make: Callable[[], Any]
    loss: Callable[..., Any]
    scans: bool = False
    mesh: Any = None

    objects: bool = False  # of nnx, to be updated in place


@functools.cache
def tx():
    return optax.adam(1e-2, eps=1e-4)


def next_token_loss(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


# -- plain pytrees


def plain():
    make = lambda: TrainState.create(apply_fn=None, params=gpt_params(LAYERS), tx=tx())
    return Family(
        jax.jit(make), lambda p, t: gpt_loss({**p, "pos": p["pos"][:TOKENS]}, t), scans=True
    )


# -- Flax linen


class LinenBlock(nn.Module):
    boxed: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.lecun_normal()
        cut = lambda *names: nn.with_partitioning(init, names) if self.boxed else init
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS, use_bias=False)
        x = x + attention(nn.LayerNorm()(x), mask=MASK)
        h = nn.Dense(4 * DIM, kernel_init=cut(None, "tensor"))(nn.LayerNorm()(x))
        return x + nn.Dense(DIM, kernel_init=cut("tensor", None))(nn.gelu(h)), None


class LinenModel(nn.Module):
    style: str

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, DIM)(tokens)
        block = nn.remat(LinenBlock) if "remat" in self.style else LinenBlock
        if "scan" in self.style:
            axes = {"params": 0}
            names = {nn.PARTITION_NAME: None}
            x, _ = nn.scan(block, axes, split_rngs={"params": True}, length=LAYERS,
                           metadata_params=names)("boxed" in self.style)(x, None)  # fmt: skip
        else:
            for _ in range(LAYERS):
                x, _ = block()(x)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def linen(style):
    model = LinenModel(style)

    @jax.jit
    def make():
        params = model.init(jax.random.key(1), BATCH)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx())

    loss = lambda p, tokens: next_token_loss(model.apply({"params": nn.unbox(p)}, tokens), tokens)
    return Family(make, loss, "scan" in style, two_axes() if "boxed" in style else None)


def two_axes():
    devices = np.array(jax.devices()).reshape(4, 2)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


# -- Flax nnx


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(DIM, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, decode=False, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
        self.down = nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), mask=MASK)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NnxModel(nnx.Module):
    def __init__(self, style, rngs):
        self.style = style
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        if "scan" in style:
            self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock))(rngs)
        else:
            self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        call = nnx.remat(NnxBlock.__call__) if "remat" in self.style else NnxBlock.__call__
        if "scan" in self.style:
            x = nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = call(block, x)
        return self.head(self.norm(x))


def nnx_model(style):
    def make():
        model = NnxModel(style, nnx.Rngs(2))
        return model, nnx.Optimizer(model, tx(), wrt=nnx.Param)

    loss = lambda model, tokens: next_token_loss(model(tokens), tokens)
    return Family(nnx.jit(make), loss, "scan" in style, objects=True)


def nnx_split(style):
    """The state of `nnx.split` as the parameters of a TrainState."""

    def split():
        return nnx.split(NnxModel(style, nnx.Rngs(2)), nnx.Param)

    @jax.jit
    def make():
        return TrainState.create(apply_fn=None, params=split()[1], tx=tx())

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: NnxModel(style, nnx.Rngs(2))))
    loss = lambda params, t: next_token_loss(nnx.merge(graphdef, params)(t), t)
    return Family(make, loss, "scan" in style)


# -- Equinox


def equinox():
    eqx = pytest.importorskip("equinox", reason="the Equinox tests need equinox")

    class Block(eqx.Module):
        norms: list
        attention: Any
        mlp: Any

        def __init__(self, key):
            k1, k2 = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(DIM) for _ in range(2)]
            self.attention = eqx.nn.MultiheadAttention(HEADS, DIM, key=k1)
            self.mlp = eqx.nn.MLP(DIM, DIM, 4 * DIM, 1, jax.nn.gelu, key=k2)

        def __call__(self, x):
            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h, mask=MASK)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    class Model(eqx.Module):
        embed: Any
        blocks: Block
        norm: Any
        head: Any

        def __init__(self, key):
            k1, k2, k3 = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(VOCAB, DIM, key=k1)
            self.blocks = eqx.filter_vmap(Block)(jax.random.split(k2, LAYERS))
            self.norm = eqx.nn.LayerNorm(DIM)
            self.head = eqx.nn.Linear(DIM, VOCAB, key=k3)

        def __call__(self, tokens):
            x = jax.vmap(self.embed)(tokens)
            layers, static = eqx.partition(self.blocks, eqx.is_array)
            step = lambda x, layer: (eqx.combine(layer, static)(x), None)
            x, _ = jax.lax.scan(step, x, layers)
            return jax.vmap(self.head)(jax.vmap(self.norm)(x))

    make = lambda: zerojax.ModuleState.create(Model(jax.random.key(3)), tx())
    return Family(
        jax.jit(make), lambda model, t: next_token_loss(jax.vmap(model)(t), t), scans=True
    )


# -- Haiku


def haiku(style):
    hk = pytest.importorskip("haiku", reason="the Haiku tests need dm-haiku")

    def block(x):
        norm = lambda x: hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        init = hk.initializers.VarianceScaling(1.0)
        attention = hk.MultiHeadAttention(HEADS, DIM // HEADS, w_init=init, with_bias=False)
        h = norm(x)
        x = x + attention(h, h, h, mask=MASK[None, None])
        return x + hk.Linear(DIM)(jax.nn.gelu(hk.Linear(4 * DIM)(norm(x))))

    def model(tokens):
        x = hk.Embed(VOCAB, DIM)(tokens)
        if style == "layer_stack":
            x = hk.experimental.layer_stack(LAYERS)(block)(x)
        else:
            for _ in range(LAYERS):
                x = hk.remat(block)(x)
        return hk.Linear(VOCAB)(x)

    net = hk.without_apply_rng(hk.transform(model))

    @jax.jit
    def make():
        params = net.init(jax.random.key(4), BATCH)
        return TrainState.create(apply_fn=net.apply, params=params, tx=tx())

    return Family(
        make, lambda p, t: next_token_loss(net.apply(p, t), t), scans=style == "layer_stack"
    )


FAMILIES: dict[str, Callable[[], Family]] = {
    "plain": plain,
    "linen": functools.partial(linen, "unrolled"),
    "linen_remat": functools.partial(linen, "unrolled remat"),
    "linen_scan": functools.partial(linen, "scan"),
    "linen_scan_remat": functools.partial(linen, "scan remat"),
    "linen_partitioned": functools.partial(linen, "scan remat boxed"),
    "nnx": functools.partial(nnx_model, "unrolled"),
    "nnx_remat": functools.partial(nnx_model, "unrolled remat"),
    "nnx_scan": functools.partial(nnx_model, "scan remat"),
    "nnx_split": functools.partial(nnx_split, "scan"),
    "equinox": equinox,
    "haiku": functools.partial(haiku, "unrolled"),
    "haiku_stack": functools.partial(haiku, "layer_stack"),
}


@functools.cache
def family_of(name: str) -> Family:
    return FAMILIES[name]()


# -- loops


class Run(NamedTuple):
    losses: list[float]
    state: Any


def nnx_loop(family: Family, steps: int) -> Run:
    model, optimizer = family.make()

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(family.loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [float(train_step(model, optimizer, BATCH)) for _ in range(steps)]
    return Run(losses, zerojax.nnx.state(model, optimizer))


def equinox_loop(family: Family, steps: int) -> Run:
    import equinox as eqx

    state = family.make()
    model, opt_state = state.model, state.opt_state

    @eqx.filter_jit
    def train_step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(family.loss)(model, batch)
        updates, opt_state = state.tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(steps):
        model, opt_state, loss = train_step(model, opt_state, BATCH)
        losses.append(float(loss))
    return Run(losses, state.replace(params=eqx.filter(model, eqx.is_inexact_array)))


def plain_loop(family: Family, steps: int) -> Run:
    @jax.jit
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(family.loss)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    state, losses = family.make(), []
    for _ in range(steps):
        state, loss = train_step(state, BATCH)
        losses.append(float(loss))
    return Run(losses, state)


@functools.cache
def one_device(name: str, steps: int) -> Run:
    family = family_of(name)
    if family.objects:
        return nnx_loop(family, steps)
    is_module = isinstance(family.make(), zerojax.ModuleState)
    return (equinox_loop if is_module else plain_loop)(family, steps)
