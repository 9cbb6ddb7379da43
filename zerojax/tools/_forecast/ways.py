"""The ways to train that `choose` looks at, and the bytes that each sends."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from zerojax._plan.precision import Precision
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._step.schedule import LAYERS, MICROBATCHES, Schedule
from zerojax._types import PyTree
from zerojax.tools._forecast.forecast import LEVELS, STAGES, WorkOptions

# The share of a weight's bytes that travels, with scales.
QUANTIZED = {None: 1.0, "int8": (1 + 4 / 256) / 2, "int4": (0.5 + 4 / 256) / 2}

NODE_AXIS, GPU_AXIS = LEVELS
HSDP = (("params", GPU_AXIS), ("grads", GPU_AXIS), ("opt_state", GPU_AXIS))
AMSP = (("params", GPU_AXIS), ("grads", GPU_AXIS), ("opt_state", (GPU_AXIS, NODE_AXIS)))
LOSSY = (("int8", None), ("int8", "int8"), ("int8", "int4"))
PLACED = ("stage", "groups", "offload")  # arguments of `shard_train_state`
SCHEDULED = ("order", "regather")  # those of its `Schedule`
Instead = tuple[tuple[str, PyTree], ...]


@dataclasses.dataclass(frozen=True)
class WayToTrain:
    """Arguments of `shard_train_state` and `train_step`; `variant` is one of several losses.
    `instead` are options in place of the user's."""

    variant: str = ""
    stage: int = 3
    groups: tuple[tuple[str, str | tuple[str, ...]], ...] | None = None
    offload: tuple[str, ...] = ()
    accumulate: int = 1
    order: str = MICROBATCHES
    regather: bool | str = True
    gather: str | None = None
    reduce: str | None = None
    instead: Instead = ()

    @property
    def is_exact(self) -> bool:
        return self.gather is self.reduce is None

    @property
    def rounds(self) -> int:
        """How often a step gathers the weights and reduces their gradients."""
        return 1 if self.order == LAYERS else self.accumulate

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients wait for the update. By default an elementwise update runs in backward
        where state is in host memory, or where weights rest whole and the update is sharded. With
        AMSP's groups, gradients go on to the optimizer's shards at once, and are as small."""
        at_once = self.offload or self.stage in (1, 2) or self.groups == AMSP
        return self.accumulate > 1 or not at_once

    @property
    def replaced(self) -> dict[str, PyTree]:
        return {k: dict(v) if k == "mesh" else v for k, v in self.instead}

    def on(self, options: WorkOptions) -> WorkOptions:
        """Returns the options of a step that trains so."""
        precision = options.precision
        if not self.is_exact:
            precision = precision or Precision()
            reduce = self.reduce or precision.reduce
            precision = dataclasses.replace(precision, gather=self.gather, reduce=reduce)
        return dataclasses.replace(
            options,
            **self.replaced,
            groups=self.groups and dict(self.groups),
            offload=self.offload or None,
            precision=precision,
            schedule=Schedule(order=self.order, regather=self.regather),
        )

    def settings(self) -> dict[str, str]:
        """Returns its arguments that are not the defaults, and its stage, as Python."""
        usual = dataclasses.asdict(WayToTrain(self.variant))
        fields = {name: getattr(self, name) for name in usual if name not in ("variant", "instead")}
        changed = {k: v for k, v in fields.items() if k == "stage" or v != usual[k]}
        if self.groups is not None:  # which say what the stage does
            del changed["stage"]
            changed["groups"] = dict(self.groups)
        texts = (changed | self.replaced).items()
        return {name: str([value])[1:-1].replace("'", '"') for name, value in texts}

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.settings().items())
        return f"{named}; {self.variant}" if self.variant else named


def ways(
    variants: Sequence[str], accumulate: Sequence[int], several_hosts: bool, lossy: bool
) -> Iterator[WayToTrain]:
    """Returns all ways that may be the fastest. State goes to the host only at stage 3; only ways
    over several hosts are quantized."""
    layouts: list[dict[str, PyTree]] = [{"stage": stage} for stage in STAGES]
    layouts += [{"offload": (OPT_STATE,)}, {"offload": (OPT_STATE, PARAMS)}]
    if several_hosts:
        layouts += [{"groups": HSDP}, {"groups": AMSP}, {"regather": GPU_AXIS}]
        codes = itertools.product(LOSSY * lossy, (True, GPU_AXIS))
        layouts += [{"gather": g, "reduce": r, "regather": axis} for (g, r), axis in codes]
    for variant, count, layout in itertools.product(variants, accumulate, layouts):
        yield (way := WayToTrain(variant, accumulate=count, **layout))
        if count > 1 and way.stage == 3:
            yield dataclasses.replace(way, order=LAYERS)


def with_experts(
    mesh: Mapping[str, int], rest: str, apart: str, experts: int, most: int
) -> Iterator[Instead]:
    """Returns options with which each of 2 to `most` devices along the axis `apart` has as many
    experts, and last those that gather experts. The axis `rest` has the other devices."""
    mesh = ({} if rest in mesh else {rest: 1}) | {**mesh}
    count = mesh[rest] * mesh[apart]
    for size in range(2, most + 1):
        if size != mesh[apart] and count % size == experts % size == 0:
            yield (("mesh", (*(mesh | {rest: count // size, apart: size}).items(),)),)
    del mesh[apart]
    yield ("mesh", (*(mesh | {rest: count}).items(),)), ("experts", None)


def sent(way: WayToTrain, weights: float, grads: float, parameters: float) -> tuple[float, float]:
    """Returns the bytes that a GPU sends in a step inside its host, and to other hosts if each had
    one GPU. `weights` are the bytes of one gather, `grads` those of one reduction."""
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
    # A node that keeps weights gets them once a step.
    gathers = 1 if way.regather == GPU_AXIS else 2 * way.rounds
    return inside, gathers * gather + way.rounds * reduce
