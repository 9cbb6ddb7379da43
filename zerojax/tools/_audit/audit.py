"""`audit`: compiles a step, and measures the program."""

import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from zerojax import _compat
from zerojax._declared import check_count, checked
from zerojax._jaxprs import type_of
from zerojax._plan import mesh as _mesh
from zerojax._plan.plan import Plan
from zerojax._plan.precision import is_float
from zerojax._state import carried as _carried
from zerojax._step.jitted import Step
from zerojax._step.step_options import Notes, Recipe
from zerojax._types import Device, PyTree
from zerojax.tools import _flops
from zerojax.tools._audit.measurement import BF16, OURS, Flops, Reading
from zerojax.tools._audit.report import Report
from zerojax.tools._hlo import gpus as _gpus, timeline as _timeline
from zerojax.tools._hlo.gpus import Gpu
from zerojax.tools._hlo.module import Module

DEFAULT_PER_HOST = 8
UNKNOWN_GPU = "H100"  # replayed where no GPU is known; its times are not shown
COUNTED = {"per_host": "devices of a host", "accumulate": "microbatches"}


@checked
def audit(
    step: Any,
    state: PyTree = None,
    batch: PyTree = None,
    rng: PyTree = None,
    *,
    plan: Plan | None = None,
    gpu: str | Gpu | None = None,
    per_host: int | None = None,
    accumulate: int | None = None,
) -> Report:
    """Measures every collective and every byte of a compiled step.

    Arguments:
        step: a step of `zerojax.train_step` or `jax.jit`, to be compiled for `state` and `batch`
            (arrays, or shapes such as `plan.abstract()`); or a compiled program; or the text of an
            HLO module.
        plan: the plan of the state, where neither the state nor the step has it.
        gpu: whose speed to model, such as "H100"; by default that of the devices compiled for.
        per_host: how many devices share a host's links; by default as the devices say, or 8. All
            TPUs of a slice do.
        accumulate: how often the step gathers its weights, where it does not say so itself: the
            number of its microbatches, or once with order="layers".

    Example:
        >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> params = {"w": jnp.ones((64, 16))}
        >>> state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> report = zerojax.audit(zerojax.train_step(loss), state, jnp.ones((32, 64)))
        >>> print({kind: int(sent) for kind, sent in report.check().totals.items()})
        {'all-gather': 3584, 'reduce-scatter': 3584, 'all-reduce': 14}
    """
    gpu = _checked(gpu, per_host=per_host, accumulate=accumulate)
    args = [arg for arg in (state, batch, rng) if arg is not None]
    recipe, program, text, warnings = getattr(step, "recipe", None), None, step, []
    notes: Notes | None = None
    if not isinstance(step, str):
        # The plan by which the state was placed, as the step keeps to it.
        plan = _carried.carried_plan(state) or plan or (recipe.options.plan if recipe else None)
        placed = plan
        plan = plan._regathering(recipe.options.schedule.regather) if plan and recipe else plan
        program, warnings = _compiled(step, state, batch, args)
        notes = step.notes.get(placed) if isinstance(step, Step) and placed else None
        text = program.as_text() or ""
    # One of the devices that the program was compiled for, where it or its plan says.
    shardings = jax.tree.leaves(getattr(program, "input_shardings", None))
    devices = plan.mesh.devices.flat if plan else (d for s in shardings for d in s.device_set)
    device = next(iter(devices), None)
    gpu = gpu or (_gpus.of_device_kind(device.device_kind) if device else None)
    module = Module(text)
    backend = _backend(module, device, gpu)
    per_host = module.devices if backend == "tpu" else per_host  # their links pass hosts
    per_host = per_host or (_mesh.on_one_host(plan.mesh) if plan else DEFAULT_PER_HOST)
    replay = _timeline.replay(module, (gpu or _gpus.GPUS[UNKNOWN_GPU]).rates, per_host)
    rounds = notes.rounds if notes else recipe.options.rounds if recipe else 1
    reading = Reading(module, plan, replay.collectives, recipe)
    return Report(
        module=module,
        traffic=reading.traffic,
        replay=replay,
        gpu=gpu,
        devices=module.devices,
        per_host=min(per_host, module.devices),
        plan=plan,
        memory=reading.memory(program),
        accumulate=accumulate or rounds,
        trains=reading.trains,
        not_donated=tuple(reading.not_donated()),
        placement=tuple(reading.misplaced()),
        kept=tuple(dict.fromkeys(reading.kept())),
        warnings=tuple(warnings),
        layers=notes.layers if notes else (),
        backend=backend,
        written=written(step, args, device),
        asked=_asked(plan, recipe),
    )


def _backend(module: Module, device: Device | None, gpu: Gpu | None) -> str:
    """Returns the platform that a program was compiled for: the text shows a TPU by its tiles and,
    where no device is known, a GPU by the queues that instructions run on."""
    if not module.is_of_tpu:
        is_of_gpu = _compat.is_gpu(device) if device else '"operation_queue_id"' in module.text
        return "gpu" if is_of_gpu else device.platform if device else "cpu"
    if gpu is not None:
        raise ValueError(
            f"gpu={gpu.name!r} would give a program for TPUs the times of a GPU. Leave gpu= out: "
            "zerojax knows no speeds of TPUs. Or compile for zerojax.aot.mesh('8xH100')."
        )
    return "tpu"


def _checked(gpu: object, **counts: object) -> Gpu | None:
    """Returns the GPU that is named, if one is; raises for options that make no sense."""
    for name, value in counts.items():
        if value is not None:
            check_count(value, name, COUNTED[name])
    if gpu is not None and not isinstance(gpu, str | Gpu):
        raise TypeError(f"gpu={gpu!r} names no GPU. Name one of {', '.join(_gpus.GPUS)}.")
    return _gpus.named(gpu) if isinstance(gpu, str) else gpu


def _compiled(
    step: Any, state: PyTree, batch: PyTree, args: Sequence[PyTree]
) -> tuple[Compiled, Sequence[str]]:
    """Returns the compiled step, and the compiler's warnings, if they are known."""
    if hasattr(step, "as_text"):
        if hasattr(step, "compile"):
            raise TypeError("audit takes compiled programs. Pass lowered.compile().")
        return step, getattr(step, "warnings", ())
    if hasattr(step, "pure"):
        raise TypeError(
            "for a step of zerojax.nnx, call zerojax.audit(*step.pure(model, optimizer, batch)). "
            "For GPUs that are not there, these two are zerojax.nnx.shard(make, abstract=True, "
            "mesh=zerojax.aot.mesh('8xH100')), where make() returns both."
        )
    if not hasattr(step, "lower") or isinstance(step, bytes):
        raise TypeError(
            f"audit needs something compiled or to compile, got a {type(step).__name__}. Pass a "
            "step of zerojax.train_step or jax.jit, a compiled program, or HLO text."
        )
    if state is None or batch is None:
        raise TypeError(
            "audit compiles the step for a state and a batch: audit(step, state, batch)."
        )
    return compiled(step.lower(*args))


def compiled(lowered: jax.stages.Lowered) -> tuple[Compiled, list[str]]:
    """Compiles a step, and returns with it the compiler's warnings.

    XLA writes them in native code, to standard error and nowhere else. They are passed on at the
    end: all lines after an exception, else those that are not harmless.
    """
    sys.stderr.flush()
    terminal, failed = os.dup(2), True
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            with warnings.catch_warnings():
                # JAX keeps programs for GPUs that are not there, and cannot load them.
                warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
                program, failed = lowered.compile(), False
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            file.seek(0)
            log = file.read().decode(errors="replace")
            os.write(2, (log if failed else _compat.without_harmless(log)).encode())
    return program, _compat.rematerializations(log.splitlines())


def written(step: Any, args: Sequence[PyTree], device: Device | None) -> Flops:
    """Counts the FLOPs of a step's matmuls before it is compiled, where a device has no bfloat16:
    XLA computes that in float32, and the compiled program does not tell."""
    gpu = _gpus.of_device_kind(device.device_kind) if device else None
    flops: Flops = getattr(step, "written", None) or Flops()
    if (gpu and gpu.half == BF16) or not hasattr(step, "trace"):
        return flops
    for eqn, count in _flops.matmuls(step.trace(*args).jaxpr.jaxpr):
        dtypes = [type_of(operand).dtype for operand in eqn.invars[:2]]
        lines = (line for line in _compat.lines_of(eqn) if not OURS.search(line))
        place = next(lines, None) or _compat.scope_of(eqn)
        flops[max(dtypes, key=lambda dtype: dtype.itemsize).name, place] += int(count)
    return flops


def _asked(plan: Plan | None, recipe: Recipe | None) -> str:
    """Returns the narrow dtype that a step is to compute in, if it is: that of its precision, or of
    its largest parameter."""
    precision = (recipe and recipe.options.precision) or (plan and plan.precision)
    params = filter(is_float, plan.params if plan else ())
    stored = max(params, key=lambda leaf: leaf.nbytes, default=None)
    dtype = (precision and precision.compute) or (stored.dtype if stored else jnp.float32)
    return jnp.dtype(dtype).name if jnp.finfo(dtype).bits < 32 else ""
