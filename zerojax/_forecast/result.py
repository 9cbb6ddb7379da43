"""The result of a forecast: its cases as a table and as a picture, and the fastest that fits."""

import dataclasses
from collections.abc import Callable

from zerojax._figures import Figure
from zerojax._forecast import plot as _plot
from zerojax._forecast.case import Case
from zerojax._hlo.gpus import Gpu
from zerojax._text import Row, html_table, human_bytes, human_time, paragraphs, text_table


def _bytes_of(field: str) -> Callable[[Case], str]:
    return lambda case: human_bytes(getattr(case, field))


def _tokens_text(case: Case) -> str:
    return "-" if case.tokens_per_second is None else f"{case.tokens_per_second:,.0f}"


COLUMNS: dict[str, Callable[[Case], str]] = {
    "stage": lambda case: str(case.stage),
    "accumulate": lambda case: str(case.accumulate),
    "remat": lambda case: case.variant or "-",
    "params": _bytes_of("parameters"),
    "optimizer": _bytes_of("optimizer"),
    "grads": _bytes_of("gradients"),
    "activations": _bytes_of("activations"),
    "formula": _bytes_of("formula"),
    "peak": _bytes_of("peak"),
    "fits": lambda case: "yes" if case.fits else "no",
    "spare": _bytes_of("spare"),
    "sent, host": _bytes_of("link_bytes"),
    "sent, network": _bytes_of("network_bytes"),
    "step": lambda case: human_time(case.step_seconds),
    "exposed": lambda case: human_time(case.exposed_seconds),
    "tokens/s": _tokens_text,
    "MFU": lambda case: f"{case.mfu:.1%}",
}
RIGHT = [at for at, title in enumerate(COLUMNS) if title not in ("remat", "fits")]


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast:
    """The result of `zerojax.forecast`: print or `plot` it. `best` is the fastest case that fits,
    or None."""

    gpus: str
    gpu: Gpu
    cases: tuple[Case, ...]

    @property
    def best(self) -> Case | None:
        return min(
            (case for case in self.cases if case.fits), key=lambda c: c.step_seconds, default=None
        )

    def to_dict(self) -> dict[str, object]:
        cases = [
            {f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name != "report"}
            | {"wire_bytes": case.wire_bytes}
            for case in self.cases
        ]
        best = None if self.best is None else self.cases.index(self.best)
        return {
            "gpus": self.gpus,
            "usable_bytes": self.gpu.usable,
            "cases": cases,
            "best": best,
        }

    def plot(self, path: str | None = None) -> Figure:
        """Draws memory and step time of each case with matplotlib; saves the figure to `path`."""
        return _plot.plot(self.cases, self.gpu.usable, self.gpus, path)

    def __str__(self) -> str:
        table = text_table(self._rows(), RIGHT, flexible=(2,), keys=3)
        return f"{paragraphs([self._title()])}\n{table}\n{paragraphs([self._advice()])}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table([self._title()], self._rows(), below=[self._advice()])

    def _title(self) -> str:
        usable = human_bytes(self.gpu.usable)
        return (
            f"{self.gpus}, {usable} usable of {human_bytes(self.gpu.memory)} each; bytes per GPU, "
            "grads and activations at the peak; times modelled; MFU of dense FLOP/s in 16 bits"
        )

    def _rows(self) -> list[Row]:
        cells = (tuple(column(case) for column in COLUMNS.values()) for case in self.cases)
        return [tuple(COLUMNS), *cells]

    def _advice(self) -> str:
        best = self.best
        if best is None:
            least = min(self.cases, key=lambda case: case.peak)
            return (
                f"Nothing fits. The least is {human_bytes(least.peak)} at stage {least.stage}: use "
                "more GPUs, more microbatches (accumulate), or more rematerialization."
            )
        how = f"stage={best.stage}" + (f", accumulate={best.accumulate}" * (best.accumulate > 1))
        remat = f", remat {best.variant!r}" if best.variant else ""
        return (
            f"Fastest that fits: {how}{remat}, {human_time(best.step_seconds)} a step, "
            f"{human_bytes(best.spare)} to spare."
        )
