"""The ZeRO paper's formula for the memory of a training state, for any bytes per parameter."""

import dataclasses
import itertools
import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import TypeVar

from zerojax._plan.placement import groups_of
from zerojax._table import Printed, Table

STAGES = (0, 1, 2, 3)
SHARDED = (
    "nothing is sharded",
    "the optimizer state is sharded",
    "the optimizer state and the gradients are sharded",
    "the optimizer state, the gradients and the parameters are sharded",
)
EXPLAINED = {
    "parameters": "The parameters of the model, in billions.",
    "devices": "How many devices share the training state.",
} | {
    f"stage {stage}, GB": f"The training state of each device, in GB of 1e9 bytes, where {what}."
    for stage, what in zip(STAGES, SHARDED, strict=True)
}
T = TypeVar("T")
_case = operator.itemgetter("params", "devices")


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryTable(Printed):
    """Rows of `params`, `devices`, `stage` and `bytes_per_device`; print it to see them."""

    rows: tuple[dict[str, float], ...]

    def bytes_per_device(self, params: float, devices: int, stage: int) -> float:
        for row in self.rows:
            if (row["params"], row["devices"], row["stage"]) == (params, devices, stage):
                return row["bytes_per_device"]
        raise KeyError(f"no row for {params:g} parameters, {devices} devices, stage {stage}")

    def to_dict(self) -> list[dict[str, float]]:
        return [dict(row) for row in self.rows]

    def table(self) -> Table:
        """Makes a row for each size and device count, in GB (1e9 bytes) as the paper prints."""
        stages = dict.fromkeys(row["stage"] for row in self.rows)
        header = ("parameters", "devices", *(f"stage {stage}, GB" for stage in stages))
        rows = [
            [f"{count / 1e9:g}B", size, *(row["bytes_per_device"] / 1e9 for row in group)]
            for (count, size), group in itertools.groupby(self.rows, _case)
        ]
        formats = dict.fromkeys(header[2:], "{:,.2f}".format)
        return Table(header, rows, formats=formats, right=header[:1], keys=2)


def memory_table(
    params: float | Sequence[float],
    devices: int | Sequence[int],
    *,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
    stages: int | Sequence[int] = STAGES,
) -> MemoryTable:
    """Computes what parameters, gradients and optimizer state take on each device, by stage.

    The defaults are the paper's mixed-precision Adam: 2 bytes of parameter, 2 of gradient, 12 of
    fp32 copy and moments. Plain fp32 Adam is 4, 4 and 8. Activations do not count.

    Example:
        >>> print(zerojax.memory_table(7.5e9, 64))
        parameters  devices  stage 0, GB  stage 1, GB  stage 2, GB  stage 3, GB
        ----------  -------  -----------  -----------  -----------  -----------
              7.5B       64       120.00        31.41        16.64         1.88
    """
    widths = dict(optimizer_bytes=optimizer_bytes, grad_bytes=grad_bytes, param_bytes=param_bytes)
    given = {"params": params, "devices": devices, "stages": stages}
    tried = {name: each_once(values) for name, values in given.items()}
    _check(tried, widths)
    rows = []
    for count, size, stage in itertools.product(*tried.values()):
        groups = groups_of(stage, ("data",))
        parts = zip(widths.values(), (groups.opt_state, groups.grads, groups.params), strict=True)
        nbytes = sum(count * width / (size if axes else 1) for width, axes in parts)
        case = {"params": count, "devices": size, "stage": stage}
        rows.append(case | {"bytes_per_device": nbytes})
    return MemoryTable(tuple(rows))


def each_once(given: T | Iterable[T]) -> list[T]:
    return list(dict.fromkeys(given if isinstance(given, Iterable) else [given]))


def _check(tried: dict[str, list[float]], widths: dict[str, float]) -> None:
    for name in ("params", "devices"):
        if not tried[name] or not all(_is_number(n) and n > 0 for n in tried[name]):
            raise ValueError(f"{name}={tried[name]} must be positive: how many there are.")
    if not all(isinstance(count, numbers.Integral) for count in tried["devices"]):
        raise ValueError(f"devices={tried['devices']} must be whole numbers.")
    if not tried["stages"]:
        raise ValueError(f"stages=[] names none of {STAGES}.")
    if unknown := [stage for stage in tried["stages"] if stage not in STAGES]:
        raise ValueError(f"stage {unknown[0]!r} is none of {STAGES}.")
    for name, width in widths.items():
        if not _is_number(width) or width < 0:
            raise ValueError(f"{name}={width!r} must not be negative: bytes for each parameter.")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
