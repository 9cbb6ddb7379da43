"""`forecast`: what a training step will need and cost on GPUs that nobody has rented yet."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from zerojax import aot
from zerojax._loss import layered as _layered
from zerojax._plan import planner as _planner
from zerojax._plan.mesh import DEFAULT_AXIS
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision
from zerojax._plan.show import groups_text
from zerojax._progress import hinting, progress
from zerojax._state import hints as _hints, refusals as _refusals
from zerojax._step.step import Step, train_step
from zerojax._types import PyTree
from zerojax._update.offload import Offload
from zerojax._wire.codecs import Quantized
from zerojax.tools._audit import audit as _audit
from zerojax.tools._audit.report import Report
from zerojax.tools._forecast import cache as _cache
from zerojax.tools._forecast.memory_table import STAGES, each_once
from zerojax.tools._forecast.mfu import needed_flops
from zerojax.tools._forecast.result import Case, Forecast
from zerojax.tools._forecast.steps import NnxStep, functional, options_of
from zerojax.tools._hlo import known as _known
from zerojax.tools._hlo.gpus import Gpu, Rates

MANY_LAYERS = 8
LEVELS = "node", "gpu"  # axes of the hosts, and of the GPUs of each
Loss = Callable[..., PyTree]
# A loss and its name; a stage, a number of microbatches, and their order.
Combination = tuple[tuple[str, Loss], tuple[int, int, str]]


def forecast(
    loss_fn: Loss | Mapping[str, Loss] | Step | NnxStep,
    make_state: Callable[[], PyTree],
    batch: PyTree,
    rng: PyTree = None,
    *,
    gpus: str,
    stages: Sequence[int] | int | None = None,
    accumulate: Sequence[int] | int = 1,
    order: Sequence[str] | str = _layered.MICROBATCHES,
    groups: Mapping[str, str | Sequence[str]] | None = None,
    pad: bool = True,
    precision: Precision | None = None,
    offload: Offload | str | Sequence[str] | None = None,
    regather: bool | str | Sequence[str] | None = None,
    update: str | None = None,
    activations: str | Sequence[str] | None = None,
    mutable: Sequence[str] = (),
    tx: optax.GradientTransformation | None = None,
    tokens: int | None = None,
    rates: Rates | None = None,
    per_host: int = aot.PER_HOST,
    axis: str | Sequence[str] | None = None,
) -> Forecast:
    """Compiles a training step for GPUs that are not there, at each stage, and counts its cost.

    Arguments:
        loss_fn: as for `zerojax.train_step`; or a dict of several, such as a model with and without
            `jax.checkpoint`; or a step of `zerojax.train_step`, with all that it was made of; or
            one of `zerojax.nnx.train_step`.
        make_state: a function without arguments that makes the state, or the state's shapes. With a
            step of nnx, a function that returns a model and its optimizer.
        batch: the global batch of a step, arrays or `jax.ShapeDtypeStruct`s.
        rng: a key, if the loss takes one.
        gpus: such as "64xH100".
        stages, accumulate, order: what to try, one or several of each; default, all stages, with
            `groups` only 3, and microbatches one after another.
        groups: as for `zerojax.shard_train_state`, over the axes `node` (the hosts) and `gpu`
            (the GPUs of a host), or those of `axis`.
        pad, offload: as for `zerojax.shard_train_state`.
        precision, regather, update, mutable, tx: as for `zerojax.shard_train_state` and
            `zerojax.train_step`; regather="gpu" on axes as with `groups`.
        activations: "host", as for `zerojax.train_step`.
        tokens: in a step, if not the size of the batch's first matrix of integers.
        rates: of the GPU, if not those that zerojax knows; `zerojax.Rates`.
        per_host: GPUs of a host.
        axis: what the loss calls the mesh axis over all GPUs, if not `data`: axis="batch". Two
            names are those of the hosts and of the GPUs of each.

    Example:
        >>> def make_state():
        ...     params = {"w": jnp.zeros((8, 1024, 1024)), "b": jnp.zeros((8, 1024))}
        ...     return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> def loss_fn(params, batch):
        ...     layer = jax.checkpoint(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None))
        ...     return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)
        >>> batch = jax.ShapeDtypeStruct((8 * 512, 1024), jnp.float32)
        >>> forecast = zerojax.forecast(loss_fn, make_state, batch, gpus="8xH100", stages=[0, 3])
        >>> [(case.parameters + case.optimizer) >> 20 for case in forecast.cases]  # MiB of a GPU
        [96, 12]
    """
    gpu = gpu_of(gpus, rates)
    check(make_state, batch, tokens)
    loss_fn, make_state, rng = functional(loss_fn, make_state, rng)
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"": loss_fn}
    options = {"tx": tx, "mutable": mutable}
    if isinstance(loss_fn, Step):
        recipe, options = loss_fn.recipe, options_of(loss_fn, tx)
        losses, precision = {"": recipe.loss_fn}, precision or recipe.options.precision
        accumulate, order = options.pop("accumulate"), options.pop("order")
    options |= _given(regather=regather, update=update, activations=activations)
    choices = _choices(losses, stages, accumulate, order, groups is not None)
    planned: dict[str, Any] = dict(groups=groups, pad=pad, precision=precision, offload=offload)
    planned["mesh"] = mesh_of(gpus, per_host, names_levels(options | planned), axis)
    work = Workload(make_state, batch, rng, tokens, gpu, planned, options)
    return Forecast(gpus, gpu, work.cases(choices, gpus), _settings(gpu, options | planned))


def _settings(gpu: Gpu, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns, for the title, what a step is made with, and the network if it is the user's own."""
    found = {name: options.get(name) for name in ("regather", "update", "activations", "offload")}
    shown = [f"{k}={v!r}" for k, v in found.items() if v not in (None, True, "auto", ())]
    codes = {name: getattr(options.get("precision"), name, None) for name in ("gather", "reduce")}
    shown += [f"{name} {code.dtype}" for name, code in codes.items() if isinstance(code, Quantized)]
    speed = f"network cards of {gpu.rates.network / 1e9:g} GB/s"
    return (*shown, *([speed] if gpu.given_rates else []))


def _given(**options: PyTree) -> dict[str, PyTree]:
    return {name: value for name, value in options.items() if value is not None}


def check(make_state: PyTree, batch: PyTree, tokens: int | None) -> None:
    _refusals.check_state_function(
        make_state,
        "The loss comes first, zerojax.forecast(loss_fn, make_state, batch, gpus=...); a function "
        "is given its arguments by lambda: make_state(key).",
    )
    if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
        raise ValueError(f"tokens={tokens!r} must be positive: how many a step trains on.")
    if not jax.tree.leaves(batch):
        raise ValueError("the batch has no arrays. Pass the global batch of one step.")
    _refusals.check_arrays(batch, "batch")
    if not any(map(np.ndim, jax.tree.leaves(batch))):
        raise ValueError("the batch has no rows. Pass the global batch of one step, or its shapes.")


def gpu_of(gpus: str, rates: object) -> Gpu:
    _, gpu = _known.parse_count(gpus)
    if rates is None:
        return gpu
    if not isinstance(rates, Rates):
        raise TypeError(f"rates={rates!r} are no rates. Pass zerojax.Rates(...).")
    return dataclasses.replace(gpu, given_rates=rates)


def names_levels(options: Mapping[str, Any]) -> bool:
    """Whether a step needs hosts and their GPUs as axes: it names one, or sends codes over both."""
    codes = isinstance(getattr(options.get("precision"), "reduce", None), Quantized)
    regathers = options.get("regather") or True  # False and None name no axes
    return codes or options.get("groups") is not None or not isinstance(regathers, bool)


def axis_names(axis: str | Sequence[str] | None, levels: bool) -> tuple[str, ...]:
    """Returns the names of the mesh axes: one over all GPUs, or that of the hosts and that of the
    GPUs of each, which levels need."""
    if axis is None:
        return LEVELS if levels else (DEFAULT_AXIS,)
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    if len(names) not in (1, 2) or len(set(names)) < len(names) or "" in names:
        raise ValueError(
            f"axis={axis!r} must be the name of the mesh axis over all GPUs, such as 'batch', or "
            "two names: of the hosts, and of the GPUs of each."
        )
    if levels and len(names) == 1:
        raise ValueError(
            f"axis={axis!r} is one axis over all GPUs, and groups=, regather= over an axis and "
            "codes of gradients need two. Name both in axis=, that of the hosts and that of the "
            "GPUs of each, or leave axis= out."
        )
    return names


def mesh_of(
    gpus: str, per_host: int, levels: bool, axis: str | Sequence[str] | None = None
) -> Mesh:
    """Makes a mesh of all GPUs along one axis; with levels, of hosts and the GPUs of each."""
    names = axis_names(axis, levels)
    flat = aot.mesh(gpus, axis_names=names[-1], per_host=per_host)
    if len(names) == 1:
        return flat
    local = min(flat.size, per_host)
    return aot.mesh(gpus, (flat.size // local, local), names, per_host=per_host)


def _choices(
    losses: Mapping[str, Loss],
    stages: Sequence[int] | int | None,
    accumulate: Sequence[int] | int,
    order: Sequence[str] | str,
    grouped: bool,
) -> list[Combination]:
    """Returns all combinations, each once: nothing compiles twice."""
    stages = (3 if grouped else STAGES) if stages is None else stages
    stages, accumulate = each_once(stages), each_once(accumulate)
    orders = [order] if isinstance(order, str) else list(dict.fromkeys(order))
    ways = itertools.product(stages, accumulate, orders)
    # One microbatch has no order.
    ways = [way for way in ways if way[1] > 1 or way[2] == orders[0]]
    choices = list(itertools.product(losses.items(), ways))
    if not choices:
        raise ValueError(
            f"nothing to try: stages={stages}, accumulate={accumulate}, order={orders}, "
            f"{len(losses)} losses. Name at least one of each."
        )
    return choices


@dataclasses.dataclass(frozen=True)
class Workload:
    """The part of a training step that all cases share."""

    make_state: Callable[[], PyTree]
    batch: PyTree
    rng: PyTree
    tokens: int | None
    gpu: Gpu
    planned: dict[str, Any]  # options of `plan`
    options: dict[str, Any]  # of `train_step`

    def cases(self, choices: Sequence[Combination], gpus: str) -> tuple[Case, ...]:
        shown = progress(choices, lambda choice: f"compiling stage {choice[1][0]} for {gpus}")
        return tuple(self.case(*loss, *how) for loss, how in shown)

    def case(self, variant: str, loss: Loss, stage: int, accumulate: int, order: str) -> Case:
        """Compiles the step at a stage, and describes what it costs."""
        tx, mutable = self.options["tx"], self.options["mutable"]
        axes = self.planned["mesh"].axis_names
        plan = _planner.plan(self.make_state, stage=stage, axis=axes, tx=tx, **self.planned)
        step = train_step(loss, accumulate=accumulate, order=order, plan=plan, **self.options)
        batch = aot.batch(self.batch, plan, batch_specs=self.options.get("batch_specs"))
        rng = aot.batch(self.rng, plan)
        started = time.perf_counter()
        with hinting(unrolled(plan)):
            made = _cache.compiled(step, plan.abstract(), batch, rng, plan)
            report = _audit.audit(made, plan.abstract(), batch, rng, plan=plan, gpu=self.gpu)
        seconds = time.perf_counter() - started
        flops = needed_flops(loss, plan, self.batch, self.rng, mutable) / plan.size
        plan = plan.regathering(step.recipe.options.regather)
        return self._described(variant, plan, step, report, flops, seconds)

    def _described(
        self, variant: str, plan: Plan, step: Step, report: Report, flops: float, seconds: float
    ) -> Case:
        memory, replay, how = report.memory, report.replay, step.recipe.options
        leaves = jax.tree.leaves(self.batch)
        tokens = _tokens(leaves) if self.tokens is None else self.tokens
        return Case(
            stage=plan.stage,
            accumulate=how.accumulate,
            order=how.order,
            variant=variant,
            groups=groups_text(plan.groups) if plan.is_grouped else "",
            parameters=memory.parameters,
            optimizer=memory.optimizer,
            gradients=memory.gradients,
            activations=memory.activations + memory.gathered,
            formula=sum(plan.bytes_per_device().values())
            + plan.gradient_bytes()
            + plan.kept_bytes(),
            peak=memory.peak,
            fits=memory.peak <= self.gpu.usable,
            spare=self.gpu.usable - memory.peak,
            on_host=memory.on_host + memory.host_kept,
            pinned=report.pinned,
            matmuls=report.matmuls,
            wide_matmuls=report.wide_matmuls,
            link_bytes=report.wire_bytes - report.network_bytes,
            network_bytes=report.network_bytes,
            compute_seconds=replay.compute,
            exposed_seconds=replay.exposed,
            waited_seconds=replay.waited,
            step_seconds=replay.step,
            examples_per_second=next(x.shape[0] for x in leaves if x.shape) / replay.step,
            tokens_per_second=None if tokens is None else tokens / replay.step,
            mfu=flops / (replay.step * self.gpu.flops),
            compile_seconds=seconds,
            report=report,
        )


def unrolled(plan: Plan) -> str:
    """Says why a step takes long to compile whose layers a Python loop calls, if they are many."""
    layers = _hints.in_a_python_loop({leaf.path: leaf.shape for leaf in plan.params})
    if layers < MANY_LAYERS:
        return ""
    return (
        f"the model has {layers} layers with weights of their own, as in a Python loop, and XLA "
        "compiles each. A scan over stacked layers (jax.lax.scan, nn.scan, nnx.scan) compiles one; "
        "fewer stages, or a model of fewer layers, take less time too."
    )


def _tokens(leaves: list[jax.Array | jax.ShapeDtypeStruct]) -> int | None:
    """Counts the tokens of a batch: the elements of its first matrix of integers."""
    integers = (
        x.size for x in leaves if len(x.shape) == 2 and jnp.issubdtype(x.dtype, jnp.integer)
    )
    return next(integers, None)
