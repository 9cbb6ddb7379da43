"""`forecast`: what a training step will need and cost on GPUs that nobody has rented yet."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zerojax import aot
from zerojax._declared import Options, option, takes
from zerojax._plan import planner as _planner
from zerojax._plan.mesh import DEFAULT_AXIS
from zerojax._plan.plan import Plan
from zerojax._plan.plan_options import StateOptions
from zerojax._plan.show import groups_text
from zerojax._progress import hinting, progress
from zerojax._state import hints as _hints, refusals as _refusals
from zerojax._step.step import Step, train_step
from zerojax._step.step_options import MICROBATCHES, ORDERS, TrainOptions
from zerojax._types import PyTree
from zerojax._wire.codecs import Quantized
from zerojax.tools._audit import audit as _audit
from zerojax.tools._audit.report import Report
from zerojax.tools._forecast import cache as _cache
from zerojax.tools._forecast.case import Case, Forecast
from zerojax.tools._forecast.mfu import needed_flops
from zerojax.tools._forecast.models import Loss, NnxStep, functional, own_options
from zerojax.tools._hlo import gpus as _known
from zerojax.tools._hlo.gpus import Gpu, Rates

P = ParamSpec("P")
STAGES = (0, 1, 2, 3)
MANY_LAYERS = 8
LEVELS = "node", "gpu"  # axes of the hosts, and of the GPUs of each
# A loss and its name; a stage, a number of microbatches, and their order.
Combination = tuple[tuple[str, Loss], tuple[int, int, str]]


def _rates(rates: object) -> object:
    if not isinstance(rates, Rates | None):
        raise TypeError(f"rates={rates!r} must be a zerojax.tools.Rates.")
    return rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkOptions(StateOptions, TrainOptions):
    """How a step trains on GPUs that are not there: all that a plan and a step take, but for what
    is tried or made for these GPUs."""

    stage: int = dataclasses.field(default=3, init=False)
    mesh: Mesh | None = dataclasses.field(default=None, init=False)
    plan: Plan | None = dataclasses.field(default=None, init=False)
    axis: str | Sequence[str] | None = option(
        None,
        """what the loss calls the mesh axis over all GPUs, if not `data`: axis="batch". Two names
        are those of the hosts and of the GPUs of each; by default, `node` and `gpu` where `groups`
        or `regather` name them.""",
    )
    tokens: int | None = option(
        None, "in a step, if not the size of the batch's first matrix of integers."
    )
    rates: Rates | None = option(
        None, "of the GPU, if not those that zerojax knows; `zerojax.tools.Rates`.", check=_rates
    )
    per_host: int = option(aot.PER_HOST, "GPUs of a host.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastOptions(WorkOptions):
    """What `forecast` tries."""

    gpus: str = dataclasses.field(metadata={"text": 'such as "64xH100".'})
    stages: Sequence[int] | int | None = option(
        None, "one or several; by default all, with `groups` only 3."
    )
    accumulate: Sequence[int] | int = option(  # type: ignore[reportIncompatibleVariableOverride]
        1, "microbatches of a step, one number or several.", flag={"type": int}
    )
    order: Sequence[str] | str = option(  # type: ignore[reportIncompatibleVariableOverride]
        MICROBATCHES,
        "of the microbatches, one or several, as for `zerojax.train_step`.",
        flag={"choices": ORDERS},
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # the step checks what holds for one order


class _Forecasting(Protocol[P]):
    def __call__(
        self,
        loss_fn: Any,
        make_state: Any,
        batch: PyTree,
        rng: PyTree = None,
        *args: P.args,
        **options: P.kwargs,
    ) -> Forecast: ...


def _takes(options: Callable[P, Any]) -> Callable[[Callable[..., Forecast]], _Forecasting[P]]:
    """Has type checkers see the options, as `takes`, and that the key may be left out."""
    return takes(options)  # type: ignore[reportReturnType]


@_takes(ForecastOptions)
def forecast(
    loss_fn: Loss | Mapping[str, Loss] | Step | NnxStep,
    make_state: Callable[[], PyTree],
    batch: PyTree,
    rng: PyTree = None,
    options: Any = None,
) -> Forecast:
    """Compiles a training step for GPUs that are not there, at each stage, and counts its cost.

    Arguments:
        loss_fn: as for `zerojax.train_step`; or a dict of several, such as a model with and without
            `jax.checkpoint`; or a step of `zerojax.train_step`, with all that it was made of; or
            one of `zerojax.nnx.train_step`. Options that are given here replace a step's own, but
            for its microbatches and their order.
        make_state: a function without arguments that makes the state, or the state's shapes. With a
            step of nnx, a function that returns a model and its optimizer.
        batch: the global batch of a step, arrays or `jax.ShapeDtypeStruct`s.
        rng: a key, if the loss takes one.
        {options}

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
    gpus, gpu = options.gpus, gpu_of(options.gpus, options.rates)
    check(make_state, batch, options.tokens)
    loss_fn, make_state, rng = functional(loss_fn, make_state, rng)
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"": loss_fn}
    if isinstance(loss_fn, Step):
        losses = {"": loss_fn.recipe.loss_fn}
        options = dataclasses.replace(options, **own_options(loss_fn) | changed_options(options))
        how = loss_fn.recipe.options
        options = dataclasses.replace(options, accumulate=how.accumulate, order=how.order)
    choices = _choices(losses, options)
    work = Workload(make_state, batch, rng, gpus, gpu, options)
    cases = progress(
        choices,
        lambda choice: f"compiling stage {choice[1][0]} for {gpus}",
        lambda choice: work.case(*choice[0], *choice[1]),
    )
    return Forecast(gpus, gpu, tuple(cases), _settings(gpu, options))


def changed_options(options: Any) -> dict[str, Any]:
    """Returns the options that are not as they are by default."""
    changed = {}
    for field in dataclasses.fields(options):
        check, value = field.metadata.get("check"), getattr(options, field.name)
        if field.init and value != (check(field.default) if check else field.default):
            changed[field.name] = value
    return changed


def _settings(gpu: Gpu, options: WorkOptions) -> tuple[str, ...]:
    """Returns, for the title, what a step is made with, and the network if it is the user's own."""
    changed, names = changed_options(options), ("regather", "update", "activations", "offload")
    shown = [f"{name}={changed[name]!r}" for name in names if name in changed]
    codes = {name: getattr(options.precision, name, None) for name in ("gather", "reduce")}
    shown += [f"{name} {code.dtype}" for name, code in codes.items() if isinstance(code, Quantized)]
    speed = f"network cards of {gpu.rates.network / 1e9:g} GB/s"
    return (*shown, *([speed] if gpu.given_rates else []))


def each_once(values: Any) -> list[Any]:
    """Returns one or several as a list, each once; a text is one."""
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return list(dict.fromkeys(values if several else [values]))


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


def gpu_of(gpus: str, rates: Rates | None) -> Gpu:
    _, gpu = _known.parse_count(gpus)
    return gpu if rates is None else dataclasses.replace(gpu, given_rates=rates)


def names_levels(options: WorkOptions) -> bool:
    """Whether a step needs hosts and their GPUs as axes: it names one, or sends codes over both."""
    codes = isinstance(getattr(options.precision, "reduce", None), Quantized)
    return codes or options.groups is not None or not isinstance(options.regather, bool)


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


def _choices(losses: Mapping[str, Loss], options: Any) -> list[Combination]:
    """Returns all combinations, each once: nothing compiles twice."""
    grouped = options.groups is not None
    stages = (3 if grouped else STAGES) if options.stages is None else options.stages
    stages, accumulate, orders = map(each_once, (stages, options.accumulate, options.order))
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
    gpus: str
    gpu: Gpu
    options: Any  # `WorkOptions`

    @functools.cached_property
    def mesh(self) -> Mesh:
        levels, options = names_levels(self.options), self.options
        return mesh_of(self.gpus, options.per_host, levels, options.axis)

    def of(self, kind: type[Options]) -> dict[str, Any]:
        """Returns those of the options that a plan or a step takes."""
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        return {name: getattr(self.options, name) for name in names}

    def plan_at(self, stage: int) -> Plan:
        placed = {"stage": stage, "mesh": self.mesh, "axis": self.mesh.axis_names}
        return _planner.plan(self.make_state, **self.of(StateOptions) | placed)

    def step(self, loss: Loss, plan: Plan, **how: Any) -> Step:
        """Makes a step; its precision is the plan's."""
        return train_step(loss, **self.of(TrainOptions) | {"precision": None, "plan": plan} | how)

    def case(
        self,
        variant: str,
        loss: Loss,
        stage: int = 3,
        accumulate: int = 1,
        order: str = MICROBATCHES,
    ) -> Case:
        """Compiles the step at a stage, and describes what it costs."""
        plan = self.plan_at(stage)
        step = self.step(loss, plan, accumulate=accumulate, order=order)
        batch = aot.batch(self.batch, plan, batch_specs=self.options.batch_specs)
        rng = aot.batch(self.rng, plan)
        started = time.perf_counter()
        with hinting(unrolled(plan)):
            program = _cache.compiled(step, plan.abstract(), batch, rng, plan)
            report = _audit.audit(program, plan.abstract(), batch, rng, plan=plan, gpu=self.gpu)
        seconds = time.perf_counter() - started
        flops = needed_flops(loss, plan, self.batch, self.rng, self.options.mutable) / plan.size
        plan, how = plan.regathering(step.recipe.options.regather), step.recipe.options
        return self._described(
            plan,
            report,
            stage=plan.stage,
            variant=variant,
            accumulate=how.accumulate,
            order=how.order,
            flops=flops,
            compile_seconds=seconds,
        )

    def _described(self, plan: Plan, report: Report, **described: Any) -> Case:
        memory, replay, leaves = report.memory, report.replay, jax.tree.leaves(self.batch)
        return Case(
            gpus=self.gpus,
            groups=groups_text(plan.groups) if plan.is_grouped else "",
            examples=next(leaf.shape[0] for leaf in leaves if leaf.shape),
            tokens=_tokens(leaves) if self.options.tokens is None else self.options.tokens,
            parameters=memory.parameters,
            optimizer=memory.optimizer,
            gradients=memory.gradients,
            activations=memory.activations + memory.gathered,
            formula=sum(plan.bytes_per_device().values())
            + plan.gradient_bytes()
            + plan.kept_bytes(),
            peak=memory.peak,
            usable=self.gpu.usable,
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
            report=report,
            **described,
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
