"""Weights that several microbatches read, whose gradients are summed in a wider dtype."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._engine.vary import is_float
from zerojax._plan.precision import wide


class Shared(NamedTuple):
    """A weight that all microbatches read; `total` stands for the sum of its gradients.

    The gradients of narrow floats are summed in a wider one, as microbatches that run one after
    another are. Nothing computes with the value of `total`; its gradient is the sum.
    """

    value: Array
    total: Array


def shared(value: Array) -> Any:
    """Returns a weight as the microbatches read it."""
    is_narrow = jnp.issubdtype(value.dtype, jnp.floating) and wide(value.dtype) != value.dtype
    return Shared(value, _total(value, wide(value.dtype))) if is_narrow else value


def bound(eqn: JaxprEqn, values: Sequence[Any]) -> list[Array]:
    """Runs one equation, some of whose operands are shared."""
    if eqn.primitive.name == "dot_general" and isinstance(values[1], Shared):
        return [_product(_plain(values[0]), *values[1], _Dot.of(eqn))]
    if eqn.primitive.name == "dot_general" and isinstance(values[0], Shared):
        return [_product(_plain(values[1]), *values[0], _Dot.of(eqn, weight=0))]
    return _compat.bind(eqn, list(map(_plain, values)))


def mapped(
    one: Callable, weights: list[Any], consts: list[Array], parts: list[Array], count: int
) -> list[Array]:
    """Returns the outputs of `one(weights, consts, part)` for each of `count` parts, stacked."""
    return lax.scan(lambda _, part: (None, one(weights, consts, part)), None, parts, length=count)[
        1
    ]


@dataclasses.dataclass(frozen=True)
class Last:
    """The last segment of a loss, of which the output numbered `at` is the loss itself.

    `one(weights, consts, part)` is that of one of `count` microbatches. Backward begins with the
    derivative of each loss, and that is known to be `scale`. So forward takes the gradients too, of
    one microbatch after another: the logits are computed once, and neither they nor what they are
    computed from waits for backward.
    """

    one: Callable[..., list[Array]]
    count: int
    at: int
    scale: float

    def __call__(self, weights: list[Array], consts: list, parts: list[Array]) -> list[Array]:
        """Returns what `mapped` does."""

        @jax.custom_vjp
        def losses(weights: list[Array], consts: list, parts: list[Array]) -> list[Array]:
            return mapped(self.one, weights, consts, parts, self.count)

        losses.defvjp(self.forward, self.backward)
        return losses(weights, consts, parts)

    def forward(
        self, weights: list[Array], consts: list[Array], parts: list[Array]
    ) -> tuple[list[Array], Any]:
        """Returns the outputs; and the gradients, those of weights summed."""
        totals = [jnp.zeros(w.shape, wide(w.dtype)) if is_float(w) else None for w in weights]

        def loss(varied: tuple[list, list], part: list[Array]) -> tuple[Array, list[Array]]:
            pairs = zip(weights, varied[0], strict=True)
            given = [w if total is None else Shared(w, total) for w, total in pairs]
            own = zip(part, varied[1], strict=True)
            outs = self.one(given, consts, [x if mine is None else mine for x, mine in own])
            value = outs[self.at]
            return value.astype(wide(value.dtype)) * self.scale, outs

        def step(sums: list, part: list[Array]) -> tuple[list, tuple[list[Array], list]]:
            mine = [x if is_float(x) else None for x in part]
            (more, grads), outs = jax.grad(loss, has_aux=True)((totals, mine), part)
            return jax.tree.map(jnp.add, sums, more), (outs, grads)

        sums, (outs, grads) = lax.scan(step, totals, parts, length=self.count)
        pairs = zip(sums, weights, strict=True)
        sums = [None if s is None else s.astype(w.dtype) for s, w in pairs]
        # Sums in a wide dtype would be kept until something reads them.
        return outs, lax.optimization_barrier((sums, [None] * len(consts), grads))

    def backward(self, saved: Any, cts: list[Array]) -> Any:
        # All microbatches count alike.
        factor = cts[self.at][0] / self.scale

        def scaled(grad: Array) -> Array:
            return (grad.astype(wide(grad.dtype)) * factor).astype(grad.dtype)

        return jax.tree.map(scaled, saved)


def _plain(value: Any) -> Any:
    return _picked(*value) if isinstance(value, Shared) else value


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _total(value: Array, dtype: DTypeLike) -> Array:
    """Returns what the gradient of `value` comes out through, in this dtype."""
    return jnp.zeros(value.shape, dtype)


def _total_fwd(value: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    return jnp.zeros(value.shape, dtype), jnp.zeros((0,), value.dtype)


def _total_bwd(dtype: DTypeLike, like: Array, grad: Array) -> tuple[Array]:
    return (grad.astype(like.dtype),)


_total.defvjp(_total_fwd, _total_bwd)


@jax.custom_vjp
def _picked(value: Array, total: Array) -> Array:
    """Returns `value`, whose gradient goes to `total`."""
    return value


def _picked_fwd(value: Array, total: Array) -> tuple[Array, Array]:
    return value, jnp.zeros((0,), total.dtype)


def _picked_bwd(like: Array, grad: Array) -> tuple[None, Array]:
    return None, grad.astype(like.dtype)


_picked.defvjp(_picked_fwd, _picked_bwd)


# -- matmuls with a weight, whose gradients leave the matmul in the dtype of their sum


@dataclasses.dataclass(frozen=True)
class _Dot:
    """A matmul, as `lax.dot_general` takes it. `weight`: which of its operands is one."""

    weight: int
    contracting: tuple[tuple[int, ...], tuple[int, ...]]  # of the other, of the weight
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, eqn: JaxprEqn, weight: int = 1) -> "_Dot":
        contracting, batch = eqn.params["dimension_numbers"]
        options = {name: x for name, x in eqn.params.items() if name != "dimension_numbers"}
        order = slice(None, None, 1 if weight else -1)
        return cls(weight, contracting[order], batch[order], tuple(options.items()))

    def __call__(self, other: Array, weight: Array) -> Array:
        order = slice(None, None, 1 if self.weight else -1)
        dims: Any = self.contracting[order], self.batch[order]
        left, right = (other, weight)[order]
        return lax.dot_general(left, right, dims, **dict(self.options))

    def gradient(self, other: Array, grad: Array, rank: int, dtype: DTypeLike) -> Array:
        """Returns the gradient of the weight, of `rank` dimensions, in `dtype`."""
        (theirs, mine), (their_batch, my_batch) = self.contracting, self.batch
        free = [d for d in range(other.ndim) if d not in (*theirs, *their_batch)]
        my_free = [d for d in range(rank) if d not in (*mine, *my_batch)]
        # In the result, the batch comes first, then what is free of the operands in their order.
        first = len(my_batch) + (0 if self.weight else len(my_free))
        summed = range(first, first + len(free))
        kept = [d for d in range(len(my_batch), grad.ndim) if d not in summed]
        # XLA:CPU has no narrow matmul with a wide result but the plainest: each group of dimensions
        # is one.
        left = _merged(other, their_batch, free, sorted(theirs))
        right = _merged(grad, range(len(my_batch)), summed, kept)
        found = lax.dot_general(
            left,
            right,
            (((1,), (1,)), ((0,), (0,))) if my_batch else (((0,), (0,)), ((), ())),
            precision=dict(self.options)["precision"],
            preferred_element_type=dtype,
        )
        sizes = [other.shape[d] for d in (*their_batch, *sorted(theirs))]
        found = found.reshape(*sizes, *(grad.shape[d] for d in kept))
        order = [*my_batch, *(mine[theirs.index(d)] for d in sorted(theirs)), *my_free]
        return found.transpose([order.index(d) for d in range(rank)])


def _merged(array: Array, *groups: Sequence[int]) -> Array:
    """Returns an array with a dimension for each group of its dimensions; the first may be none."""
    sizes = [math.prod(array.shape[d] for d in group) for group in groups]
    moved = array.transpose([d for group in groups for d in group])
    return moved.reshape(sizes if groups[0] else sizes[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(other: Array, weight: Array, total: Array, dot: _Dot) -> Array:
    """Returns a matmul with a weight, whose gradient goes to `total`.

    In the dtype of the sum, the gradient is added to it where the matmul writes its result:
    written by itself and added, it cost 5% of a 7.5B step's compute.
    """
    return dot(other, weight)


def _product_fwd(
    other: Array, weight: Array, total: Array, dot: _Dot
) -> tuple[Array, tuple[Array, Array, Array]]:
    return dot(other, weight), (other, weight, jnp.zeros((0,), total.dtype))


def _product_bwd(
    dot: _Dot, saved: tuple[Array, Array, Array], grad: Array
) -> tuple[Array, None, Array]:
    other, weight, like = saved
    (d_other,) = jax.linear_transpose(lambda x: dot(x, weight), other)(grad)
    return d_other, None, dot.gradient(other, grad, weight.ndim, like.dtype)


_product.defvjp(_product_fwd, _product_bwd)
