"""One way to train, compiled: a row of a forecast."""

import dataclasses

from zerojax._audit.report import Report


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train, compiled. Bytes are per GPU, times are modelled seconds of one step.

    `formula` is parameters, optimizer state and gradients by the plan alone. `peak` is the
    compiler's peak memory; `gradients` and `activations` (with the gathered weights) are parts of
    it.
    """

    stage: int
    accumulate: int
    variant: str
    parameters: int
    optimizer: int
    gradients: int
    activations: int
    formula: int
    peak: int
    fits: bool
    spare: int
    link_bytes: float
    network_bytes: float
    compute_seconds: float
    exposed_seconds: float
    step_seconds: float
    examples_per_second: float
    tokens_per_second: float | None
    mfu: float
    compile_seconds: float
    report: Report = dataclasses.field(repr=False)

    @property
    def wire_bytes(self) -> float:
        return self.link_bytes + self.network_bytes
