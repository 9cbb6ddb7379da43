"""Models of published steps that no preset has: mixtures by masks, and matmuls of float8."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zerojax.tools._forecast import presets as _presets


@dataclasses.dataclass(frozen=True)
class Masked(_presets.Mixtral):
    """A Mixtral whose tokens go to the experts and back by matmuls with masks, as in MaxText with
    a `capacity_factor`."""

    named: ClassVar = (*_presets.Mixtral.named, "routed")

    def fed_forward(self, h, p):
        rows, tokens, _ = h.shape
        scores, experts = jax.lax.top_k((h @ p["router"]).astype(jnp.float32), self.top)
        shares = jax.nn.softmax(scores).astype(h.dtype)
        room = math.ceil(self.room * tokens * self.top / self.experts)
        chosen = jax.nn.one_hot(experts, self.experts, dtype=jnp.int32)
        flat = chosen.reshape(rows, -1, self.experts)
        slots = (jnp.cumsum(flat, 1) * flat).reshape(chosen.shape).sum(2) - 1  # -1: not chosen
        mask = jax.nn.one_hot(slots, room, dtype=h.dtype)
        x = jnp.einsum("rsd,rset->retd", h, mask)
        each = functools.partial(jnp.einsum, "retd,edf->retf", x)
        gate, up = (checkpoint_name(each(p[name]), name) for name in ("gate", "up"))
        out = jnp.einsum("retf,efd->retd", jax.nn.silu(gate) * up, p["down"])
        weights = jnp.einsum("rske,rsk->rse", chosen.astype(h.dtype), shares)
        routed = checkpoint_name(out, "routed")
        return jnp.einsum("retd,rset->rsd", routed, mask * weights[..., None])


@dataclasses.dataclass(frozen=True)
class Float8(_presets.Llama):
    """A Llama whose layers multiply in float8. Scales are 1: others would cost no matmul."""

    def layer(self, x, p):
        return super().layer(x, {k: Weight(w) if w.ndim == 2 else w for k, w in p.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weight:
    """A matrix that multiplies in float8; `@` takes it for an array."""

    value: jax.Array

    def __rmatmul__(self, x):
        return _multiplied(x, self.value)


@jax.custom_vjp
def _multiplied(x, weight):
    return _forward(x, weight)[0]


def _forward(x, weight):
    x, weight = x.astype(jnp.float8_e4m3fn), weight.astype(jnp.float8_e4m3fn)
    return _dot(x, weight, [x.ndim - 1], [0]), (x, weight)


def _backward(kept, gradient):
    x, weight = kept
    gradient = gradient.astype(jnp.float8_e5m2)
    last, rows = x.ndim - 1, [*range(x.ndim - 1)]
    return _dot(gradient, weight, [last], [1]), _dot(x, gradient, rows, rows)


def _dot(x, y, *contracted):
    numbers = (contracted, ((), ()))
    return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.bfloat16)


_multiplied.defvjp(_forward, _backward)
