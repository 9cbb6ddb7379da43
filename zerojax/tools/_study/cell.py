"""One combination of a study: what was asked, and what it costs."""

import dataclasses
from typing import Any

from zerojax.tools._forecast.result import Case
from zerojax.tools._hlo import known as _known
from zerojax.tools._hlo.gpus import Gpu

LARGEST = "largest"  # as many rows as fit


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a step costs. Bytes, `rows` and `tflops` are per GPU, times are modelled seconds.

    `tflops` counts what the model needs, and nothing that is computed again.
    """

    rows: int
    parameters: int
    optimizer: int
    peak: int
    usable: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    waited_seconds: float
    examples_per_second: float
    tokens_per_second: float | None
    tflops: float
    mfu: float
    wire_bytes: float
    network_bytes: float
    compile_seconds: float
    wide_matmuls: str = ""  # as of a forecast; files of earlier versions have none

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    @classmethod
    def of(cls, case: Case, rows: int, gpu: Gpu) -> "Figures":
        named = {f.name: getattr(case, f.name) for f in FIELDS if hasattr(case, f.name)}
        more = {"rows": rows, "usable": gpu.usable, "tflops": case.mfu * gpu.flops / 1e12}
        return cls(**named | more)


FIELDS = dataclasses.fields(Figures)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model on some GPUs at a stage, with as many rows on each as were `asked` for.

    `settings` are what else the step is made with, `key` a digest of all that the figures depend
    on. Instead of figures, one that could not be compiled has the reason in `failed`.
    """

    model: str
    gpus: str
    stage: int
    asked: int | str
    settings: str
    key: str
    figures: Figures | None = None
    failed: str = ""

    @property
    def place(self) -> tuple[object, ...]:
        """What was asked: a later cell of the same place replaces this one."""
        return self.model, self.gpus, self.stage, self.asked, self.settings

    @property
    def count(self) -> int:
        return _known.parse_count(self.gpus)[0]

    @property
    def kind(self) -> str:
        return _known.parse_count(self.gpus)[1].name

    @property
    def fitting(self) -> Figures | None:
        """The figures of a step that fits."""
        return self.figures if self.figures and self.figures.fits else None

    def __str__(self) -> str:
        return f"{self.model} on {self.gpus}, stage {self.stage}, {self.asked} rows"

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields in one dict; a failed cell has no figures."""
        own = {k: v for k, v in vars(self).items() if k != "figures"}
        return own | (
            {} if self.figures is None else vars(self.figures) | {"fits": self.figures.fits}
        )

    @classmethod
    def of_dict(cls, found: dict[str, Any]) -> "Cell":
        """The reverse; raises KeyError or TypeError where something is missing."""
        own = {f.name: found[f.name] for f in dataclasses.fields(cls) if f.name != "figures"}
        known = {f.name: found[f.name] for f in FIELDS if f.name in found}
        figures = None if own["failed"] else Figures(**known)
        return cls(**own, figures=figures)
