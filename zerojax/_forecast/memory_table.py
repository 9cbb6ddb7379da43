"""The ZeRO paper's formula for what each device holds, for any bytes per parameter."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

from zerojax._text import html_table, text_table

STAGES = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryTable:
    """Rows of `params`, `devices`, `stage` and `bytes_per_device`; print it to see."""

    rows: tuple[dict[str, Any], ...]

    def bytes_per_device(self, params: float, devices: int, stage: int) -> float:
        for row in self.rows:
            if (row["params"], row["devices"], row["stage"]) == (params, devices, stage):
                return row["bytes_per_device"]
        raise KeyError(f"no row for {params:g} parameters, {devices} devices, stage {stage}")

    def to_dict(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.rows]

    def __str__(self) -> str:
        rows = self._lines()
        return text_table(rows, frozenset(range(len(rows[0]))))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table([], self._lines())

    def _lines(self) -> list[tuple[str, ...]]:
        """GB (1e9 bytes), as the paper prints them: a line for each size and device count."""
        stages = sorted({row["stage"] for row in self.rows})
        lines: dict[tuple[float, int], list[str]] = {}
        for row in self.rows:
            cells = lines.setdefault((row["params"], row["devices"]), [])
            cells.append(f"{row['bytes_per_device'] / 1e9:,.2f}")
        header = ("parameters", "devices", *(f"stage {stage}, GB" for stage in stages))
        body = [(f"{n / 1e9:g}B", str(devices), *cells) for (n, devices), cells in lines.items()]
        return [header, *body]


def memory_table(
    params: float | Sequence[float],
    devices: int | Sequence[int],
    *,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
    stages: int | Sequence[int] = STAGES,
) -> MemoryTable:
    """What parameters, gradients and optimizer state take on each device, by stage.

    The defaults are the paper's mixed-precision Adam: 2 bytes of parameter, 2 of gradient, 12 of
    fp32 copy and moments. Plain fp32 Adam is 4, 4 and 8. Activations are not in it.

    Example:
        >>> print(zerojax.memory_table(7.5e9, 64))
        parameters  devices  stage 0, GB  stage 1, GB  stage 2, GB  stage 3, GB
        ----------  -------  -----------  -----------  -----------  -----------
              7.5B       64       120.00        31.41        16.64         1.88
    """
    sizes, counts, stages = map(_each_once, (params, devices, stages))
    for name, values in (("params", sizes), ("devices", counts)):
        if not values or not all(_is_number(value) and value > 0 for value in values):
            raise ValueError(f"{name}={values} must be positive: how many there are.")
    if not all(isinstance(count, numbers.Integral) for count in counts):
        raise ValueError(f"devices={counts} must be whole numbers.")
    if not stages:
        raise ValueError(f"stages=[] names none of {STAGES}.")
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        raise ValueError(f"stage {unknown[0]!r} is none of {STAGES}.")
    each = (optimizer_bytes, grad_bytes, param_bytes)
    for name, width in zip(("optimizer_bytes", "grad_bytes", "param_bytes"), each, strict=True):
        if not _is_number(width) or width < 0:
            raise ValueError(f"{name}={width!r} must not be negative: bytes for each parameter.")
    return MemoryTable(
        tuple(
            {
                "params": size,
                "devices": count,
                "stage": stage,
                "bytes_per_device": sum(
                    size * width / (count if stage >= cut_from else 1)
                    for cut_from, width in enumerate(each, start=1)
                ),
            }
            for size in sizes
            for count in counts
            for stage in stages
        )
    )


def _each_once(given: Any) -> list[Any]:
    return list(dict.fromkeys(given if isinstance(given, Iterable) else [given]))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
