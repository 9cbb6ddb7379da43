"""Models of families that `subjects.py` has not: `tests/test_families.py` and others use them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from tests.step.tensor import cpu_mesh

LAYERS, DIM, HIDDEN, VOCAB, TOKENS, ROWS = 2, 16, 32, 32, 5, 8
BATCH = np.random.default_rng(0).integers(0, VOCAB, (ROWS, TOKENS), np.int32)


class Family(NamedTuple):
    make: Callable[[], Any]  # a state
    loss: Callable[..., Any]
    scans: bool = True
    mesh: Any = None


@functools.cache
def tx():
    return optax.adam(1e-2, eps=1e-4)


def next_token_loss(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def state_of(params):
    return TrainState.create(apply_fn=None, params=params, tx=tx())


# -- Flax linen


class LinenBlock(nn.Module):
    boxed: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.lecun_normal()
        cut = lambda *names: nn.with_partitioning(init, names) if self.boxed else init
        h = nn.Dense(HIDDEN, kernel_init=cut(None, "tensor"))(nn.LayerNorm()(x))
        return x + nn.Dense(DIM, kernel_init=cut("tensor", None))(nn.tanh(h)), None


class LinenModel(nn.Module):
    style: str

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, DIM)(tokens)
        block = nn.remat(LinenBlock) if "remat" in self.style else LinenBlock
        scanned = nn.scan(
            block,
            {"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = scanned("boxed" in self.style)(x, None)
        return nn.Dense(VOCAB)(x)


def linen(style):
    model = LinenModel(style)
    make = jax.jit(lambda: state_of(model.init(jax.random.key(1), BATCH)["params"]))
    loss = lambda p, tokens: next_token_loss(model.apply({"params": nn.unbox(p)}, tokens), tokens)
    return Family(make, loss, mesh=cpu_mesh() if "boxed" in style else None)


# -- Flax nnx


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock))(rngs)
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        call = nnx.scan(NnxBlock.__call__, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(call(self.blocks, self.embed(tokens)))


def nnx_split():
    """The state of `nnx.split` as the parameters of a TrainState."""
    model = lambda: NnxModel(nnx.Rngs(2))
    make = jax.jit(lambda: state_of(nnx.split(model(), nnx.Param)[1]))
    graphdef = nnx.graphdef(nnx.eval_shape(model))
    loss = lambda params, t: next_token_loss(nnx.merge(graphdef, params)(t), t)
    return Family(make, loss)


# -- Haiku


def haiku(stacked):
    hk = pytest.importorskip("haiku", reason="the Haiku tests need dm-haiku")

    def block(x):
        h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return x + hk.Linear(DIM)(jnp.tanh(hk.Linear(HIDDEN)(h)))

    def model(tokens):
        x = hk.Embed(VOCAB, DIM)(tokens)
        if stacked:
            x = hk.experimental.layer_stack(LAYERS)(block)(x)
        else:
            for _ in range(LAYERS):
                x = hk.remat(block)(x)
        return hk.Linear(VOCAB)(x)

    net = hk.without_apply_rng(hk.transform(model))
    make = jax.jit(lambda: state_of(net.init(jax.random.key(4), BATCH)))
    return Family(make, lambda p, t: next_token_loss(net.apply(p, t), t), scans=stacked)


FAMILIES: dict[str, Callable[[], Family]] = {
    "linen_scan": functools.partial(linen, "scan"),
    "linen_partitioned": functools.partial(linen, "scan remat boxed"),
    "nnx_split": nnx_split,
    "haiku": functools.partial(haiku, stacked=False),
    "haiku_stack": functools.partial(haiku, stacked=True),
}
