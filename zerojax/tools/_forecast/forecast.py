"""`forecast`: what a training step will need and cost on GPUs that nobody has rented yet."""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zerojax import aot
from zerojax._declared import Options, option, takes
from zerojax._plan import mesh as _mesh, planner as _planner
from zerojax._plan.mesh import DEFAULT_AXIS
from zerojax._plan.plan import Plan
from zerojax._plan.plan_options import StateOptions
from zerojax._plan.sequence import Sequences
from zerojax._progress import progress
from zerojax._specs import as_names, beyond
from zerojax._state import refusals as _refusals
from zerojax._state.state import NNX_FIELDS, is_state_function, state_of
from zerojax._step.schedule import Schedule, check_schedule, unordered
from zerojax._step.step import Step, train_step
from zerojax._step.step_options import TrainOptions
from zerojax._table import total
from zerojax._types import PyTree
from zerojax._wire.codecs import QuantizedWire
from zerojax.tools._audit import audit as _audit
from zerojax.tools._forecast import cache as _cache
from zerojax.tools._forecast.case import Case, Forecast
from zerojax.tools._forecast.mfu import needed_flops
from zerojax.tools._hlo import gpus as _known
from zerojax.tools._hlo.gpus import Gpu, Rates

LossFn: TypeAlias = Callable[..., PyTree]
NnxStep: TypeAlias = Callable[..., PyTree]  # whose own type would import flax.nnx
STAGES = (0, 1, 2, 3)
LEVELS = "node", "gpu"  # axes of the hosts, and of the GPUs of each
SUCH_AS = "mesh={'data': -1, 'tensor': 2}"


def _tokens(tokens: object) -> object:
    if tokens is not None and (not isinstance(tokens, int | np.integer) or tokens < 1):
        raise ValueError(f"tokens={tokens!r} must be positive: how many a step trains on.")
    return tokens


def _sequence(sequence: object) -> object:
    count, *limit = _pair(sequence)
    is_name = isinstance(count, str)
    if not (is_name or (isinstance(count, int | np.integer) and count >= 1)) or len(limit) > 1:
        raise ValueError(
            f"sequence={sequence!r} must be positive: how many GPUs share each sequence, such as "
            "8, or (8, 0.2) with the most_gathered of zerojax.Sequences. `batch_specs` names their "
            f"axis {Sequences.axis!r}."
        )
    Sequences(count if is_name else Sequences.axis, *limit)
    return sequence


def _pair(sequence: PyTree) -> tuple[PyTree, ...]:
    """Returns how many GPUs share each sequence, or the name of their axis, and the limit of
    `Sequences`, if there is one."""
    if isinstance(sequence, Sequences):
        return sequence.axis, sequence.most_gathered
    return sequence if isinstance(sequence, tuple) else (1 if sequence is None else sequence,)


def _sizes(mesh: object) -> object:
    is_sizes = isinstance(mesh, Mapping) and all(type(size) is int for size in mesh.values())
    if mesh is not None and not is_sizes:
        raise TypeError(
            f"mesh={mesh!r} must say how long each axis is, as {SUCH_AS} does; of a mesh that you "
            "have, pass dict(mesh.shape)."
        )
    return mesh


def _schedules(schedules: Sequence[Schedule] | Schedule) -> object:
    for schedule in each_once(schedules):
        check_schedule(schedule)
    return schedules


def _rates(rates: object) -> object:
    if not isinstance(rates, Rates | None):
        raise TypeError(f"rates={rates!r} must be a zerojax.tools.Rates.")
    return rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkOptions(StateOptions, TrainOptions):
    """How a step trains on GPUs that are not there: the options of a plan and of a step, without
    those that these GPUs decide."""

    stage: int = dataclasses.field(default=3, init=False)
    plan: Plan | None = dataclasses.field(default=None, init=False)
    mesh: Mapping[str, int] | None = option(  # type: ignore[reportIncompatibleVariableOverride]
        None,
        """the axes of the mesh and their sizes, the innermost last: {"data": 8, "tensor": 8}. One
        size may be -1. `axis` and `sequence` then name axes, as for `zerojax.shard_train_state`.
        By default all GPUs are on one axis, `data`.""",
        check=_sizes,
    )
    axis: str | Sequence[str] | None = option(
        None,
        """without `mesh`, what the loss calls the mesh axis over all GPUs, if not `data`:
        axis="batch". Two names are those of the hosts and of the GPUs of each; by default, `node`
        and `gpu` where `groups` or `regather` name them.""",
    )
    sequence: int | str | tuple[int | str, float] | Sequences | None = option(  # type: ignore[reportIncompatibleVariableOverride]
        None,
        """without `mesh`, GPUs that share each sequence, on an axis `sequence` within that over all
        GPUs. (8, 0.2) has the `most_gathered` of `zerojax.Sequences`, too.""",
        check=_sequence,
    )
    tokens: int | None = option(
        None, "in a step, if not the size of the first matrix of integers.", check=_tokens
    )
    rates: Rates | None = option(
        None, "of the GPU, if not those that zerojax knows; `zerojax.tools.Rates`.", check=_rates
    )
    per_host: int = option(aot.PER_HOST, "GPUs of a host.")

    @property
    def names_levels(self) -> bool:
        """Whether a step needs hosts and their GPUs as axes: it names one, or quantizes gradients
        between hosts."""
        quantizes = isinstance(getattr(self.precision, "reduce", None), QuantizedWire)
        over_axes = any(not isinstance(one.regather, bool) for one in each_once(self.schedule))
        return quantizes or self.groups is not None or over_axes

    @property
    def split(self) -> Sequences | None:
        """How GPUs share sequences."""
        axis, *limit = _pair(self.sequence)
        axis = axis if isinstance(axis, str) else Sequences.axis
        return None if self.sequence is None else Sequences(axis, *limit)

    @property
    def share(self) -> int:
        """How many GPUs share each sequence, without `mesh`."""
        return _pair(self.sequence)[0]

    def sizes(self, gpus: str) -> dict[str, int]:
        """Returns the axes of the mesh and their sizes. Without `mesh`, all GPUs are along one
        axis; where a step names levels, of hosts and the GPUs of each. Those that share sequences
        are neighbours."""
        (count, _), share = _known.parse_count(gpus), self.share
        if self.sequence is not None and isinstance(share, str) == (self.mesh is None):
            raise ValueError(
                f"sequence={self.sequence!r} must name an axis of mesh=, as {SUCH_AS} has them, or "
                "say without mesh= how many GPUs share each sequence, such as 8."
            )
        if self.mesh is not None:
            return _mesh.filled(self.mesh, count, f"GPUs of {gpus}", SUCH_AS)
        levels, per_host = self.names_levels, self.per_host
        usual = LEVELS if levels else DEFAULT_AXIS
        names = as_names(usual if self.axis is None else self.axis) or ()
        if not levels < len(names) <= 2 or len({*names, ""}) <= len(names):
            one = "" if levels else "the name of the mesh axis over all GPUs, such as 'batch', or "
            why = " Groups, regather= over an axis and quantized gradients need both." * levels
            raise ValueError(
                f"axis={self.axis!r} must be {one}two names: of the hosts, and of the GPUs of "
                f"each. Or leave axis= out.{why}"
            )
        local = max(1, min(count, per_host))
        *hosts, fast = [count // local, local] if len(names) == 2 else [count]
        if fast % share:
            raise ValueError(
                f"sequence={share} GPUs of each sequence do not divide the {fast} GPUs of "
                f"{'each host' if hosts else 'the mesh'}. Pass a number that does."
            )
        shared = {} if self.sequence is None else {Sequences.axis: share}
        return dict(zip(names, (*hosts, fast // share), strict=True)) | shared

    def rows_over(self, gpus: str) -> str | Sequence[str] | None:
        """Returns the `axis=` of a plan on that mesh."""
        split = self.split and self.split.axis
        return self.axis if self.mesh else beyond(tuple(self.sizes(gpus)), (split,))

    def gpu_of(self, gpus: str) -> Gpu:
        """Returns the GPU of "64xH100", with the rates that a user passes."""
        _, gpu = _known.parse_count(gpus)
        return gpu if self.rates is None else dataclasses.replace(gpu, given_rates=self.rates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastOptions(WorkOptions):
    """What `forecast` tries."""

    rng: PyTree = dataclasses.field(
        default=None, kw_only=False, metadata={"text": "a key, if the loss takes one."}
    )
    gpus: str = dataclasses.field(metadata={"text": 'such as "64xH100".'})
    stages: Sequence[int] | int | None = option(
        None, "one or several; by default all, with `groups` only 3."
    )
    accumulate: Sequence[int] | int = option(  # type: ignore[reportIncompatibleVariableOverride]
        1, "microbatches of a step, one number or several.", flag={"type": int}
    )
    schedule: Sequence[Schedule] | Schedule = option(  # type: ignore[reportIncompatibleVariableOverride]
        Schedule(),
        "of each step, one or several, as for `zerojax.train_step`.",
        check=_schedules,
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # the step checks what holds for one order


@takes(ForecastOptions)
def forecast(
    loss_fn: LossFn | Mapping[str, LossFn] | Step | NnxStep,
    make_state: Callable[[], PyTree],
    batch: PyTree,
    options: ForecastOptions,
) -> Forecast:
    """Compiles a training step for GPUs that are not there, at each stage, and counts its cost.

    Arguments:
        loss_fn: as for `zerojax.train_step`, or for `zerojax.nnx.train_step`; or a dict of several,
            such as a model with and without `jax.checkpoint`; or a step of one of these two, with
            all that it was made of. Options that you pass here replace a step's own where they are
            not the defaults.
        make_state: a function without arguments that makes the state, or the state's shapes. Of
            Flax nnx, a function that returns a model and its optimizer.
        batch: the global batch of a step, arrays or `jax.ShapeDtypeStruct`s.
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
    work = Workload.of(loss_fn, make_state, batch, options.rng, options.gpus, options)
    usual = STAGES if options.groups is None else 3
    stages = usual if options.stages is None else options.stages
    tried = stages, work.options.accumulate, work.options.schedule
    stages, accumulate, schedules = map(each_once, tried)
    kinds = each_once(map(unordered, schedules))
    ways = itertools.product(work.losses, stages, accumulate, schedules)
    # One microbatch has no order: nothing compiles twice.
    ways = each_once(way if way[2] > 1 else (*way[:3], unordered(way[3])) for way in ways)
    if not ways:
        raise ValueError(
            f"nothing to try: stages={stages}, accumulate={accumulate}, schedule={schedules}, "
            f"{len(work.losses)} losses. Name at least one of each."
        )
    cases = progress(
        ways, lambda way: f"compiling stage {way[1]} for {work.gpus}", lambda way: work.case(*way)
    )
    settings = work.settings(("accumulate", "schedule", "tokens"))  # which the table shows
    plans = [case.report.plan for case in cases if case.report and case.report.plan]
    absent = {axis for plan in plans for axis in plan._absent}
    settings += [f"axes of the model that mesh= lacks: {', '.join(sorted(absent))}"] * bool(absent)
    if len(kinds) == 1 and kinds[0] != Schedule():
        settings.insert(0, f"schedule={kinds[0]}")
    return Forecast(work.gpus, work.gpu, tuple(cases), tuple(settings))


def each_once(values: PyTree) -> list[PyTree]:
    """Returns one value or several as a list without duplicates; a string is one value."""
    values = [*values] if isinstance(values, Iterable) and not isinstance(values, str) else [values]
    return [one for at, one in enumerate(values) if one not in values[:at]]


def shared_by(plan: Plan) -> int:
    """Returns how many devices share each row of the batch."""
    return plan.mesh.size * plan._splits.blocks // plan.size


def changed_options(options: Options, usual: Options) -> dict[str, PyTree]:
    """Returns the options that are not the usual ones."""
    names = [field.name for field in dataclasses.fields(usual) if field.init]
    return {k: value for k in names if (value := getattr(options, k)) != getattr(usual, k)}


def is_of_nnx(loss_fn: object) -> bool:
    return hasattr(loss_fn, "_unmade")  # flax.nnx is not imported for those who have none


def _in_steps_of_nnx(losses: dict[str, PyTree], make_state: PyTree) -> tuple[dict, PyTree]:
    """Returns the losses of a Flax nnx model as steps, with the shapes of its state; others, and
    what makes their state, as they are."""
    from zerojax import nnx as _nnx
    from zerojax._state import nnx_state as _nnx_state

    step = next((one for one in losses.values() if isinstance(one, Step)), None)
    # No loss is called, unless `make_state` cannot be: then the two may be swapped.
    is_maker = callable(make_state) and _refusals.accepts(make_state, (), {})
    for one in () if is_maker or step else filter(_nnx_state.abstract_objects, losses.values()):
        name = getattr(one, "__name__", type(one).__name__)
        raise TypeError(f"the loss comes first, and you passed {name}. {_nnx_state.ARGUMENTS}")
    # A step of pure functions comes with a state.
    of_pure = step is not None and step.recipe.options.mutable == NNX_FIELDS
    if of_pure or (shapes := _nnx_state.abstract_objects(make_state)) is None:
        return losses, make_state
    if step:
        raise TypeError(
            "a step of zerojax.train_step trains states, and you passed what makes a Flax nnx "
            f"model. {_nnx_state.ARGUMENTS}"
        )
    return {name: _nnx.train_step(one) for name, one in losses.items()}, shapes


def _taken_apart(
    loss_fn: PyTree, make_state: PyTree, rng: PyTree
) -> tuple[dict[str, LossFn], PyTree, PyTree, dict[str, PyTree]]:
    """Returns losses by name, the function that makes a state, a key, and the options of a step.

    A step stands for its loss, with the options that are not the defaults. One of nnx comes with a
    function that makes a model and its optimizer, and so may a loss.
    """
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"": loss_fn}
    # Each step has a state and options of its own, which losses do not.
    named = [name for name, one in losses.items() if is_of_nnx(one) or isinstance(one, Step)]
    if named and isinstance(loss_fn, Mapping):
        raise TypeError(
            f"a dict has several losses, and {named[0]!r} is a step. Pass a step by itself, and "
            "make one call for each."
        )
    if "flax.nnx" in sys.modules and not is_of_nnx(loss_fn):
        losses, make_state = _in_steps_of_nnx(losses, make_state)
    taken = [one._unmade(make_state, rng) for one in losses.values() if is_of_nnx(one)]
    if taken:
        losses = {name: step for name, (step, *_) in zip(losses, taken, strict=True)}
        _, _, make_state, rng = taken[0]
    if not any(isinstance(one, Step) for one in losses.values()):
        return losses, make_state, rng, {}
    options = next(iter(losses.values())).recipe.options
    if not options.differentiates:
        raise TypeError(
            "a step of eval_step trains nothing, and forecasts are of training steps. Pass the "
            "loss, or a step of train_step."
        )
    own = changed_options(options, TrainOptions(plan=options.plan))
    return {name: step.recipe.loss_fn for name, step in losses.items()}, make_state, rng, own


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model on some GPUs, and the options of its steps."""

    losses: Mapping[str, LossFn]
    state: PyTree  # shapes
    batch: PyTree
    rng: PyTree
    gpus: str
    gpu: Gpu
    options: WorkOptions
    own: Mapping[str, PyTree]  # those of the step that was passed in place of a loss
    flops: dict[str, float] = dataclasses.field(default_factory=dict)  # that each loss needs

    @classmethod
    def of(
        cls,
        loss_fn: PyTree,
        make_state: PyTree,
        batch: PyTree,
        rng: PyTree,
        gpus: str,
        options: WorkOptions,
    ) -> "Workload":
        """Makes a workload of a loss, of several, or of a step. Options that are not the defaults
        replace those of the step, except for the fields that its loss updates."""
        gpu = options.gpu_of(gpus)
        losses, make_state, rng, own = _taken_apart(loss_fn, make_state, rng)
        _refusals.check_state_function(
            make_state,
            "The loss comes first, zerojax.forecast(loss_fn, make_state, batch, gpus=...); pass a "
            "function its arguments by lambda: make_state(key).",
        )
        _refusals.check_values(batch, "batch", or_shapes=True)
        if not any(map(np.ndim, jax.tree.leaves(batch))):
            raise ValueError(
                "the batch has no arrays with rows. Pass the global batch of one step, or its "
                "shapes."
            )
        changed = own | changed_options(options, WorkOptions())
        changed |= {name: own[name] for name in own.keys() & {"mutable"}}
        if "schedule" in own:  # option by option, too
            several = [changed_options(one, Schedule()) for one in each_once(options.schedule)]
            merged = [dataclasses.replace(own["schedule"], **one) for one in several]
            changed["schedule"] = merged if len(merged) > 1 else merged[0]
        options = dataclasses.replace(options, **changed)
        if is_state_function(make_state):  # all plans of one workload read the shapes
            make_state = jax.eval_shape(functools.partial(state_of, make_state))
        return cls(losses, make_state, batch, rng, gpus, gpu, options, own)

    @functools.cached_property
    def mesh(self) -> Mesh:
        sizes = self.options.sizes(self.gpus)
        return aot.mesh(self.gpus, (*sizes.values(),), (*sizes,), per_host=self.options.per_host)

    @functools.cached_property
    def share(self) -> int:
        """How many GPUs share each row of the batch."""
        return self.options.share if self.options.mesh is None else shared_by(self.plan_at(3))

    def settings(self, hidden: Iterable[str] = ()) -> list[str]:
        """Returns the options that are not the defaults, and the network if the user named it."""
        shown = [
            f"{name}={'zerojax.' * (name == 'precision')}{value!r}"
            for name, value in changed_options(self.options, WorkOptions()).items()
            if name not in {"tx", "rates", *hidden} and value != NNX_FIELDS
        ]
        network = f"network cards of {self.gpu.rates.network / 1e9:g} GB/s"
        return [*shown, *([network] if self.gpu.given_rates else [])]

    def of_kind(self, kind: type[Options]) -> dict[str, PyTree]:
        """Returns the options that a plan or a step takes."""
        return {f.name: getattr(self.options, f.name) for f in dataclasses.fields(kind) if f.init}

    def plan_at(self, stage: int) -> Plan:
        placed = {"stage": stage, "mesh": self.mesh, "sequence": self.options.split}
        placed["axis"] = self.options.rows_over(self.gpus)
        return _planner.plan(self.state, **self.of_kind(StateOptions) | placed)

    def step(self, variant: str, plan: Plan, **how: PyTree) -> Step:
        """Makes a step of a loss; its precision is the plan's."""
        options = self.of_kind(TrainOptions) | {"precision": None, "plan": plan} | how
        return train_step(self.losses[variant], **options)

    def case(self, variant: str, stage: int, accumulate: int, schedule: Schedule) -> Case:
        """Compiles the step of a loss at a stage, and describes its cost."""
        plan = self.plan_at(stage)
        step = self.step(variant, plan, accumulate=accumulate, schedule=schedule)
        batch = aot.batch(self.batch, plan, batch_specs=self.options.batch_specs)
        rng = aot.batch(self.rng, plan)
        program = _cache.compiled(step, plan.abstract(), batch, rng, plan)
        report = _audit.audit(program, plan.abstract(), batch, rng, plan=plan, gpu=self.gpu)
        loss, leaves = self.losses[variant], jax.tree.leaves(self.batch)
        # Tokens, if nobody says how many: the size of the first matrix of integers.
        matrices = (leaf for leaf in leaves if len(leaf.shape) == 2)
        integers = (one.size for one in matrices if jnp.issubdtype(one.dtype, jnp.integer))
        if variant not in self.flops:  # the same at each stage
            inputs = self.batch, self.rng, self.options.mutable
            self.flops[variant] = needed_flops(loss, plan, *inputs)
        plan = plan._regathering(schedule.regather)
        formula = *plan.bytes_per_device().values(), plan._gradient_bytes(), plan._kept_bytes()
        memory, times = report.memory, ("compute", "exposed", "waited", "step")
        sizes = "parameters", "optimizer", "gradients", "peak"
        measured = "pinned", "matmuls", "wide_matmuls", "lacks", "unread"
        measured += "network_bytes", "link_bytes"
        return Case(
            gpus=self.gpus,
            stage=plan.stage,
            variant=variant,
            accumulate=accumulate,
            schedule=schedule,
            share=shared_by(plan),
            n_params=sum(math.prod(leaf.shape) for leaf in plan.params),
            examples=next(leaf.shape[0] for leaf in leaves if leaf.shape),
            tokens=self.options.tokens or next(integers, None),
            activations=total(memory.activations, memory.gathered),
            formula=sum(formula),
            usable=self.gpu.usable,
            on_host=memory.on_host + memory.host_kept,
            flops=self.flops[variant] / self.mesh.size,
            report=report,
            **{name: getattr(memory, name) for name in sizes},
            **{name: getattr(report, name) for name in measured},
            **{f"{name}_seconds": report.modelled(getattr(report.replay, name)) for name in times},
        )
