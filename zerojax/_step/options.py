"""What a step is made of, and the options that say how its loss is evaluated."""

import dataclasses
from collections.abc import Callable, Sequence

import optax

from zerojax._engine.residuals import Keeping
from zerojax._loss import batch as _batch, layered as _layered
from zerojax._plan import mesh as _mesh
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision, check_precision
from zerojax._state import state as _state
from zerojax._types import PyTree
from zerojax._wire import codecs as _codecs
from zerojax._wire.codecs import Blocks


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that say how a loss is evaluated."""

    has_aux: bool | None  # None: as the loss returns it
    accumulate: int
    precision: Precision | None
    regather: bool | tuple[str, ...]  # in backward, over all axes, over none, or over these
    differentiate: bool = True
    prefetch: int | str = "auto"
    mutable: tuple[str, ...] = ()  # names in aux that are fields of a state
    update: str = "after"  # when parameters are updated: "backward", "after" it, "auto"
    activations: tuple[str, ...] = ()  # "host", or axes that they lie over
    batch_specs: PyTree = None
    order: str = _layered.MICROBATCHES  # which runs first

    def __post_init__(self) -> None:
        check_precision(self.precision)
        _batch.check_accumulate(self.accumulate)
        if self.order not in _layered.ORDERS:
            raise ValueError(
                f"order must be 'microbatches' or 'layers', got {self.order!r}: whether "
                "the microbatches of accumulate= run one after another, or layer by layer."
            )
        if self.prefetch not in (0, 1, "auto"):
            raise ValueError(
                f"prefetch must be 0, 1 or 'auto', got {self.prefetch!r}: the number of layers "
                "whose weights are gathered ahead of their use."
            )

    @property
    def is_layered(self) -> bool:
        """Whether all microbatches of a layer run before the next layer."""
        return self.order == _layered.LAYERS and self.accumulate > 1

    @property
    def rounds(self) -> int:
        """How often a step runs through the layers, gathers them and reduces their gradients."""
        return 1 if self.is_layered else self.accumulate


def regathered(given: object) -> bool | tuple[str, ...]:
    """Returns `regather=` as options have it: the names of mesh axes as a tuple."""
    if isinstance(given, bool):
        return given
    names = [given] if isinstance(given, str) else given
    if not names or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"regather={given!r} must be True or False, or name the mesh axes over which backward "
            "gathers weights again: regather='gpu'."
        )
    return tuple(names)


def activation_names(given: object) -> tuple[str, ...]:
    """Returns the names in `activations=`."""
    names = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"activations={given!r} does not say where they are kept. Pass 'host', the name of a "
            "mesh axis such as 'tensor', or both: ('host', 'tensor')."
        )
    return tuple(names)


def keeping(plan: Plan, activations: Sequence[str]) -> Keeping:
    """Returns where loops keep what backward needs."""
    free = [axis for axis in plan.mesh.axis_names if axis not in plan.batch_axes]
    for name in activations:
        if name != "host" and name not in free:
            none = "this mesh has none; zerojax.mesh(data=4, tensor=2) has one"
            axes = " or ".join(map(repr, free)) or none
            raise ValueError(
                f"activations={name!r} is not known. Pass 'host', or an axis of the mesh over "
                f"which the batch is not split: {axes}."
            )
    return Keeping("host" in activations, tuple(name for name in activations if name != "host"))


def precision_of(plan: Plan, given: Precision | None) -> Precision:
    """Returns the dtypes of a step: the plan's, or those given where the plan has none."""
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
    """Raises where gradients cross hosts and the devices of each in one hop, or as they are."""
    axes = plan.groups.opt_state if isinstance(precision.reduce, Blocks) else ()
    if axes and not plan.slow(axes):
        raise ValueError(
            f"reduce={precision.reduce} is for gradients between nodes, and groups= shards nothing "
            f"over {plan.slow(plan.batch_axes)}: shards are summed over those by an all-reduce, "
            "which adds no codes. Leave it out, or shard the optimizer state over them too: "
            f"groups={{'params': {axes[0]!r}}}."
        )
    for axis in plan.slow(axes):
        along = _mesh.hosts_along(plan.mesh, (axis,))
        count, hosts = len(along), len(set(along))
        if 1 < hosts < count:
            raise ValueError(
                f"reduce={precision.reduce} sends gradients as codes over {axis!r}, {count} "
                f"devices on {hosts} hosts: each through a network card of its own. An exact "
                "reduce-scatter, whose rings share the cards of a host, is faster. Split the axis: "
                f"zerojax.mesh(node={hosts}, gpu={count // hosts}), axis=('node', 'gpu')."
            )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The ingredients of a step, read off it as `step.recipe`."""

    loss_fn: Callable[..., PyTree]
    options: Options
    plan: Plan | None = None
    tx: optax.GradientTransformation | None = None
    skip_nonfinite: bool = False

    @property
    def mutable(self) -> tuple[str, ...]:
        return self.options.mutable
