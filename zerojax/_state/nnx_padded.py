"""Flax nnx variables that rest padded and show their logical values.

[Note: padded variables]
nnx has two ways to see a variable. Its raw value is what splits, merges, transforms and optimizers
move; `variable[...]`, arithmetic and a layer's call ask `get_value`. So the array rests padded as
the raw value, and a subclass drops the padding in `get_value`: a model computes with the shapes it
was written for, while `nnx.jit` gets arrays that the devices divide. What attributes say of the
values (`kernel.T`) is said of the logical ones; where the array is (`kernel.sharding`), of the raw
one. nnx deprecates its hooks for such uses, which attributes would bypass anyway, and asks for
subclasses. The variables of a model stay the same objects: their class changes, as another one of
the same layout may be set.
"""

import copy
import dataclasses
import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from zerojax import _compat
from zerojax._state import patches as _patches
from zerojax._state.state import OTHER, PARAMS
from zerojax._types import PyTree

KEY = "rests"  # in a variable's metadata, which splits and merges keep

# What an array says of its place and its type, which padding does not change.
PLACE = {"sharding", "addressable_shards", "global_shards", "addressable_data", "devices", "device"}
PLACE |= {"is_fully_addressable", "is_fully_replicated", "committed", "format"}
OF_THE_ARRAY = PLACE | {"dtype", "weak_type", "ndim", "is_deleted", "delete", "block_until_ready"}


@dataclasses.dataclass(frozen=True)
class Rests:
    """How a variable rests: the shape that it shows, and its padded one at its place."""

    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    sharding: NamedSharding = dataclasses.field(repr=False)

    def dims_in(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Returns the padded dimension, and where it is in a value of this shape; None for nowhere.

        Transforms over a stack of layers show one layer: a value without some other dimensions.
        """
        dims = range(len(self.shape))
        dim = next(d for d in dims if self.shape[d] != self.padded_shape[d])
        others = [d for d in dims if d != dim]
        for gone in itertools.combinations(others, max(len(dims) - len(shape), 0)):
            if shape == tuple(n for d, n in enumerate(self.padded_shape) if d not in gone):
                return dim, dim - sum(d < dim for d in gone)
        return None


@functools.partial(jax.jit, static_argnums=1)
def _logical(value: jax.Array, rests: Rests) -> jax.Array:
    found = rests.dims_in(value.shape)
    assert found is not None
    dim, here = found
    shown = functools.partial(
        jax.lax.slice_in_dim, start_index=0, limit_index=rests.shape[dim], axis=here
    )
    if value.shape != rests.padded_shape:  # one layer: where it is, XLA knows
        return shown(value)
    value = jax.lax.with_sharding_constraint(value, rests.sharding)
    return _compat.constrained(shown(value), rests.sharding)


@functools.partial(jax.jit, static_argnums=1)
def _padded(value: jax.Array, rests: Rests) -> jax.Array:
    widths = [(0, p - n) for n, p in zip(rests.shape, rests.padded_shape, strict=True)]
    return jax.lax.with_sharding_constraint(jnp.pad(value, widths), rests.sharding)


class Padded(nnx.Variable):
    """A variable whose raw value may be padded; it comes before the class that the user chose."""

    shown_as: type[nnx.Variable]  # the user's class

    def get_value(self, **options: PyTree) -> PyTree:
        index = options.pop("index", ...)
        value, rests = super().get_value(**options), self.get_metadata(KEY, None)
        is_array = isinstance(value, jax.Array | np.ndarray)  # or what stands for one as it rests
        if rests is not None and is_array and rests.dims_in(value.shape) is not None:
            value = _logical(value, rests)
        return value if index is ... else value[index]

    def set_value(self, value: PyTree, **options: PyTree) -> None:
        if "index" in options:
            value = self.get_value().at[options.pop("index")].set(value)
        rests = self.get_metadata(KEY, None)
        if rests is not None and np.shape(value) == rests.shape:
            value = _padded(value, rests)
        super().set_value(value, **options)

    @property
    def shape(self) -> tuple[int, ...]:
        rests: Rests | None = self.get_metadata(KEY, None)
        shape = tuple(self.get_raw_value().shape)
        found = rests and rests.dims_in(shape)
        if rests is None or found is None:
            return shape
        dim, here = found
        return shape[:here] + (rests.shape[dim],) + shape[here + 1 :]

    def __getattr__(self, name: str) -> Any:
        inner = name in OF_THE_ARRAY or (name.startswith("_") and not name.startswith("__"))
        if inner or self.has_metadata(name):
            return super().__getattr__(name)
        return getattr(self.get_value(), name)

    def __copy__(self) -> nnx.Variable:
        return self.copy()

    def __deepcopy__(self, memo: dict) -> nnx.Variable:
        return self.copy(copy.deepcopy(self.get_raw_value(), memo))

    def __reduce__(self) -> tuple:  # devices cannot be pickled: what is read anywhere has no place
        metadata = {key: value for key, value in self.get_metadata().items() if key != KEY}
        return self.shown_as.from_metadata, (self.get_value(), metadata)


@functools.cache
def _padded_class(cls: type[nnx.Variable]) -> type[nnx.Variable]:
    namespace = {"shown_as": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (Padded, cls), exec_body=lambda ns: ns.update(namespace))


def show_logical(model: nnx.Module, plan: Any) -> None:
    """Has the variables of a model that rest padded by `plan` show their logical values."""
    leaves = {
        leaf.path.removeprefix(prefix): leaf
        for leaf in plan.leaves
        for prefix in (f"{PARAMS}/", "variables/values/")
        if leaf.rest.padding and leaf.kind in (PARAMS, OTHER) and leaf.path.startswith(prefix)
    }
    for path, variable in nnx.to_flat_state(nnx.state(model)) if leaves else ():
        leaf = leaves.get("/".join(map(str, path)))
        if leaf is None:
            continue
        rests = Rests(leaf.shape, leaf.padded_shape, leaf.rest.sharding(plan.mesh))
        if not isinstance(variable, Padded):
            _patches.set_class(variable, _padded_class(type(variable)))
        if variable.get_metadata(KEY, None) != rests:
            variable.set_metadata(KEY, rests)
