"""The ways to train on some GPUs that may be the fastest, and the bytes that each sends."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from zerojax._plan.precision import Precision
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._step.step_options import LAYERS, MICROBATCHES
from zerojax.tools._forecast.forecast import LEVELS, STAGES, WorkOptions, names_levels

CODED = {None: 1.0, "int8": (1 + 4 / 256) / 2, "int4": (0.5 + 4 / 256) / 2}  # with scales

NODE_AXIS, GPU_AXIS = LEVELS
HSDP = (("params", GPU_AXIS), ("grads", GPU_AXIS), ("opt_state", GPU_AXIS))
AMSP = (("params", GPU_AXIS), ("grads", GPU_AXIS), ("opt_state", (GPU_AXIS, NODE_AXIS)))
LOSSY_CODES = (("int8", None), ("int8", "int8"), ("int8", "int4"))


@dataclasses.dataclass(frozen=True)
class WayToTrain:
    """Arguments of `shard_train_state` and `train_step`; `variant` is one of several losses."""

    variant: str = ""
    stage: int = 3
    accumulate: int = 1
    order: str = MICROBATCHES
    groups: tuple[tuple[str, str | tuple[str, ...]], ...] | None = None
    regather: bool | str = True
    gather: str | None = None
    reduce: str | None = None
    offload: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        return self.gather is self.reduce is None

    @property
    def names_levels(self) -> bool:
        """Whether it needs hosts and their GPUs as axes of the mesh."""
        return names_levels(WorkOptions(**self.options(None)))

    @property
    def placement(self) -> tuple:
        """What its state is placed by."""
        return self.stage, self.groups, self.offload

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients wait for the update: elementwise ones run in backward by default where
        state is in host memory, or weights rest whole and are sharded for the update. In AMSP's
        groups they go on at once to the optimizer's shards, and are as small."""
        at_once = self.offload or self.stage in (1, 2) or self.groups == AMSP
        return self.accumulate > 1 or not at_once

    def options(self, precision: Precision | None) -> dict[str, Any]:
        """Returns those of a workload."""
        options = {"groups": self.groups and dict(self.groups), "offload": self.offload or None}
        return options | {"precision": self.precision(precision), "regather": self.regather}

    def precision(self, shared: Precision | None) -> Precision | None:
        if self.is_exact:
            return shared
        precision = shared or Precision()
        reduce = self.reduce or precision.reduce
        return dataclasses.replace(precision, gather=self.gather, reduce=reduce)

    def __str__(self) -> str:
        codes = {name: code for name in ("gather", "reduce") if (code := getattr(self, name))}
        settings = self.placed() | self.stepped() | codes
        named = ", ".join(f"{name}={quoted(value)}" for name, value in settings.items())
        return f"{named}; {self.variant}" if self.variant else named

    def placed(self) -> dict[str, Any]:
        """Returns its arguments of `shard_train_state`, but for the mesh and the precision."""
        settings: dict[str, Any] = {"stage": self.stage}
        if self.groups is not None:
            settings = {"groups": dict(self.groups)}
        return settings | ({"offload": self.offload} if self.offload else {})

    def stepped(self) -> dict[str, Any]:
        """Returns its arguments of `train_step`."""
        usual = {"accumulate": 1, "order": MICROBATCHES, "regather": True}
        settings = {name: getattr(self, name) for name in usual}
        return {name: value for name, value in settings.items() if value != usual[name]}


def quoted(value: object) -> str:
    """Returns an argument as Python has it."""
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')


def ways(
    variants: Sequence[str], accumulate: Sequence[int], several_hosts: bool, lossy: bool
) -> Iterator[WayToTrain]:
    """Returns all ways that may be the fastest: state goes to the host only at stage 3, and codes
    only where there is a network."""
    layouts: list[dict[str, Any]] = [{"stage": stage} for stage in STAGES]
    layouts += [{"offload": (OPT_STATE,)}, {"offload": (OPT_STATE, PARAMS)}]
    if several_hosts:
        codes = LOSSY_CODES if lossy else ()
        layouts += [{"groups": HSDP}, {"groups": AMSP}, {"regather": GPU_AXIS}]
        layouts += [
            {"gather": gather, "reduce": reduce, "regather": regather}
            for (gather, reduce), regather in itertools.product(codes, (True, GPU_AXIS))
        ]
    for variant, count, layout in itertools.product(variants, accumulate, layouts):
        yield (way := WayToTrain(variant, accumulate=count, **layout))
        if count > 1 and way.stage == 3:
            yield dataclasses.replace(way, order=LAYERS)


def sent(way: WayToTrain, weights: float, grads: float, parameters: float) -> tuple[float, float]:
    """Returns the bytes that leave a GPU in a step for those of its host, and for other hosts if
    each of these had one GPU: `weights` are those of one gather, `grads` of one reduction."""
    rounds = 1 if way.order == LAYERS else way.accumulate
    gather, reduce = weights * CODED[way.gather], grads * CODED[way.reduce]
    inside = rounds * (2 * gather + grads)
    if way.groups == HSDP:
        return inside, 2 * grads
    if way.groups == AMSP:
        return inside, weights + grads
    if way.stage < 3:
        once = grads * (rounds if way.stage == 2 else 1)
        total = 2 * grads if way.stage == 0 else once + parameters
        return total, total
    # Kept in the node, weights come into it once a step.
    gathers = 1 if way.regather == GPU_AXIS else 2 * rounds
    return inside, gathers * gather + rounds * reduce
