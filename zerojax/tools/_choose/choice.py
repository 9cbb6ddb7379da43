"""The result of `choose`: the ways that were tried, the fastest, and the Python for it."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from zerojax._plan import mesh as _mesh
from zerojax._plan.mesh import DEFAULT_AXIS
from zerojax._plan.precision import Precision
from zerojax._table import Cell, Printed, Table, human_bytes, human_time
from zerojax._update import offload as _offload
from zerojax._wire.codecs import Quantized
from zerojax.tools._choose.ways import Way, shown
from zerojax.tools._forecast import network as _network
from zerojax.tools._forecast.result import COLUMNS, Case, matmuls_of
from zerojax.tools._hlo.gpus import Gpu

SPEEDS = ("tokens/s", "MFU")  # as a forecast has them
FASTER = 0.99  # codes must pay for what they change
MADE = "state = zerojax.shard_train_state(make_state"
TIMES = ("by the formula", "compiled", "exposed")
HEADER = ("", *TIMES, *SPEEDS, "peak", "fits", "numbers")


@dataclasses.dataclass(frozen=True)
class Tried:
    """A way, and its seconds and peak memory by the formula."""

    way: Way
    estimate: float
    peak: float


@dataclasses.dataclass(frozen=True)
class Compiled(Tried):
    """A way that was compiled."""

    case: Case


@dataclasses.dataclass(frozen=True, repr=False)
class Choice(Printed):
    """The result of `zerojax.choose`: print it. `best` is the fastest that fits with exact numbers,
    `best_with_codes` one with codes, where that is faster; None where there is none."""

    gpus: str
    gpu: Gpu
    precision: Precision | None
    devices: int
    local: int
    tried: tuple[Tried, ...]
    cases: Mapping[Way, Case]
    is_nnx: bool = False
    axis: str | None = None

    @property
    def compiled(self) -> list[Compiled]:
        """The ways that were compiled, those that fit first, the fastest before the others."""
        found = [
            Compiled(one.way, one.estimate, one.peak, self.cases[one.way])
            for one in self.tried
            if one.way in self.cases
        ]
        return sorted(found, key=lambda one: (not one.case.fits, one.case.step_seconds))

    @property
    def best(self) -> Compiled | None:
        return self._first(exact=True)

    @property
    def best_with_codes(self) -> Compiled | None:
        found, exact = self._first(exact=False), self.best
        if found is None or exact is None:
            return found
        pays = found.case.step_seconds < FASTER * exact.case.step_seconds
        return found if pays else None

    def _first(self, exact: bool) -> Compiled | None:
        fit = (one for one in self.compiled if one.case.fits and one.way.is_exact == exact)
        return next(fit, None)

    def python(self, way: Way) -> str:
        """Returns the lines that train so."""
        state, lines = [], []
        if way.names_levels:
            lines.append(
                f"mesh = zerojax.mesh(node={self.devices // self.local}, gpu={self.local})"
            )
            state.append("mesh=mesh")
            if way.groups is None:
                state.append('axis=("node", "gpu")')
        elif self.axis not in (None, DEFAULT_AXIS):
            lines.append(f"mesh = {_mesh.call_for(self.devices, axis=self.axis)}")
            state.append("mesh=mesh")
        placed = [f"{name}={shown(value)}" for name, value in way.placed().items()]
        precision = way.precision(self.precision)
        if precision is not None:
            state.append(f"precision={_shown_precision(precision)}")
        package = "zerojax.nnx" if self.is_nnx else "zerojax"
        made = f"model, optimizer = {package}.shard(make" if self.is_nnx else MADE
        arguments = ", ".join([made, *placed, *state])
        stepped = "".join(f", {name}={shown(value)}" for name, value in way.stepped().items())
        loss = f"losses[{shown(way.variant)}]" if way.variant else "loss_fn"
        lines.append(f"{arguments})")
        return "\n".join([*lines, f"step = {package}.train_step({loss}{stepped})"])

    def to_dict(self) -> dict[str, object]:
        best = [one.way for one in (self.best, self.best_with_codes) if one]
        return {
            "gpus": self.gpus,
            "tried": list(map(dataclasses.asdict, self.tried)),
            "compiled": [
                {
                    "way": dataclasses.asdict(one.way),
                    "step_seconds": one.case.step_seconds,
                    "tokens_per_second": one.case.tokens_per_second,
                    "mfu": one.case.mfu,
                    "peak": one.case.peak,
                    "fits": one.case.fits,
                }
                for one in self.compiled
            ],
            "best": list(map(self.python, best)),
        }

    def table(self) -> Table:
        return Table(
            HEADER,
            list(map(_row, self.compiled)),
            [self._title()],
            list(self._advice()),
            formats={title: COLUMNS[title].form or str for title in SPEEDS}
            | dict.fromkeys(TIMES, human_time)
            | {"peak": human_bytes},
            optional=SPEEDS,
        )

    def _title(self) -> str:
        usable = human_bytes(self.gpu.usable)
        *few, most = map(str, sorted({one.way.accumulate for one in self.tried}))
        counts = " or ".join(filter(None, (", ".join(few), most)))
        return "; ".join(
            [
                f"{self.gpus}, {usable} usable of each",
                *matmuls_of([one.case for one in self.compiled]),
                f"{len(self.tried)} ways ranked by a formula, of {counts} "
                f"microbatch{'es' * (counts != '1')}",
                f"{len(self.compiled)} compiled",
                "times modelled",
                "MFU of dense FLOP/s in 16 bits",
            ]
        )

    def _advice(self) -> Iterator[str]:
        best, coded = self.best, self.best_with_codes
        if best is None and coded is None:
            least = human_bytes(min(one.peak for one in self.tried))
            how = "use more GPUs or a smaller batch"
            yield f"Nothing fits. The least is {least} by the formula: {how}."
        if best is not None:
            yield f"\nFastest with exact numbers, {_costs(best)}:"
            yield f"\n{self.python(best.way)}"
        if coded is not None:
            how = "Faster" if best else "Fastest"
            yield f"\n{how} with codes, {_costs(coded)}:"
            yield f"\n{self.python(coded.way)}"
        told = self._told([one.case for one in (best, coded) if one])
        yield from (one for line in told for one in ("", line))

    def _told(self, cases: Sequence[Case]) -> Iterator[str]:
        """Says what these ways need of the hosts."""
        if any(case.network_bytes for case in cases):
            yield from filter(None, [_network.advice(self.gpu, os.environ)])
        yield from _offload.told_of_pool(max((case.pinned for case in cases), default=0))


def _row(one: Compiled) -> tuple[Cell, ...]:
    case = one.case
    return (
        str(one.way),
        one.estimate,
        case.step_seconds,
        case.exposed_seconds + case.waited_seconds,
        *(COLUMNS[title].value(case) for title in SPEEDS),
        case.peak,
        case.fits,
        "exact" if one.way.is_exact else "codes",
    )


def _costs(one: Compiled) -> str:
    """Returns what is chosen by, and for how many microbatches."""
    case, count = one.case, one.way.accumulate
    known = SPEEDS if case.tokens_per_second is not None else SPEEDS[1:]
    speeds = (f"{COLUMNS[title].form(COLUMNS[title].value(case))} {title}" for title in known)
    parts = f"{count} microbatch{'es' * (count > 1)}"
    return ", ".join([human_time(case.step_seconds), *speeds, parts])


def _shown_precision(precision: Precision) -> str:
    given = {f.name: getattr(precision, f.name) for f in dataclasses.fields(precision)}
    named = (f"{name}={_named(value)}" for name, value in given.items() if value is not None)
    return f"zerojax.Precision({', '.join(named)})"


def _named(value: object) -> str:
    if isinstance(value, Quantized):
        return f'"{value.dtype}"' if value == Quantized(value.dtype) else f"zerojax.{value}"
    try:
        return f'"{jnp.dtype(value).name}"'  # type: ignore[arg-type]
    except TypeError:
        return str(value)
