"""The options of a step, each declared once."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import optax
from jax.sharding import Mesh

from zerojax import _compat, _fence
from zerojax._declared import Options, option
from zerojax._features import xla_options as _xla_options
from zerojax._kernel.body import How
from zerojax._loss import arguments as _arguments, batch as _batch
from zerojax._plan import mesh as _mesh
from zerojax._plan.layout import check_plan
from zerojax._plan.plan import Plan
from zerojax._plan.plan_options import TX
from zerojax._plan.precision import Precision, check_precision
from zerojax._specs import slow
from zerojax._state import state as _state
from zerojax._step.schedule import LAYERS, NO_GRADIENTS, Schedule, check_schedule
from zerojax._types import PyTree
from zerojax._wire import codecs as _codecs
from zerojax._wire.codecs import QuantizedWire


def _plan(plan: object) -> object:
    if plan is not None:
        check_plan(plan, "plan=")
    return plan


PLAN = option(
    None, "the plan, for states that do not carry an optimizer (tuples, dicts).", check=_plan
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions(Options):
    """How a loss is evaluated on the devices.

    The first attributes are the values of the options that only subclasses have.
    """

    has_aux = None  # a pair is taken for a loss and its aux
    differentiates = False
    accumulate = 1
    schedule = NO_GRADIENTS
    skip_nonfinite = False
    donate = False
    mutable = ()

    precision: Precision | None = option(
        None,
        "the dtypes to compute and reduce in; default, those that the state was placed with.",
        check=check_precision,
    )
    batch_specs: PyTree = option(
        None,
        """which dimension of the batch's leaves counts examples: a `PartitionSpec`, or a tree of
        them that begins as the batch does. `P("data")`, the first dimension, is the default;
        `P(None, "data")` is for time-major leaves, `P()` for replicated ones. The batch is the
        first argument after the parameters.""",
    )

    @property
    def is_layered(self) -> bool:
        """Whether all microbatches of a layer run before the next layer."""
        return self.schedule.order == LAYERS and self.accumulate > 1

    @property
    def rounds(self) -> int:
        """How often a step gathers each layer, and reduces its gradient."""
        return 1 if self.is_layered else self.accumulate

    def needs_all(self, skips: bool) -> str:
        """Returns the option by which a step needs all gradients before its first update, or ''.

        `skips` says whether the step skips updates that are not finite.
        """
        if self.rounds > 1:
            return f"accumulate={self.accumulate}"
        if not self.schedule.regather:
            return "regather=False"
        return "a step that skips what is not finite" if skips else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradOptions(LossOptions):
    """How a loss is differentiated on the devices."""

    differentiates = True

    accumulate: int = option(
        1,
        """number of microbatches that each device's part of the batch is split into. Stages 0 and
        1 sum full gradients and reduce once, stages 2 and 3 keep only shards of the sum.""",
        check=_batch.check_accumulate,
        flag={"type": int},
    )
    schedule: Schedule = option(
        Schedule(),
        """when weights are gathered, layers run and parameters are updated, which memory and time
        depend on: a `zerojax.Schedule`.""",
        check=check_schedule,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(GradOptions):
    """How a step trains."""

    skip_nonfinite: bool = option(
        False,
        """where the loss or the norm of the gradients is not finite, leave parameters, optimizer
        state and `mutable` fields as they were, bit by bit; `metrics["skipped"]` is 1 then and 0
        otherwise. An integer field `skipped` of the state keeps the total.""",
    )
    donate: bool = option(True, "give the old state's memory to the new one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.update == "backward" and (what := self.needs_all(self.skip_nonfinite)):
            layers = ", or add order='layers', which sums them in each layer" * (self.rounds > 1)
            raise ValueError(
                "update='backward' updates each layer as soon as it has its gradient, and "
                f"{what} needs all gradients first. Pass Schedule(update='auto'){layers}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(LossOptions):
    """How a state is evaluated."""

    mutable: Sequence[str] = option(
        (),
        """fields of the state, such as `batch_stats`, that the loss takes as keyword arguments.""",
        check=_arguments.mutable_names,
    )
    plan: Plan | None = PLAN
    tx = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(StepOptions):
    """How a state of any type is trained."""

    mutable: Sequence[str] = option(
        (),
        """fields of the state, such as `batch_stats`, that the loss takes as keyword arguments and
        returns updated in a dict `aux`, under the same names. Floats become the mean over devices
        and microbatches; integers, booleans and keys become exactly what the first of them returns
        (`zerojax.verify` says where they do not agree).""",
        check=_arguments.mutable_names,
    )
    plan: Plan | None = PLAN
    tx: optax.GradientTransformation | None = TX


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueOptions(GradOptions):
    """How a loss is differentiated in a user's own loop."""

    has_aux: bool = option(
        False,
        """as in JAX. Aux leaves are averaged, in float32 at least; those with a row for each
        example are concatenated along the batch instead.""",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.update == "backward" or self.schedule.compiler_options:
            raise ValueError(
                f"{self.schedule} is for zerojax.train_step: a loop of your own updates after "
                "backward, and compiles itself. Leave update= and compiler_options= out."
            )


def how_on(
    mesh: Mesh,
    *,
    regather: bool,
    prefetch: bool | str,
    keep_layers: int = 1,
    gathers: bool = True,
    **others: Any,
) -> How:
    """Returns how a loss runs on these devices. `gathers` says whether weights rest sharded, and
    the others are as in `How`.

    "auto" prefetches where all-gathers run beside compute, and where layers stay.
    """
    in_turn = gathers and _xla_options.knows_wires(mesh)
    if prefetch == "auto":
        prefetch = keep_layers > 1 or _compat.overlaps(mesh.devices.flat[0])
    return How(
        regather,
        int(prefetch),
        keep_layers,
        in_turn_above=_xla_options.LARGEST_COLLECTIVE if in_turn else math.inf,
        by_data=_fence.mixes_up_collectives(mesh),
        **others,
    )


def may_update_in_backward(plan: Plan, when: str) -> bool:
    """Whether a step looks for parameters to update in backward.

    "auto" does so on GPUs, if their compute can hide something: state that travels from and to
    host memory, or the all-gather of weights that rest whole.
    """
    gathers = bool(plan.groups.opt_state) and not plan.groups.params
    hides = _compat.is_gpu(plan.mesh.devices.flat[0]) and (plan._offloads or gathers)
    return when == "backward" or (when == "auto" and hides)


def precision_of(plan: Plan, given: Precision | None) -> Precision:
    """Returns the dtypes of a step: the plan's, or `given` where the plan has none."""
    if given is None:
        given = plan.precision or Precision()
    names = [leaf.path for leaf in plan.params]
    _state.check_patterns(_codecs.patterns_of(given.gather), names, "Precision(gather=)")
    _check_codes(plan, given)
    if plan.precision is not None and given != plan.precision:
        raise ValueError(
            f"the step has {given} and the state was placed with {plan.precision}. Leave "
            "precision= out of the step, or place the state again with the one you want."
        )
    if plan.precision is None and given.stores:
        raise ValueError(
            f"{given} says how the state is stored, and the state was placed without it. Place "
            "it with zerojax.shard_train_state(state, precision=...); the step then needs none."
        )
    return given


def _check_codes(plan: Plan, precision: Precision) -> None:
    """Raises where no hop of the gradients leads from host to host only."""
    axes = plan.groups.opt_state if isinstance(precision.reduce, QuantizedWire) else ()
    between = slow(axes, plan.batch_axes)
    if axes and not between:
        raise ValueError(
            f"reduce={precision.reduce} quantizes gradients sent between nodes, and groups= shards "
            f"nothing over {slow(plan.batch_axes, plan.batch_axes)}, so an all-reduce sums shards "
            "over those, which cannot add quantized values. Leave reduce= out, or shard the "
            f"optimizer state over them too: groups={{'params': {axes[0]!r}}}."
        )
    for axis in between:
        along = _mesh.hosts_along(plan.mesh, (axis,))
        count, hosts = len(along), len(set(along))
        if 1 < hosts < count:
            raise ValueError(
                f"reduce={precision.reduce} sends quantized gradients over {axis!r}, {count} "
                f"devices on {hosts} hosts, each through a network card of its own. An exact "
                "reduce-scatter, whose rings share the cards of a host, is faster. Split the axis: "
                f"zerojax.mesh(node={hosts}, gpu={count // hosts}), axis=('node', 'gpu')."
            )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The ingredients of a step, read off it as `step.recipe`."""

    loss_fn: Callable[..., PyTree]
    options: TrainOptions | EvalOptions


@dataclasses.dataclass(frozen=True)
class Notes:
    """What a trace of a step knows beside its arrays, for one plan.

    `layers` says what became of layers in Python loops, and which options are left out. The step
    gathers each layer in so many `rounds`.
    """

    layers: tuple[str, ...] = ()
    rounds: int = 1
