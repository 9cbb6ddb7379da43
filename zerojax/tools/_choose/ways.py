"""The ways to train a model on some GPUs, and what each costs by a formula."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerojax._plan.precision import Precision
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._step.step_options import LAYERS, MICROBATCHES
from zerojax.tools._forecast.memory_table import STAGES
from zerojax.tools._hlo.gpus import Rates

NODE, GPU = "node", "gpu"
HSDP = (("params", GPU), ("grads", GPU), ("opt_state", GPU))
AMSP = (("params", GPU), ("grads", GPU), ("opt_state", (GPU, NODE)))
CODES = ((None, None), ("int8", None), ("int8", "int8"), ("int8", "int4"))

# [Note: the formula]
# A step takes its compute, and what its collectives and copies take longer than the compute that
# they can hide under. Compute and its memory come from a compiled step of each loss, at stage 3
# over all GPUs. (Matmuls do not tell: to keep attention's weights for backward takes longer than to
# compute them again.) The formula ranks, and the best are compiled.
#
# What else costs compute, as shares of a compiled 7.5B step on 64 H100s: encoding and decoding
# (3 and 4%), gradients of all microbatches added layer by layer (3%), hpZ's second gathers (1%),
# and in groups the hops that wait for those over the other link (7%).
DECODING, CODING, ADDING, TWICE, CHAINS = 0.03, 0.04, 0.03, 0.01, 0.07
# A code and its share of a scale, as a part of 16 bits.
CODED = {None: 1.0, "int8": (1 + 4 / 256) / 2, "int4": (0.5 + 4 / 256) / 2}
# Passes over full parameters by an update of parameters that rest whole: 54 ms of 7.5B in float32.
PASSES = 5
HIDES = 0.97  # of the compute; a step begins and ends with what nothing hides
FORWARD = 0.3  # of the compute
# State in host memory: copies of a layer there and back are a chain, and hide under backward.
CHAINED, HIDES_COPIES = 1.4, 0.4


@dataclasses.dataclass(frozen=True)
class Way:
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
    def with_less_offload(self) -> "Way":
        """The same with the last kind of state in host memory back on the device."""
        return dataclasses.replace(self, offload=self.offload[:-1])

    @property
    def names_levels(self) -> bool:
        """Whether it needs hosts and their GPUs as axes of the mesh."""
        return self.groups is not None or self.regather == GPU or self.reduce is not None

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

    @property
    def rounds(self) -> int:
        """How often it gathers each layer."""
        return 1 if self.order == LAYERS else self.accumulate

    def precision(self, given: Precision | None) -> Precision | None:
        if self.is_exact:
            return given
        return dataclasses.replace(
            given or Precision(), gather=self.gather, reduce=self.reduce or (given and given.reduce)
        )

    def __str__(self) -> str:
        codes = {name: code for name in ("gather", "reduce") if (code := getattr(self, name))}
        settings = self.placed() | self.stepped() | codes
        named = ", ".join(f"{name}={shown(value)}" for name, value in settings.items())
        return f"{named}; {self.variant}" if self.variant else named

    def placed(self) -> dict[str, Any]:
        """Returns its arguments of `shard_train_state`, but for the mesh and the precision."""
        found: dict[str, Any] = {"stage": self.stage} if self.groups is None else {}
        found |= {} if self.groups is None else {"groups": dict(self.groups)}
        return found | ({"offload": self.offload} if self.offload else {})

    def stepped(self) -> dict[str, Any]:
        """Returns its arguments of `train_step`."""
        found: dict[str, Any] = {}
        if self.accumulate > 1:
            found["accumulate"] = self.accumulate
        if self.order != MICROBATCHES:
            found["order"] = self.order
        if self.regather is not True:
            found["regather"] = self.regather
        return found


def shown(value: object) -> str:
    """Returns an argument as Python has it."""
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')


def ways(
    variants: Sequence[str], accumulate: Sequence[int], several_hosts: bool, lossy: bool
) -> Iterator[Way]:
    """Returns all ways that may be the fastest: state goes to the host only at stage 3, and codes
    only where there is a network."""
    layouts: list[dict[str, Any]] = [{"stage": stage} for stage in STAGES]
    layouts += [{"offload": (OPT_STATE,)}, {"offload": (OPT_STATE, PARAMS)}]
    if several_hosts:
        layouts += [{"groups": HSDP}, {"groups": AMSP}, {"regather": GPU}]
        codes = CODES[1:] if lossy else ()
        layouts += [
            {"gather": gather, "reduce": reduce, "regather": regather}
            for (gather, reduce), regather in itertools.product(codes, (True, GPU))
        ]
    for variant, count, layout in itertools.product(variants, accumulate, layouts):
        yield (way := Way(variant, accumulate=count, **layout))
        if count > 1 and way.stage == 3:
            yield dataclasses.replace(way, order=LAYERS)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the formula knows of a model on some GPUs; bytes and seconds are those of one GPU.

    By loss: `compute` of a step, `kept` for backward, `workspace`, what else activations take, and
    `weights`, one gather of all of them. `gathered` are the weights at hand, `gradients` one
    reduction.
    """

    rates: Rates
    devices: int
    local: int  # GPUs of a host
    parameters: float  # in full, as they rest
    compute: Mapping[str, float]
    kept: Mapping[str, float]
    workspace: Mapping[str, float]
    weights: Mapping[str, float]
    gathered: float
    gradients: float

    def seconds(self, way: Way, on_host: Mapping[str, int]) -> float:
        """Returns the time of a step that has so many bytes of each kind in host memory."""
        compute = self.compute[way.variant] * (1 + _share_of_extra_compute(way))
        crossings = {OPT_STATE: 1, PARAMS: 1 + 2 * way.rounds}
        copied = sum(crossings.get(kind, 1) * count for kind, count in on_host.items())
        copied *= CHAINED / self.rates.to_host(min(self.local, self.devices))
        exposed = max(0.0, copied - HIDES_COPIES * compute)
        forward, backward = map(self._of_links, self.sent(way))
        exposed += max(0.0, forward - HIDES * FORWARD * compute)
        exposed += max(0.0, backward - HIDES * (1 - FORWARD) * compute)
        update = PASSES * self.parameters / self.rates.memory if way.stage < 3 else 0.0
        return compute + update + exposed

    def _of_links(self, sent: tuple[float, float]) -> float:
        """Returns the time of collectives, over both links at once."""
        return max(sent[0] / self.rates.link, sent[1] / self.rates.network)

    def sent(self, way: Way) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns the bytes that leave a GPU for those of its host, and for other hosts: in
        forward, and in backward with the update."""
        weights, grads, rounds = self.weights[way.variant], self.gradients, way.rounds
        local = min(self.local, self.devices)
        # A ring through all hosts leaves each of them by all of its network cards.
        leaves = 1 / local if self.devices > local else 0.0
        if way.groups is not None:
            # Gradients cross in both halves of an all-reduce, or one half waits for forward.
            fetched, summed = (weights, grads) if way.groups == AMSP else (0.0, 2 * grads)
            forward = rounds * weights, fetched * leaves
            return forward, (rounds * (weights + grads), summed * leaves)
        if way.stage < 3:
            once = grads * (rounds if way.stage == 2 else 1)
            total = 2 * grads if way.stage == 0 else once + self.parameters
            return (0.0, 0.0), (total, total * leaves)
        gather, reduce = weights * CODED[way.gather], grads * CODED[way.reduce]
        # Kept in the node, weights come into it once a step.
        first, again = (1, 0) if way.regather == GPU else (rounds, rounds)
        forward = rounds * gather, first * gather * leaves
        return forward, (rounds * (gather + grads), (again * gather + rounds * reduce) * leaves)

    def peak(self, way: Way, state: float) -> float:
        """Returns the memory of a step whose state takes so much."""
        count = way.accumulate
        kept = self.kept[way.variant] / (1 if way.order == LAYERS else count)
        keeps = way.regather == GPU or way.groups == AMSP
        near = self.weights[way.variant] / self.local if keeps else 0.0
        return state + self.gathered + self.workspace[way.variant] / count + kept + near


def _share_of_extra_compute(way: Way) -> float:
    coded = CODING if way.reduce else DECODING if way.gather else 0.0
    chains = CHAINS * (way.groups is not None)
    return coded + chains + ADDING * (way.order == LAYERS) + TWICE * (way.regather == GPU)
