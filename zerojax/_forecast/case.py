"""One way to train, compiled: what a forecast lists."""

import dataclasses

from zerojax._audit.report import Report


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train, compiled. Bytes are per GPU, times modelled seconds of one step.

    `formula` is parameters, optimizer state and gradients by the plan alone; `gradients`,
    `activations` (with the gathered weights) and `peak` are the compiler's, at the moment when
    most is in memory.
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
