"""The ways to train on some GPUs that may be the fastest, and the bytes that each sends."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from zerojax._plan.precision import Precision
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._step.step_options import LAYERS, MICROBATCHES
from zerojax.tools._forecast.forecast import LEVELS, STAGES

# The share of a weight's bytes that travels, with scales.
QUANTIZED = {None: 1.0, "int8": (1 + 4 / 256) / 2, "int4": (0.5 + 4 / 256) / 2}

NODE_AXIS, GPU_AXIS = LEVELS
HSDP = (("params", GPU_AXIS), ("grads", GPU_AXIS), ("opt_state", GPU_AXIS))
AMSP = (("params", GPU_AXIS), ("grads", GPU_AXIS), ("opt_state", (GPU_AXIS, NODE_AXIS)))
LOSSY = (("int8", None), ("int8", "int8"), ("int8", "int4"))
PLACED = ("stage", "groups", "offload")  # arguments of `shard_train_state`
STEPPED = ("accumulate", "order", "regather")  # arguments of `train_step`


@dataclasses.dataclass(frozen=True)
class WayToTrain:
    """Arguments of `shard_train_state` and `train_step`; `variant` is one of several losses."""

    variant: str = ""
    stage: int = 3
    groups: tuple[tuple[str, str | tuple[str, ...]], ...] | None = None
    offload: tuple[str, ...] = ()
    accumulate: int = 1
    order: str = MICROBATCHES
    regather: bool | str = True
    gather: str | None = None
    reduce: str | None = None

    @property
    def is_exact(self) -> bool:
        return self.gather is self.reduce is None

    @property
    def names_levels(self) -> bool:
        """Whether it needs hosts and their GPUs as axes of the mesh."""
        return bool(self.groups or self.reduce or self.regather == GPU_AXIS)

    @property
    def rounds(self) -> int:
        """How often a step gathers the weights and reduces their gradients."""
        return 1 if self.order == LAYERS else self.accumulate

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients wait for the update: elementwise ones run in backward by default where
        state is in host memory, or weights rest whole and are sharded for the update. In AMSP's
        groups they go on at once to the optimizer's shards, and are as small."""
        at_once = self.offload or self.stage in (1, 2) or self.groups == AMSP
        return self.accumulate > 1 or not at_once

    def options(self, precision: Precision | None) -> dict[str, Any]:
        """Returns its options of a workload."""
        options = {"groups": self.groups and dict(self.groups), "offload": self.offload or None}
        return options | {"precision": self.precision(precision), "regather": self.regather}

    def precision(self, shared: Precision | None) -> Precision | None:
        if self.is_exact:
            return shared
        precision = shared or Precision()
        reduce = self.reduce or precision.reduce
        return dataclasses.replace(precision, gather=self.gather, reduce=reduce)

    def settings(self) -> dict[str, str]:
        """Returns its arguments that are not the defaults, and its stage, as Python."""
        usual = dataclasses.asdict(WayToTrain(self.variant))
        fields = {name: getattr(self, name) for name in usual if name != "variant"}
        changed = {k: v for k, v in fields.items() if k == "stage" or v != usual[k]}
        if self.groups is not None:  # which say what the stage does
            del changed["stage"]
            changed["groups"] = dict(self.groups)
        return {name: str([value])[1:-1].replace("'", '"') for name, value in changed.items()}

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.settings().items())
        return f"{named}; {self.variant}" if self.variant else named


def ways(
    variants: Sequence[str], accumulate: Sequence[int], several_hosts: bool, lossy: bool
) -> Iterator[WayToTrain]:
    """Returns all ways that may be the fastest: state goes to the host only at stage 3, and
    quantized values only where there is a network."""
    layouts: list[dict[str, Any]] = [{"stage": stage} for stage in STAGES]
    layouts += [{"offload": (OPT_STATE,)}, {"offload": (OPT_STATE, PARAMS)}]
    if several_hosts:
        layouts += [{"groups": HSDP}, {"groups": AMSP}, {"regather": GPU_AXIS}]
        layouts += [
            {"gather": gather, "reduce": reduce, "regather": regather}
            for (gather, reduce), regather in itertools.product(LOSSY * lossy, (True, GPU_AXIS))
        ]
    for variant, count, layout in itertools.product(variants, accumulate, layouts):
        yield (way := WayToTrain(variant, accumulate=count, **layout))
        if count > 1 and way.stage == 3:
            yield dataclasses.replace(way, order=LAYERS)


def sent(way: WayToTrain, weights: float, grads: float, parameters: float) -> tuple[float, float]:
    """Returns the bytes that leave a GPU in a step for those of its host, and for other hosts if
    each of these had one GPU: `weights` are those of one gather, `grads` of one reduction."""
    gather, reduce = weights * QUANTIZED[way.gather], grads * QUANTIZED[way.reduce]
    inside = way.rounds * (2 * gather + grads)
    if way.groups == HSDP:
        return inside, 2 * grads
    if way.groups == AMSP:
        return inside, weights + grads
    if way.stage < 3:
        once = grads * (way.rounds if way.stage == 2 else 1)
        total = 2 * grads if way.stage == 0 else once + parameters
        return total, total
    # Kept in the node, weights come into it once a step.
    gathers = 1 if way.regather == GPU_AXIS else 2 * way.rounds
    return inside, gathers * gather + way.rounds * reduce
