"""Mixtures of experts in the libraries that people write them in."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.support.experts import table as _e
from tests.support.experts.dropless import best
from tests.support.experts.table import EXPERTS, HIDDEN, LAYERS, Case, case
from tests.support.sequences import table as _t
from tests.support.sequences.table import DIM, VOCAB, initialized, next_token_loss


def one_hot_gates(logits):
    weight, chosen = best(logits, 2)
    return jnp.sum(jax.nn.one_hot(chosen, EXPERTS) * weight[..., None], axis=-2)


def rooms_of(gates, room=8):
    """(token, expert, seat), one-hot."""
    mask = (gates > 0).astype(jnp.int32)
    seat = (jnp.cumsum(mask, axis=0) - 1) * mask
    return jax.nn.one_hot(seat, room) * mask[..., None]


# -- Flax linen


class LinenExpert(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(DIM)(nn.gelu(nn.Dense(HIDDEN)(x)))


class LinenMixture(nn.Module):
    has_rooms: bool

    @nn.compact
    def __call__(self, x):
        takes: Any = 0 if self.has_rooms else None
        flat = x.reshape(-1, DIM)
        gates = one_hot_gates(nn.Dense(EXPERTS, use_bias=False, name="router")(flat))
        experts = nn.vmap(
            LinenExpert,
            in_axes=takes,
            out_axes=0,
            axis_size=EXPERTS,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )(name="experts")
        if self.has_rooms:
            send = rooms_of(gates)
            y = experts(jnp.einsum("tec,td->ecd", send, flat))
            y = jnp.einsum("tec,ecd->td", send * gates[..., None], y)
        else:
            y = jnp.einsum("te,etd->td", gates, experts(flat))
        return y.reshape(x.shape)


class LinenModel(nn.Module):
    has_rooms: bool = True

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCAB, DIM)
        x = embed(ids)
        for _ in range(LAYERS):
            x = x + nn.remat(LinenMixture)(self.has_rooms)(nn.RMSNorm()(x))
        return embed.attend(nn.RMSNorm()(x))


def linen(model: Any) -> Case:
    params = initialized(model.init, _e.ids())["params"]
    loss = lambda params, ids: next_token_loss(model.apply({"params": params}, ids), ids)
    return Case(params, loss, _e.ids())


@case("experts/")
def linen_vmap_with_rooms() -> Case:
    return linen(LinenModel())


@case("experts/")
def linen_vmap_of_all_rows() -> Case:
    return linen(LinenModel(has_rooms=False))


# -- Flax nnx


class NnxExperts(nnx.Module):
    """In arrays of all experts."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.up = nnx.Param(init(rngs.params(), (EXPERTS, DIM, HIDDEN)))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, DIM)))

    def __call__(self, x, gates):
        hidden = nnx.silu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        return jnp.einsum("btef,efd,bte->btd", hidden, self.down[...], gates)


class NnxExpert(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(DIM, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class NnxStack(nnx.Module):
    """A module of one expert, mapped over experts."""

    def __init__(self, rngs):
        create = nnx.split_rngs(splits=EXPERTS)(nnx.vmap(NnxExpert))
        self.stack = create(rngs)

    def __call__(self, x, gates):
        flat, gates = x.reshape(-1, DIM), gates.reshape(-1, EXPERTS)
        send = rooms_of(gates)
        rooms = jnp.einsum("tec,td->ecd", send, flat)
        y = nnx.vmap(lambda expert, rows: expert(rows))(self.stack, rooms)
        return jnp.einsum("tec,ecd,te->td", send, y, gates).reshape(x.shape)


class NnxModel(nnx.Module):
    def __init__(self, kind, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.routers = nnx.List([nnx.Linear(DIM, EXPERTS, rngs=rngs) for _ in range(LAYERS)])
        self.experts = nnx.List([kind(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for router, experts in zip(self.routers, self.experts, strict=True):
            h = self.norm(x)
            x = x + experts(h, one_hot_gates(router(h)))
        return self.embed.attend(self.norm(x))


def nnx_case(kind: type) -> Case:
    shapes = nnx.eval_shape(lambda: NnxModel(kind, nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(shapes, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    loss = lambda params, ids: next_token_loss(nnx.merge(graphdef, params, rest)(ids), ids)
    return Case(_t.filled(params), loss, _e.ids())


@case("experts/")
def nnx_arrays() -> Case:
    return nnx_case(NnxExperts)


@case("experts/")
def nnx_vmap() -> Case:
    return nnx_case(NnxStack)


# -- Equinox


@case("experts/")
def equinox() -> Case:
    """An ensemble, written for one token."""
    eqx = pytest.importorskip("equinox", reason="the Equinox tests need equinox")

    class Mixture(eqx.Module):
        router: Any
        experts: Any

        def __init__(self, key):
            key, *keys = jax.random.split(key, EXPERTS + 1)
            mlp = lambda key: eqx.nn.MLP(DIM, DIM, HIDDEN, 1, jax.nn.gelu, key=key)
            self.router = eqx.nn.Linear(DIM, EXPERTS, key=key)
            self.experts = eqx.filter_vmap(mlp)(jnp.stack(keys))

        def __call__(self, x):
            apply = lambda expert, x: expert(x)
            y = eqx.filter_vmap(apply, in_axes=(eqx.if_array(0), None))(self.experts, x)
            return one_hot_gates(self.router(x)) @ y

    class Model(eqx.Module):
        embed: Any
        layers: list
        head: Any

        def __init__(self, key):
            embed, head, *layers = jax.random.split(key, LAYERS + 2)
            self.embed = eqx.nn.Embedding(VOCAB, DIM, key=embed)
            self.layers = [Mixture(layer) for layer in layers]
            self.head = eqx.nn.Linear(DIM, VOCAB, key=head)

        def __call__(self, ids):
            x = jax.vmap(self.embed)(ids)
            for layer in self.layers:
                x = x + jax.vmap(layer)(x)
            return jax.vmap(self.head)(x)

    is_array = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    params, static = eqx.partition(eqx.filter_eval_shape(Model, jax.random.key(0)), is_array)

    def loss(params, ids):
        return next_token_loss(jax.vmap(eqx.combine(params, static))(ids), ids)

    return Case(_t.filled(params), loss, _e.ids())
