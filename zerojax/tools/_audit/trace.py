"""Steps as they ran, beside the modelled one: reads a trace that `jax.profiler` wrote.

[Note: what a trace has] `jax.profiler.trace` writes an `.xplane.pb`. XLA's GPU profiler makes a
plane `/device:GPU:0` for each GPU, in it a line `Stream #13(Compute)` for each CUDA stream, with an
event for each kernel and copy. Its stats `hlo_op` and `hlo_module` say which instruction it comes
from (openxla/xla: `xla/backends/profiler/gpu/cupti_collector.cc`, `CreateXEvent` and
`GetDeviceXLineName`). Lines that tools add (`Steps`, `XLA Modules`, `XLA Ops`) sum these up and are
not read. On CPUs, threads of the plane `/host:CPU` have such events, with a `device_ordinal`. A
command buffer, which is a CUDA graph, is one instruction whatever is in it.

Each host writes a file of its own, `plugins/profile/TIME/HOST.xplane.pb`. Their clocks differ, so
that no time of one is compared with another's.
"""

import collections
import dataclasses
import math
import os
import pathlib
import re
import statistics
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from zerojax._table import Row, html_table, human_time, text_table
from zerojax.tools._audit.measured import Measured
from zerojax.tools._hlo.module import Instruction, Module
from zerojax.tools._hlo.schedule import collective_kind
from zerojax.tools._hlo.transfers import transfer_of

GPU, CPU = re.compile(r"/device:GPU:\d+"), "/host:CPU"
STREAM = "Stream"
COMPUTE, COPIES = "compute", "copies "
CONTROL = ("while", "call", "conditional")  # whose events last as long as those inside
GRAPH = "command_buffer"


@dataclasses.dataclass(frozen=True)
class Event:
    """An instruction that a device ran, in seconds."""

    op: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Times:
    """The seconds of a step: in all, what of it is compute, what waits for collectives, and what
    for copies to and from the host or for nothing; and the sums of the collectives by kind and of
    the copies by way, hidden or not."""

    step: float
    compute: float
    exposed: float
    idle: float
    kinds: dict[str, float]


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """A modelled step, None where no GPU is known to model, beside those of a trace."""

    modelled: Times | None
    measured: Times  # of the device whose step is the median one
    steps: int
    devices: int

    def to_dict(self) -> dict[str, object]:
        """Returns everything as plain Python values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self._summary()}\n\n{text_table(self._rows(), right=(1, 2, 3))}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table([self._summary()], self._rows())

    def _summary(self) -> str:
        return f"{self.steps} steps of {self.devices} devices, measured; times of one step"

    def _rows(self) -> list[Row]:
        measured, modelled = _flat(self.measured), _flat(self.modelled) if self.modelled else {}
        rows: list[Row] = [("", "modelled", "measured", "ratio")]
        for name in dict.fromkeys((*measured, *modelled)):
            here, there = measured.get(name, 0.0), modelled.get(name)
            ratio = f"{here / there:.2f}" if there else ""
            rows.append((name, "" if there is None else human_time(there), human_time(here), ratio))
        return rows


def compare(report: Measured, path: str | os.PathLike) -> Comparison:
    """Reads a trace of the audited step; `path` is the file, or the directory it was written to."""
    module = re.split(r"[\s,]", report.module.header)[1]
    events = _events(_files(path), module)
    _check(report, module, events)
    entry = report.module.computations[report.module.entry]
    runs = {device: _runs(ran, entry) for device, ran in events.items()}
    found = [_times(ran, runs[device], report.module) for device, ran in events.items()]
    middle = sorted(found, key=lambda times: times.step)[len(found) // 2]
    return Comparison(
        _modelled(report), middle, round(statistics.median(runs.values())), len(found)
    )


def _files(path: str | os.PathLike) -> list[pathlib.Path]:
    """Returns a file, or those that a directory has of its newest trace: one for each host."""
    given = pathlib.Path(path)
    files = [given] if given.is_file() else sorted(given.rglob("*.xplane.pb"))
    if not files or not files[-1].name.endswith(".xplane.pb"):
        raise ValueError(
            f"there is no .xplane.pb at {given}. Give that file, or the directory that was passed "
            "to jax.profiler.trace."
        )
    newest = max(files, key=lambda file: file.stat().st_mtime)
    return [file for file in files if file.parent == newest.parent]


def _events(files: Iterable[pathlib.Path], module: str) -> dict[str, list[Event]]:
    """Returns what each device of each host ran of a module: GPUs, or CPU devices without any."""
    found = {
        f"{file.name}:{device}": ran
        for file in files
        for device, ran in _events_of(file, module).items()
    }
    gpus = {device: ran for device, ran in found.items() if CPU not in device}
    return gpus or found


def _events_of(file: pathlib.Path, module: str) -> dict[str, list[Event]]:
    """Returns what each device of a file ran of a module. See the note at the top."""
    found: dict[str, list[Event]] = collections.defaultdict(list)
    for plane in _read(file).planes:
        is_gpu = GPU.fullmatch(plane.name) is not None
        if not is_gpu and plane.name != CPU:
            continue
        for line in plane.lines:
            for event in line.events if not is_gpu or line.name.startswith(STREAM) else ():
                stats = _stats(event)
                if stats.get("hlo_module") != module or "hlo_op" not in stats:
                    continue
                device = plane.name if is_gpu else f"{CPU}:{stats.get('device_ordinal')}"
                end = event.start_ns + event.duration_ns
                op = str(stats["hlo_op"])
                found[device].append(Event(op, 1e-9 * event.start_ns, 1e-9 * end))
    return dict(found)


def _read(file: pathlib.Path) -> Any:
    try:
        return jax.profiler.ProfileData.from_file(os.fspath(file))
    except (RuntimeError, ValueError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}): it is damaged, or no trace. Copy it again from "
            "where it was written, or trace again."
        ) from error


def _stats(event: Any) -> dict[str, object]:
    with warnings.catch_warnings():  # the first time, about a type of JAX's own
        warnings.simplefilter("ignore", DeprecationWarning)
        return {name: value for name, value in event.stats if name is not None}


def _check(report: Measured, module: str, events: dict[str, list[Event]]) -> None:
    ops = {event.op for ran in events.values() for event in ran}
    known = {name for found in report.module.computations.values() for name in found}
    if not ops:
        raise ValueError(
            f"the trace has no instruction of {module}. Trace some steps after the first, which "
            "compiles, and end with jax.block_until_ready."
        )
    if any(op.startswith(GRAPH) for op in ops):
        raise ValueError(
            f"the trace has whole command buffers of {module} in place of their instructions. "
            "Trace a run with XLA_FLAGS=--xla_gpu_enable_command_buffer= (nothing after it)."
        )
    if len(ops & known) < len(ops) / 2:
        raise ValueError(
            f"the trace is of another program called {module}: it has instructions such as "
            f"{min(ops - known)!r}, which the audited one has not. Audit the step that was traced, "
            "with the same JAX, devices, state and batch."
        )


def _runs(events: Sequence[Event], entry: Iterable[str]) -> int:
    """Returns how often the module ran: as often as most instructions outside of its loops."""
    names = set(entry)
    counts = collections.Counter(event.op for event in events if event.op in names)
    if not counts:
        raise ValueError(
            "the trace does not say how many steps it has: it has no instruction of the step "
            f"outside of loops, only such as {min(event.op for event in events)!r}. Trace whole "
            "steps, and end with jax.block_until_ready."
        )
    return statistics.mode(counts.values())


def _roles(module: Module, seen: set[str]) -> dict[str, str]:
    """Returns what each instruction is, by name; `seen` are those that ran. See `_role`."""
    roles, outer = {}, []
    for computation, instructions in module.computations.items():
        for name, instruction in instructions.items():
            roles[name] = _role(module, computation, instruction)
            if roles[name] in CONTROL and name in seen:
                outer.append((name, _inside(module, instruction)))
    for name, inside in outer:
        if seen & inside:
            continue
        if roles[name] != "conditional" and {roles[one] for one in inside} - {COMPUTE, *CONTROL}:
            raise ValueError(
                f"the trace has {name!r} and nothing that runs in it, so that its collectives and "
                "copies cannot be told from compute. Trace fewer steps, and on GPUs with "
                "XLA_FLAGS=--xla_gpu_enable_command_buffer= (nothing after it)."
            )
        roles[name] = COMPUTE
    return roles


def _inside(module: Module, instruction: Instruction) -> set[str]:
    """Returns the instructions that run in a loop, call or conditional, in further ones too."""
    found = [one for called in instruction.called for one in module.computations[called].values()]
    further = (_inside(module, one) for one in found if one.opcode in CONTROL)
    return {one.name for one in found}.union(*further)


def _role(module: Module, computation: str, instruction: Instruction) -> str:
    """Returns a kind of collective, COPIES and their way, an opcode of CONTROL, or COMPUTE.

    Names do not say it: they are JAX's for some instructions, and a fusion has those of its parts.
    """
    if kind := collective_kind(instruction):
        return kind
    if instruction.opcode in CONTROL:
        return instruction.opcode
    if module.uses_host:
        is_done = instruction.opcode.endswith("-done")
        operands = module.computations[computation]
        began = operands[instruction.operands[0]] if is_done else instruction
        if transfer := transfer_of(module, computation, began):
            return COPIES + transfer.way
    return COMPUTE


def _times(events: Sequence[Event], runs: int, module: Module) -> Times:
    """Returns the times of a device's steps: their means."""
    roles = _roles(module, {event.op for event in events})
    events = [event for event in events if roles.get(event.op) not in CONTROL]
    sums: dict[str, float] = collections.defaultdict(float)
    compute, busy = [], []
    for event in events:
        role = roles.get(event.op, COMPUTE)
        if role == COMPUTE:
            compute.append(event)
        else:
            sums[role] += (event.end - event.start) / runs
        if not role.startswith(COPIES):
            busy.append(event)
    worked, computes = _union(busy) / runs, _union(compute) / runs
    whole = max(event.end for event in events) - min(event.start for event in events)
    step = whole / runs
    return Times(step, computes, worked - computes, step - worked, dict(sums))


def _union(events: Iterable[Event]) -> float:
    """Returns the time in which at least one of the events goes on."""
    total, until = 0.0, -math.inf
    for event in sorted(events, key=lambda event: event.start):
        total += max(event.end - max(event.start, until), 0.0)
        until = max(until, event.end)
    return total


def _modelled(report: Measured) -> Times | None:
    if report.gpu is None:
        return None
    sums: dict[str, float] = collections.defaultdict(float)
    for one in report.traffic:
        sums[one.kind] += one.seconds * one.trips
    replay = report.replay
    for copy in replay.transfers:
        sums[COPIES + copy.way] += copy.seconds * copy.trips
    return Times(replay.step, replay.compute, replay.exposed, replay.waited, dict(sums))


def _flat(times: Times) -> dict[str, float]:
    named = {"exposed communication": times.exposed, "idle": times.idle}
    return {"step": times.step, "compute": times.compute, **named, **times.kinds}
