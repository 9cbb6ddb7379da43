"""The arrays of a loss: those to differentiate by, and layers of stacks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._jaxprs import Atom, type_of
from zerojax._kernel.travel import Held
from zerojax._types import PyTree, is_float

Value = Array | Held  # an input of a scope
Gradient = Any  # of a Value, in its structure; None where there is none
Cotangent = Array | SymbolicZero
T = TypeVar("T")


def vary(values: T, wanted: PyTree) -> tuple[list[Array], Callable[[list[Array]], T]]:
    """Returns the arrays of `values` to differentiate by, and a function that puts them back.

    `wanted` says which values need a gradient. For a `Held`, these are its shard, or what a loop
    changes of it. JAX differentiates by other values only if they are of a float dtype.
    """
    leaves, treedef = jax.tree.flatten(values)
    pairs = list(zip(leaves, _varies(values, wanted), strict=True))

    def join(varied: list[Array]) -> T:
        arrays = iter(varied)
        return treedef.unflatten([next(arrays) if varies else x for x, varies in pairs])

    return [x for x, varies in pairs if varies], join


def gradients(values: PyTree, wanted: PyTree, varied: Sequence[Array]) -> PyTree:
    """Returns gradients in the structure of `values`, None where `vary` left an array out.

    They get the dtypes of `values`: a user's own rule may return wider ones, which JAX accepts in
    some places but not in others.
    """
    leaves, treedef = jax.tree.flatten(values)
    grads, pairs = iter(varied), zip(leaves, _varies(values, wanted), strict=True)
    return treedef.unflatten([next(grads).astype(x.dtype) if m else None for x, m in pairs])


def _varies(values: PyTree, wanted: PyTree) -> list[bool]:
    """Returns, for each array of `values`, whether to differentiate by it."""

    def mask(value: Value, want: bool) -> Held | bool:
        if not isinstance(value, Held):
            return want and is_float(value)
        none = jax.tree.map(lambda _: False, value)
        if value.state is None:
            return dataclasses.replace(none, shard=want and is_float(value.shard))
        return dataclasses.replace(none, rest=want, state=(want,) * len(value.state))

    masks = jax.tree.map(mask, values, wanted, is_leaf=lambda x: isinstance(x, Held))
    return jax.tree.leaves(masks)


def by_hand(
    plain: Callable[[list[Value]], list[Array]],
    saving: Callable[[list[Value], tuple[bool, ...]], tuple[list[Array], T]],
    backward: Callable[[list[Value], T, list[Gradient]], list[Gradient]],
    inputs: Sequence[Value],
    outvars: Sequence[Atom],
) -> list[Array]:
    """Runs a function whose derivative is written by hand.

    Without derivatives, `plain(inputs)` runs. With them, `saving(inputs, wanted)` returns the
    outputs and the residuals, and `backward(inputs, residuals, cotangents)` the gradients of the
    inputs. Cotangents are arrays, or None for outputs without a float dtype.
    """

    @jax.custom_vjp
    def call(inputs: list[Value]) -> list[Array]:
        return plain(inputs)

    def is_leaf(x: object) -> bool:
        return hasattr(x, "perturbed")

    def forward(inputs: list[PyTree]) -> tuple[list[Array], tuple[list[Value], T]]:
        leaves = [jax.tree.leaves(value, is_leaf=is_leaf) for value in inputs]
        wanted = tuple(any(leaf.perturbed for leaf in each) for each in leaves)
        values = jax.tree.map(lambda leaf: leaf.value, inputs, is_leaf=is_leaf)
        outs, saved = saving(values, wanted)
        return outs, (values, saved)

    def transpose(residuals: tuple[list[Value], T], cts: list[Cotangent]) -> tuple[list[Gradient]]:
        return (backward(*residuals, _float_cotangents(cts, outvars)),)

    # Which of its inputs JAX differentiates is known only with symbolic zeros.
    call.defvjp(forward, transpose, symbolic_zeros=True)
    return list(map(_without_tangent, call(list(inputs))))


def _without_tangent(out: Array) -> Array:
    """Drops the (float0) tangent of an integer among a `custom_vjp`'s outputs, because most
    primitives cannot differentiate by it. `x | x` is `x`, and has no derivative."""
    is_int = jnp.issubdtype(out.dtype, jnp.integer) or out.dtype == bool
    return jnp.bitwise_or(out, out) if is_int else out


def _float_cotangents(cts: Sequence[Cotangent], outvars: Sequence[Atom]) -> list[Array | None]:
    """Returns cotangents as arrays of the dtypes of `outvars`, even if they are symbolic zeros. A
    loop's cotangents have one dimension more than `outvars`, which are those of an iteration."""

    def array(ct: Cotangent, dtype: DTypeLike) -> Array:
        if isinstance(ct, SymbolicZero):
            return jnp.zeros(cast(ShapedArray, ct.aval).shape, dtype)
        return ct.astype(dtype)

    pairs = zip(cts, map(type_of, outvars), strict=True)
    return [array(ct, out.dtype) if is_float(out) else None for ct, out in pairs]


def add(a: Gradient, b: Gradient) -> Gradient:
    """Returns the sum of two gradients, either of which may be None."""
    return b if a is None else a if b is None else a + b


def add_held(a: Held, b: Held) -> Held:
    """Returns the sum of two gradients of one `Held`."""
    return jax.tree.map(add, a, b, is_leaf=lambda x: x is None)


def zeros_like(value: Array | jax.ShapeDtypeStruct) -> Array | np.ndarray:
    """Returns the zero gradient of a value of any dtype."""
    if is_float(value):
        return jnp.zeros(value.shape, value.dtype)
    return np.zeros(value.shape, jax.dtypes.float0)


Index = int | Array  # of a layer
Turn = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # of `lax.scan`


# Indices count layers, and are never negative. A GPU's engines copy a slice of host memory only if
# its index is linear in the counter of the loop; a negative index that wraps around is not. If a
# loop carries a stack, XLA writes into it in place.


def sliced(stack: Array, i: Index) -> Array:
    """Returns layer `i` of a stack, as a stack of one."""
    return lax.dynamic_slice_in_dim(stack, i, 1, allow_negative_indices=False)


def written(stack: Array, layer: Array, i: Index) -> Array:
    """Writes a stack of one layer into a stack, as layer `i`."""
    return lax.dynamic_update_slice_in_dim(stack, layer, i, 0, allow_negative_indices=False)


def layer_of(stacks: PyTree, i: Index) -> PyTree:
    """Returns layer `i` of all stacks in a tree."""
    return jax.tree.map(lambda stack: lax.squeeze(sliced(stack, i), (0,)), stacks)


def with_layer(stacks: PyTree, layer: PyTree, i: Index) -> PyTree:
    """Writes a layer into its stacks."""
    return jax.tree.map(lambda stack, one: written(stack, one[None], i), stacks, layer)


def empty_stacks(layer: PyTree, length: int) -> PyTree:
    """Returns stacks of zeros for `length` layers."""
    return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), layer)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The layer of iteration `number` of forward, plus or minus a count, which a loop both scans
    and carries. `top` is the last position in the stacks, if forward walks them from there.

    [Note: two indices of a layer] A GPU's engines find a slice of host memory if its index is
    linear in a counter that the loop carries. With such an index into the device's own memory, XLA
    no longer runs the loop's collectives beside its compute (JAX 0.12: 615 ms instead of 546, 7.5B
    on 8 H100s). There the count comes from an `arange` that the loop scans.
    """

    number: int
    sign: int = 1
    scanned: Index = 0
    carried: Index = 0
    top: int | None = None
    finds: Callable[[], bool] = lambda: True  # whether XLA finds a slice by the counter

    @property
    def i(self) -> Index:
        """The position in stacks on the devices."""
        return self._index(self.scanned)

    def of(self, stack: Array) -> Index:
        on_host = _compat.is_on_host(stack) and self.finds()
        return self._index(self.carried if on_host else self.scanned)

    def _index(self, count: Index) -> Index:
        start, sign = self.number, self.sign
        if self.top is not None:
            start, sign = self.top - start, -sign
        return start - count if sign < 0 else count + start if start else count

    @property
    def before(self) -> "Layer":
        return dataclasses.replace(self, number=self.number - 1)

    @property
    def after(self) -> "Layer":
        return dataclasses.replace(self, number=self.number + 1)

    def since(self, first: int) -> "Layer":
        """Returns the layer in a stack of what forward made, from iteration `first` on."""
        return dataclasses.replace(self, number=self.number - first, top=None)


def fetched_layer(stacks: PyTree, at: Layer) -> PyTree:
    """Returns one layer of all stacks in a tree, on the devices."""
    return jax.tree.map(_compat.fetched, resting_layer_of(stacks, at))


def resting_layer_of(stacks: PyTree, at: Layer) -> PyTree:
    """Returns one layer of all stacks in a tree, in the memory where they rest."""
    return jax.tree.map(lambda stack: lax.squeeze(sliced(stack, at.of(stack)), (0,)), stacks)


def by_scanned_index(step: Turn, xs: PyTree, length: int) -> tuple[Turn, PyTree]:
    """Returns a step for `lax.scan`, and the tree that it scans, for layers in host memory that XLA
    would not find by the loop's counter. The loop scans the index of each layer instead."""
    stacks, treedef = jax.tree.flatten(xs)
    there = {k: stack for k, stack in enumerate(stacks) if _compat.is_on_host(stack)}

    def found(carry: PyTree, scanned: tuple[Array, list]) -> tuple[PyTree, PyTree]:
        at, layers = scanned
        for k, stack in there.items():
            layers[k] = layer_of(stack, at)
        return step(carry, treedef.unflatten(layers))

    here = [None if k in there else stack for k, stack in enumerate(stacks)]
    return found, (jnp.arange(length), here)


Changing = dict[int, tuple[Array, ...]]  # by position: a parameter at rest, and its state


class Hook(Protocol):
    """What backward does with a layer of the parameters that it changes, from their gradients.

    A loop carries these parameters and their states (`Held.state`), and gathers weights from there.
    With an option, backward updates them: see `How.updates`.
    """

    def read(self, stacks: Changing, at: Layer, source: T) -> tuple[PyTree, Changing, T]:
        """Returns what `finish` needs of a layer. Orders reads of `source`, if there are any,
        before later writes to the stacks."""
        ...

    def finish(
        self, stacks: Changing, read: PyTree, grads: Sequence[Gradient], at: Layer, left: T
    ) -> tuple[Changing, T]:
        """Returns the stacks with a layer that has these gradients. May have `left`, the gradients
        of the layer after it, arrive together with `read`."""
        ...


def changing(xs: Sequence[Value]) -> dict[int, Held]:
    """Returns those of a loop's scanned inputs that it changes."""
    held = {k: x for k, x in enumerate(xs) if isinstance(x, Held)}
    return {k: x for k, x in held.items() if x.state is not None}


def as_read(inputs: Sequence[Value], now: Changing | None = None) -> list[Value]:
    """Returns the inputs of a loop as if nothing changed them. Some rest elsewhere by now."""
    return [
        Held(x.shard, now[k][0] if now and k in now else x.rest) if isinstance(x, Held) else x
        for k, x in enumerate(inputs)
    ]
