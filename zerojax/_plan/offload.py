"""Which part of a state rests in host memory: `_features/host_state.py` has how steps update it."""

import dataclasses
import math
import os
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zerojax._kernel.places import LeafPlan, by_layer
from zerojax._specs import as_names
from zerojax._state.state import PARAMS
from zerojax._table import human_bytes
from zerojax._warn import warn

POOL_LIMIT, POOL_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64  # XLA's variable and its default
OFFLOADED = ("opt_state", "params")
PINNED = "pinned_host"  # JAX's name for host memory that a GPU can copy by itself


@dataclasses.dataclass(frozen=True)
class Offload:
    """What stays in host memory between steps. A step copies it to the devices a part at a time.

    Arguments:
        opt_state: True for the optimizer state, or the share of its bytes, from 0.0 to 1.0: the
            largest leaves go, until they have that share.
        params: the same for the parameters. Forward and backward fetch each layer ahead of its
            all-gather.
        min_bytes: leaves or layers with fewer bytes on each device stay there: they would save
            little and be slow to send.
        max_bytes: the most host memory that each device may use; default, as much as it takes. The
            largest leaves go while they fit, optimizer state before parameters.

    Example:
        >>> params = {"w": jnp.ones((1024, 256))}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> state = zerojax.shard_train_state(state, stage=3, offload=zerojax.Offload())
        >>> print(state.opt_state[0].mu["w"].sharding.memory_kind)
        pinned_host
    """

    opt_state: bool | float = True
    params: bool | float = False
    min_bytes: int = 2**16
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for kind in OFFLOADED:
            share = getattr(self, kind)
            if not isinstance(share, int | float | np.floating) or not 0 <= share <= 1:
                raise ValueError(
                    f"Offload({kind}={share!r}) must be True, False or a share of the bytes. Pass "
                    "a number from 0.0 to 1.0."
                )
        for name, remedy in (("min_bytes", "0 for all leaves"), ("max_bytes", "or leave it out")):
            limit = getattr(self, name)
            is_out = name == "max_bytes" and limit is None
            if not is_out and (type(limit) is not int or limit < 0):
                raise ValueError(
                    f"Offload({name}={limit!r}) must be a number of bytes. Pass an integer, "
                    f"{remedy}."
                )

    def place(self, leaves: Sequence[LeafPlan], mesh: Mesh) -> list[LeafPlan]:
        """Puts leaves in host memory, and notes why the others stay on the devices."""
        placed, room = list(leaves), math.inf if self.max_bytes is None else self.max_bytes
        for kind in OFFLOADED:
            share, small = getattr(self, kind), f"smaller than {human_bytes(self.min_bytes)}"
            # Scalars would save nothing, and keys stay. So do integers that a step updates.
            own = {
                i: leaf.bytes_per_device(mesh)
                for i, leaf in enumerate(leaves)
                if share and leaf.kind == kind and leaf.shape
                if kind != PARAMS or jnp.issubdtype(leaf.dtype, jnp.inexact) or leaf.frozen
            }
            left = float(share) * sum(own.values())
            for i in sorted(own, key=lambda i: -own[i]):
                leaf, why = leaves[i], None
                piece = own[i] // (leaf.shape[0] if by_layer(leaf) else 1)
                if piece < self.min_bytes:
                    why = small
                elif left <= 0:
                    why = f"{kind}={share} is reached"
                elif own[i] > room:
                    why = f"max_bytes={self.max_bytes} has no room for it"
                else:
                    left, room = left - own[i], room - own[i]
                rest = leaf.rest if why else dataclasses.replace(leaf.rest, memory=PINNED)
                placed[i] = dataclasses.replace(leaf, rest=rest, stays=why)
        if not any(leaf.is_on_host for leaf in placed) and (self.opt_state or self.params):
            warn(
                f"{self} puts nothing in host memory: the state has no leaves of that kind, or "
                "they are all too small for min_bytes= or too large for max_bytes=. print(plan) "
                "says why, leaf by leaf."
            )
        return placed


def as_offload(offload: Offload | str | Sequence[str] | None) -> Offload | None:
    """Returns the `Offload` that `offload=` stands for."""
    if offload is None or isinstance(offload, Offload):
        return offload
    kinds = as_names(offload)
    if kinds and set(kinds) <= set(OFFLOADED):
        return Offload(**{kind: kind in kinds for kind in OFFLOADED})
    raise ValueError(
        f"offload={offload!r} is not known. Pass 'opt_state', ('opt_state', 'params'), or "
        "zerojax.Offload(opt_state=0.5) for half of it."
    )


# -- the memory that XLA pins


def pool_bytes() -> int:
    """Returns how much memory XLA pins at most for a process."""
    limit = os.environ.get(POOL_LIMIT, str(POOL_GB))
    if not (limit.isdigit() and int(limit)):
        raise ValueError(
            f"{POOL_LIMIT}={limit!r} must be a number of GiB. Set it to {POOL_GB}, say."
        )
    return int(limit) * 2**30


def told_of_pool(
    nbytes: int, which: str = "are in host memory if one process runs all GPUs of a host"
) -> list[str]:
    """Returns a sentence or two if one process has more in host memory than XLA pins for it."""
    if not nbytes or nbytes <= pool_bytes():
        return []
    return [
        f"{human_bytes(nbytes)} {which}. XLA pins at most {human_bytes(pool_bytes())} for a "
        f"process. If the host has more, set {POOL_LIMIT}={math.ceil(1.1 * nbytes / 2**30)} before "
        "JAX starts."
    ]


def check_pool(nbytes: int, devices: int = 1) -> None:
    """Raises if a process of so many devices has more in host memory than XLA pins for it."""
    if told := told_of_pool(nbytes, "of this process's state are to stay in host memory"):
        raise ValueError(
            f"{told[0]} Otherwise leave some on the devices: "
            f"offload=zerojax.Offload(..., max_bytes={pool_bytes() // devices})."
        )
