"""Moves values to their places on the devices and back, in one process or several."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._types import Device, PyTree, is_key, kinds_of


def own(tree: PyTree, devices: Iterable[Device]) -> PyTree:
    """Returns a tree in memory of its own: on CPUs, JAX reads numpy arrays where they are.

    They may be changed afterwards, by a loader that fills the same buffer again.
    """
    has_numpy = any(issubclass(kind, np.ndarray) for kind in kinds_of(tree))
    if next(iter(devices)).platform != "cpu" or not has_numpy:
        return tree
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, tree)


def is_elsewhere(value: object, place: Sharding) -> bool:
    """Whether a value is an array that is not at `place`, however JAX spells that."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        is_named = isinstance(value.sharding, NamedSharding)
        return not (is_named and value.sharding.is_equivalent_to(place, value.ndim))
    return isinstance(value, np.ndarray)


def moved(value: ArrayLike, sharding: NamedSharding) -> Array:
    """Returns `value` at `sharding`, in memory of its own: a step will donate what comes out.

    In several processes, each gives the same value, of which its devices take their parts.
    """
    value = own(value, sharding.device_set)
    if not sharding.is_fully_addressable:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return copied(value, sharding)
        if is_key(value):
            words = moved(np.asarray(jax.random.key_data(value)), sharding)
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
        full = np.asarray(value)
        return jax.make_array_from_callback(full.shape, sharding, lambda index: full[index])
    # `device_put(may_alias=False)` still reuses the source as one of several replicas.
    if isinstance(value, jax.Array) and sharding.is_fully_replicated:
        value = value.copy()
    return jax.device_put(value, sharding, may_alias=False)


def copied(value: Array, sharding: Sharding) -> Array:
    """Returns `value` at `sharding`, in memory that a jitted program allocated."""
    return _copy_to(sharding)(value)


@_compat.device_cache
def _copy_to(sharding: Sharding) -> jax.stages.Wrapped:
    return jax.jit(jnp.copy, out_shardings=sharding)


def to_host(value: ArrayLike) -> np.ndarray:
    """Returns the full `value` in host memory, from the shards of all devices.

    In several processes every one calls this, and every one gets it. JAX's own conversion would
    keep the host's copy for as long as the array.
    """
    if not isinstance(value, jax.Array):
        return np.array(value)
    if not value.is_fully_addressable:
        return np.array(multihost_utils.process_allgather(value, tiled=True))
    host = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            host[shard.index] = np.asarray(shard.data)
    return host
