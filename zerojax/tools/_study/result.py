"""The result of a study: its cells as a table and a picture, and what to conclude from them."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from zerojax._figures import Figure
from zerojax._table import Printed, Row, Table, human_bytes
from zerojax.tools._study import picture as _picture
from zerojax.tools._study.cell import LARGEST, Cell, Figures

GROWS = 1.01  # what counts as more throughput of each GPU

Column = tuple[Callable[[Figures], str], str]  # what a cell has there, and a sentence about it
COLUMNS: dict[str, Column] = {
    "peak": (
        lambda f: human_bytes(f.peak),
        "The most memory of a GPU that the step needs at a time, by the compiler.",
    ),
    "TFLOP/s": (
        lambda f: _number(f.tflops) if f.fits else "no room",
        "What each GPU does of the FLOPs that the model needs, without what is computed again; "
        "'no room' where the peak is above the memory that is usable.",
    ),
    "MFU": (
        lambda f: f"{f.mfu:.1%}" if f.fits else "-",
        "Model FLOPs utilization: these FLOP/s as a part of what the GPU could do in 16 bits.",
    ),
    "tokens/s": (
        lambda f: f"{f.tokens_per_second:,.0f}" if f.fits and f.tokens_per_second else "-",
        "The tokens that all GPUs together train on in a second.",
    ),
    "exposed": (
        lambda f: (
            f"{(f.exposed_seconds + f.waited_seconds) / f.step_seconds:.0%}" if f.fits else "-"
        ),
        "The part of the step in which a GPU waits for communication, or for copies from and to "
        "the host's memory.",
    ),
}
EXPLAINED = {
    "model": "The model: a preset, or one of your own.",
    "GPUs": "How many of which GPU.",
    "stage": "The ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also "
    "parameters.",
    "rows": "Rows of the batch, such as sequences, on each GPU; 'max' where these are the most "
    "that fit.",
} | {title: sentence for title, (_, sentence) in COLUMNS.items()}


@dataclasses.dataclass(frozen=True)
class Growth:
    """How the throughput of each GPU changes with their number, with the largest rows."""

    first: Cell
    last: Cell

    @property
    def factor(self) -> float:
        return _tflops(self.last) / _tflops(self.first)

    def __str__(self) -> str:
        first, last = self.first, self.last
        rows = [one.fitting.rows for one in (first, last) if one.fitting]
        return (
            f"Super-linear: {first.model} at stage {first.stage}. From {first.count} to "
            f"{last.count} {first.kind}s, each GPU does {_number(_tflops(first))} and then "
            f"{_number(_tflops(last))} TFLOP/s, with {rows[0]} and then {rows[1]} rows."
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Study(Printed):
    """The result of `zerojax.study`: print or `plot` it. `cells` are in the order that was asked
    for: by model, then by GPUs, stages and rows."""

    cells: tuple[Cell, ...]

    @property
    def super_linear(self) -> list[Growth]:
        """The models and stages of which more GPUs do more each, with the largest rows."""
        grouped: dict[tuple, list[Cell]] = {}
        for cell in sorted(self.cells, key=lambda cell: cell.count):
            if cell.asked == LARGEST and cell.fitting:
                grouped.setdefault((cell.model, cell.kind, cell.stage), []).append(cell)
        found = (Growth(cells[0], cells[-1]) for _, cells in sorted(grouped.items()))
        return [growth for growth in found if growth.factor > GROWS]

    def best(self, model: str) -> Cell | None:
        """The cell in which each GPU does most for a model; None where none fits."""
        fit = (cell for cell in self.cells if cell.model == model and cell.fitting)
        return max(fit, key=_tflops, default=None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "cells": [cell.to_dict() for cell in self.cells],
            "super_linear": [str(growth) for growth in self.super_linear],
        }

    def plot(self, path: str | None = None) -> Figure:
        """Draws with matplotlib, for each model, how throughput changes with the number of GPUs;
        saves the figure to `path`. It is narrow, to be read on a phone."""
        return _picture.draw(self.cells, path)

    def table(self) -> Table:
        header = ("model", "GPUs", "stage", "rows", *COLUMNS)
        rows = list(map(_row, self.cells))
        return Table(
            header,
            rows,
            [self._title()],
            list(self._advice()),
            right=header[2:],
            optional=header[-1:],
            keys=4,
        )

    def _title(self) -> str:
        settings = dict.fromkeys(cell.settings for cell in self.cells if cell.settings)
        about = ["one training step; bytes, rows, TFLOP/s and MFU of each GPU; times modelled"]
        figures = (cell.figures for cell in self.cells if cell.figures)
        wide = next((one.wide_matmuls for one in figures if one.wide_matmuls), "")
        return "; ".join([*about, *settings, *([f"matmuls: {wide}"] if wide else [])])

    def _advice(self) -> Iterator[str]:
        yield from (f"Failed: {cell}: {cell.failed}" for cell in self.cells if cell.failed)
        for model in dict.fromkeys(cell.model for cell in self.cells):
            best = self.best(model)
            peaks = [
                cell.figures.peak for cell in self.cells if cell.model == model and cell.figures
            ]
            if best is None and peaks:
                yield (
                    f"Nothing fits of {model}. The least is {human_bytes(min(peaks))}: use more "
                    "GPUs, a higher stage, fewer rows, or the host's memory (offload=)."
                )
            elif best is not None:
                rows = best.fitting.rows if best.fitting else 0
                yield (
                    f"Most of each GPU for {model}: {_number(_tflops(best))} TFLOP/s, at stage "
                    f"{best.stage} on {best.gpus} with {rows} rows."
                )
        yield from map(str, self.super_linear)


def _number(value: float) -> str:
    """Formats a number with three digits, or all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _tflops(cell: Cell) -> float:
    return cell.fitting.tflops if cell.fitting else 0.0


def _row(cell: Cell) -> Row:
    named, found = (cell.model, cell.gpus, str(cell.stage)), cell.figures
    asked = "max" if cell.asked == LARGEST else str(cell.asked)
    if found is None:
        return (*named, asked, "-", "failed", *["-"] * (len(COLUMNS) - 2))
    rows = f"max {found.rows}" if cell.asked == LARGEST else asked
    return (*named, rows, *(text(found) for text, _ in COLUMNS.values()))
