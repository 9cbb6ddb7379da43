"""Which part of a state rests in host memory."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np

from zerojax._table import human_bytes
from zerojax._warn import warn

POOL_LIMIT, POOL_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64  # XLA's variable, its default
OFFLOADED = ("opt_state", "params")
PINNED = "pinned_host"  # what JAX calls host memory that a GPU copies to and from by itself


@dataclasses.dataclass(frozen=True)
class Offload:
    """What rests in host memory between steps. A step has it on the devices a part at a time.

    Arguments:
        opt_state: True for the optimizer state, or a share of its bytes, from 0.0 to 1.0: the
            largest leaves go, until they have that share.
        params: the same for the parameters. Forward and backward fetch a layer of them ahead of
            its all-gather.
        min_bytes: what is smaller on each device, a leaf or one layer of a stack, stays there. It
            would save nothing and be slow to send.
        max_bytes: how much host memory each device may use, if not all that it takes: the largest
            leaves go while they fit, optimizer state before parameters.

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
                    f"Offload({kind}={share!r}) is neither True nor False nor a share of the "
                    "bytes. Pass a number from 0.0 to 1.0."
                )
        for name, remedy in (("min_bytes", "0 for all leaves"), ("max_bytes", "or leave it out")):
            given = getattr(self, name)
            is_out = name == "max_bytes" and given is None
            if not is_out and (type(given) is not int or given < 0):
                raise ValueError(
                    f"Offload({name}={given!r}) is not a number of bytes. Pass an integer, "
                    f"{remedy}."
                )

    def stay(
        self, kind: str, sizes: Sequence[int], pieces: Sequence[int], used: int = 0
    ) -> list[str | None]:
        """Returns, for each leaf of a kind, why it stays on the device; None for one that goes.
        `sizes` are the bytes that a device has of each, `pieces` those that travel at once, and
        `used` is what other kinds have on the host."""
        share = getattr(self, kind)
        small = f"smaller than {human_bytes(self.min_bytes)}"
        why = [small if piece < self.min_bytes else None for piece in pieces]
        left = float(share) * sum(sizes)
        room = math.inf if self.max_bytes is None else self.max_bytes - used
        for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
            if why[k] is None and left <= 0:
                why[k] = f"{kind}={share} is reached"
            elif why[k] is None and sizes[k] > room:
                why[k] = f"max_bytes={self.max_bytes} has no room for it"
            elif why[k] is None:
                left, room = left - sizes[k], room - sizes[k]
        return why


def warn_where_nothing_goes(on_host: Sequence[bool], offload: Offload) -> None:
    if not any(on_host) and any(getattr(offload, kind) for kind in OFFLOADED):
        warn(
            f"{offload} puts nothing in host memory: the state has none of that kind, or all of "
            "it is too small for min_bytes= or too large for max_bytes=. print(plan) says why, "
            "leaf by leaf."
        )


def pool_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Returns how much memory of a process XLA keeps pinned."""
    given = environ.get(POOL_LIMIT, str(POOL_GB))
    if not (given.isdigit() and int(given)):
        raise ValueError(f"{POOL_LIMIT}={given!r} is no number of GiB. Set it to {POOL_GB}, say.")
    return int(given) * 2**30


def told_of_pool(nbytes: int) -> list[str]:
    """Says where one process for all GPUs of a host has more in host memory than is pinned."""
    if not nbytes or nbytes <= pool_bytes():
        return []
    return [
        f"{human_bytes(nbytes)} are in host memory if one process runs all GPUs of a host. "
        f"{_larger_pool(nbytes)}."
    ]


def check_pool(nbytes: int, devices: int = 1) -> None:
    """Raises where one process would have more state in pinned memory than XLA gives it."""
    if nbytes > (limit := pool_bytes()):
        raise ValueError(
            f"{human_bytes(nbytes)} of this process's state are to rest in host memory. "
            f"{_larger_pool(nbytes)}; otherwise leave some on the devices: "
            f"offload=zerojax.Offload(..., max_bytes={limit // devices})."
        )


def _larger_pool(nbytes: int) -> str:
    return (
        f"XLA pins at most {human_bytes(pool_bytes())} for a process. If the host has more, set "
        f"{POOL_LIMIT}={math.ceil(1.1 * nbytes / 2**30)} before JAX starts"
    )


def as_offload(given: "Offload | str | Sequence[str] | None") -> Offload | None:
    """Returns what `offload=` stands for."""
    if given is None or isinstance(given, Offload):
        return given
    names = (given,) if isinstance(given, str) else given
    if isinstance(names, Sequence) and names and all(name in OFFLOADED for name in names):
        return Offload(**{kind: kind in names for kind in OFFLOADED})
    raise ValueError(
        f"offload={given!r} is not known. Pass 'opt_state', ('opt_state', 'params'), or "
        "zerojax.Offload(opt_state=0.5) for half of it."
    )
