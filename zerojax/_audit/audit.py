"""`audit`: what XLA made of a step."""

import contextlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from zerojax._audit import memory as _memory, traffic as _traffic
from zerojax._audit.report import Report
from zerojax._audit.traffic import Part, Traffic
from zerojax._hlo import gpus as _gpus, groups as _groups, module as _module, schedule as _schedule
from zerojax._hlo.gpus import Gpu
from zerojax._hlo.lineage import NONE, Lineage
from zerojax._hlo.module import Module
from zerojax._hlo.schedule import Collective
from zerojax._plan.plan import Plan, check_plan
from zerojax._state import carried as _carried, state as _state

# No source lines of a user's.
OURS = (
    "/zerojax/_",
    "/zerojax/nnx.py",
    "/zerojax/aot.py",
    "/jax/",
    "/flax/",
    "/optax/",
    "/jaxlib/",
)
DEFAULT_PER_HOST = 8
REMATERIALIZED = "Involuntary full rematerialization"


def audit(
    step: Any,
    state: Any = None,
    batch: Any = None,
    rng: Any = None,
    *,
    plan: Plan | None = None,
    gpu: str | Gpu | None = None,
    per_host: int | None = None,
    accumulate: int | None = None,
) -> Report:
    """Every collective and every byte of a compiled step.

    Arguments:
        step: what `zerojax.train_step` or `jax.jit` returns, to be compiled for `state` and
            `batch` (arrays, or shapes such as `plan.abstract()`); or a compiled program; or the
            text of an HLO module.
        plan: of the state, where the state does not carry it.
        gpu: whose speed to model, such as "H100"; by default that of the devices compiled for.
        per_host: how many devices share a host's links; by default as the devices say, or 8.
        accumulate: microbatches of the step, where it does not say so itself.

    Example:
        >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> params = {"w": jnp.ones((64, 16))}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> report = zerojax.audit(zerojax.train_step(loss), state, jnp.ones((32, 64)))
        >>> print({kind: int(sent) for kind, sent in report.check().totals.items()})
        {'all-gather': 3584, 'reduce-scatter': 3584, 'all-reduce': 14}
    """
    if per_host is not None and (not isinstance(per_host, int) or per_host < 1):
        raise ValueError(f"per_host={per_host!r} must be a positive integer: devices of a host.")
    if accumulate is not None and (not isinstance(accumulate, int) or accumulate < 1):
        raise ValueError(f"accumulate={accumulate!r} must be a positive integer: microbatches.")
    if gpu is not None and not isinstance(gpu, str | Gpu):
        raise TypeError(f"gpu={gpu!r} names no GPU. Name one of {', '.join(_gpus.GPUS)}.")
    if plan is not None:
        check_plan(plan, "audit(plan=)")
    compiled, lines = None, []
    if accumulate is None:
        recipe = getattr(step, "recipe", None)
        accumulate = recipe.options.accumulate if recipe else None
    if isinstance(step, str):
        text = step
    else:
        if state is not None:
            carried = _carried.carried_plan(state)
            plan = carried if carried is not None else plan
        if not hasattr(step, "as_text") or hasattr(step, "compile"):
            step, lines = _compile(step, state, batch, rng)
        compiled, text = step, step.as_text()
    return _report(text, compiled, plan, gpu, per_host, accumulate or 1, lines)


def _compile(step: Any, state: Any, batch: Any, rng: Any) -> tuple[Any, list[str]]:
    if hasattr(step, "compile"):
        raise TypeError("audit takes what is compiled. Pass lowered.compile().")
    if not hasattr(step, "lower") or isinstance(step, bytes):
        if hasattr(step, "pure"):
            raise TypeError(
                "a step of zerojax.nnx is audited without its objects: "
                "zerojax.audit(*step.pure(model, optimizer, batch))."
            )
        raise TypeError(
            f"audit needs something compiled or to compile, got a {type(step).__name__}. Pass what "
            "zerojax.train_step or jax.jit returns, a compiled program, or HLO text."
        )
    if state is None or batch is None:
        raise TypeError(
            "audit compiles the step for a state and a batch: audit(step, state, batch)."
        )
    lowered = step.lower(state, batch) if rng is None else step.lower(state, batch, rng)
    with heard() as lines:
        compiled = lowered.compile()
    said = (line[line.find(REMATERIALIZED) :] for line in lines if REMATERIALIZED in line)
    return compiled, list(dict.fromkeys(said))


def _report(
    text: str,
    compiled: Any,
    plan: Plan | None,
    given_gpu: str | Gpu | None,
    per_host: int | None,
    accumulate: int,
    log: list[str],
) -> Report:
    module = Module(text)
    paths = [parameter_path(p) for p in module.parameters]
    gpu = _gpus.named(given_gpu) if isinstance(given_gpu, str) else given_gpu
    device = _device_of(plan, compiled)
    per_host = per_host or _per_host(plan)
    if gpu is None and device is not None:
        gpu = _gpus.of_device_kind(device.device_kind)
    rates = (gpu or _gpus.GPUS["H100"]).rates
    replay = _schedule.replay(module, rates, per_host)
    weights = Lineage(module, [frozenset([i]) for i in range(len(paths))])
    gradients = Lineage(module, [NONE] * len(paths), _traffic.reduced_arrays, arithmetic=True)
    kinds = [_kind(path, plan) for path in paths]
    updated = Lineage(module, [NONE] * len(paths), _traffic.gathered_arrays)
    served = _traffic.served_leaves(module, gradients, paths, kinds)
    served |= _traffic.served_leaves(module, updated, paths, kinds)
    traffic = [
        _traffic_of(module, c, plan, per_host, _traffic.parts(c, weights, served, paths))
        for c in replay.collectives
    ]
    donated = set(module.aliases.values())
    state_kinds = (_state.PARAMS, _state.OPT_STATE, _state.OTHER)
    return Report(
        module=module,
        traffic=traffic,
        replay=replay,
        gpu=gpu,
        devices=module.devices,
        plan=plan,
        memory=_memory.measured(module, compiled, kinds, weights, gradients, replay.collectives),
        accumulate=accumulate,
        not_donated=tuple(
            path
            for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
            if kind in state_kinds and i not in donated
        ),
        placement=tuple(_misplaced(module, paths, plan)),
        kept=tuple(dict.fromkeys(_kept(module, weights, paths, plan))),
        warnings=tuple(log),
        backend=_backend(text, device),
    )


def _backend(text: str, device: Any) -> str:
    """'cpu' or 'gpu'; GPU programs tell themselves by the queues they run on."""
    if device is not None:
        return "gpu" if device.platform in ("cuda", "rocm") else device.platform
    return "gpu" if '"operation_queue_id"' in text else "cpu"


def _per_host(plan: Plan | None) -> int:
    """How many of a plan's devices share the first one's host."""
    if plan is None:
        return DEFAULT_PER_HOST
    hosts = [device.process_index for device in plan.mesh.devices.flat]
    return hosts.count(hosts[0])


def _device_of(plan: Plan | None, compiled: Any) -> Any:
    """One of the devices that a program was compiled for, where it or its plan says."""
    if plan is not None:
        return plan.mesh.devices.flat[0]
    shardings = jax.tree.leaves(getattr(compiled, "input_shardings", None))
    return next((device for s in shardings for device in s.device_set), None)


def parameter_path(parameter: _module.Instruction) -> str:
    """'params/blocks/w', from the name under which JAX passed it: state.params['blocks']['w']."""
    name = parameter.op_name.replace("\\", "")
    parts = re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]", name)
    first = re.match(r"\w*", name)
    return "/".join("".join(part) for part in parts) or (first[0] if first else "")


def _kind(path: str, plan: Plan | None) -> str:
    if plan is not None:
        return next((leaf.kind for leaf in plan.leaves if leaf.path == path), "batch")
    first = path.split("/")[0]
    return first if first in (_state.PARAMS, _state.OPT_STATE) else "batch"


def _misplaced(module: Module, paths: list[str], plan: Plan | None) -> list[tuple[str, str]]:
    """State that arrives in other pieces than the plan would have it."""
    found = []
    by_path = {leaf.path: leaf for leaf in plan.leaves} if plan else {}
    for parameter, path in zip(module.parameters, paths, strict=True):
        leaf = by_path.get(path)
        if leaf is None or plan is None or not parameter.arrays:
            continue
        if leaf.bytes_per_device(plan.mesh) != parameter.nbytes:
            found.append((path, f"{parameter.arrays[0]} per device of {list(leaf.shape)}"))
    return found


def _traffic_of(
    module: Module,
    collective: Collective,
    plan: Plan | None,
    per_host: int,
    parts: tuple[Part, ...],
) -> Traffic:
    instruction, group = collective.instruction, collective.group
    return Traffic(
        name=instruction.name,
        kind=collective.kind,
        parts=parts,
        wire_bytes=collective.wire,
        trips=collective.trips,
        loops=collective.loops,
        group=len(group.members),
        on_host=group.on_host(per_host),
        axes=group.axes if plan is None else _axes(group, plan),
        asynchronous=collective.asynchronous,
        seconds=collective.seconds,
        between=collective.between,
        exposed=collective.exposed,
        scope=instruction.op_name,
        source=module.source(instruction, OURS),
    )


def _kept(
    module: Module, weights: Lineage, paths: list[str], plan: Plan | None
) -> Iterator[tuple[str, str]]:
    """Stacks of a whole weight that a loop hands on, with all of its layers in them."""
    if plan is None or not plan.sharded[_state.PARAMS]:
        return
    stacked = {leaf.path: leaf for leaf in plan.params if leaf.stacked}
    for (computation, name), labels in weights.values.items():
        instruction = module.computations[computation][name]
        if instruction.opcode == "while":
            for array, numbers in zip(instruction.arrays, labels, strict=True):
                for number in numbers:
                    leaf = stacked.get(paths[number])
                    if leaf and leaf.dim is not None and array.size == math.prod(leaf.shape):
                        yield leaf.path, str(array)


def _axes(group: _groups.Group, plan: Plan) -> tuple[str, ...] | None:
    """The mesh axes along which a group's members lie; XLA's own names for them may differ."""
    if plan.mesh.devices.size <= max(group.members):
        return None
    places = [_unravel(member, plan.mesh.devices.shape) for member in group.members]
    varying = [len({place[d] for place in places}) > 1 for d in range(len(places[0]))]
    return tuple(name for name, varies in zip(plan.mesh.axis_names, varying, strict=True) if varies)


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        place.append(at)
    return tuple(reversed(place))


_START = re.compile(r"^(?=[IWEF]\d{4} |\d{4}-\d\d-\d\d |WARNING: All log)", re.MULTILINE)


# Information, and what XLA logs of its own work: `audit` and `forecast` say what came of it.
_HARMLESS = re.compile(
    r"I\d{4} |.* I .*\.cc|WARNING: All log messages before absl::InitializeLog"
    r"|.*(slow_operation_alarm|hlo_rematerialization)\.cc|.*Registers are spilled"
)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Fills a list with the lines that native code wrote, and passes them on when done: all of
    them where it fails, else less what is harmless."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        wanted = lambda said: said  # noqa: E731
        try:
            yield lines
            wanted = _serious
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said = file.read().decode(errors="replace")
            lines += said.splitlines()
            if passed_on := wanted(said):
                os.write(2, passed_on.encode())


def _serious(said: str) -> str:
    """Less the messages, of several lines maybe, that are harmless."""
    return "".join(part for part in _START.split(said) if not _HARMLESS.match(part))
