"""`choose`: the fastest way to train on some GPUs, by forecasts of the ways that may be it."""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr

from zerojax import _compat, aot
from zerojax._kernel.jaxprs import nbytes
from zerojax._plan import mesh as _mesh, offload as _offload
from zerojax._plan.mesh import DEFAULT_AXIS
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision
from zerojax._progress import working
from zerojax._state.state import PARAMS
from zerojax._step.step import Step
from zerojax._step.step_options import LAYERS
from zerojax._table import Printed, Table, human_bytes, human_time
from zerojax._types import PyTree
from zerojax._wire.codecs import Quantized
from zerojax.tools._forecast import network as _network
from zerojax.tools._forecast.case import CASE_COLUMNS, Case, matmuls_of
from zerojax.tools._forecast.forecast import Workload, WorkOptions, check, gpu_of
from zerojax.tools._forecast.models import Loss, NnxStep, check_one, is_of_nnx, parts_of_nnx
from zerojax.tools._forecast.ways import AMSP, GPU_AXIS, HSDP, WayToTrain, quoted, sent, ways
from zerojax.tools._hlo.gpus import Gpu, Rates

MOST_MICROBATCHES = 16
KEPT = ("precision", "mutable", "tx")  # of what a step of nnx was made with
EXACT_FAMILIES, LOSSY_FAMILIES = 4, 2  # how many families of ways of each kind are compiled
MOST_COMPILED = 9
FASTER = 0.99  # of a time: what is compiled may be as fast, and codes that are chosen are
SETTING = 1e-3  # of a step's time: what a setting must gain
ROUGHLY = 1.1  # the error of memory by the plan: what needs more of the GPU is not compiled
CODING = 0.03  # of compute: what encoding and decoding add, of 7.5B on 64 H100s

SPEEDS = ("tokens/s", "MFU")  # as a forecast has them
CHOICE_TIMES = ("at least", "step", "exposed")
CHOICE_HEADER = ("", *CHOICE_TIMES, *SPEEDS, "peak", "fits", "numbers")


@dataclasses.dataclass(frozen=True)
class Tried:
    """A way, the seconds that it takes at least, and its memory by the plan; `case`, if compiled.

    It takes as long as its compute does in a step at stage 3, as its bytes over the slower link,
    and as its copies from and to the host's memory.
    """

    way: WayToTrain
    estimate: float
    peak: float
    sent: float = 0.0
    case: Case | None = None

    @property
    def rank(self) -> tuple[float, float]:
        """Of ways that take as long, the one with fewer settings is first, then fewer bytes."""
        settings = len(self.way.placed() | self.way.stepped())
        return self.estimate * (1 + SETTING * settings), self.sent

    @property
    def family(self) -> tuple:
        """What ways share that differ only in microbatches and loss."""
        way = self.way
        return way.placement, way.regather, way.gather, way.reduce


class Compiled(NamedTuple):
    """A way that was compiled, and what it costs."""

    way: WayToTrain
    case: Case


@dataclasses.dataclass(frozen=True, repr=False)
class Choice(Printed):
    """The result of `zerojax.tools.choose`: print it. `best` is the fastest that fits with exact
    numbers, `best_with_codes` one with codes, where that is faster; None where there is none."""

    gpus: str
    gpu: Gpu
    precision: Precision | None
    devices: int
    local: int
    tried: tuple[Tried, ...]
    is_nnx: bool = False
    axis: str | None = None

    @property
    def compiled(self) -> list[Compiled]:
        """The ways that were compiled, those that fit first, the fastest before the others."""
        compiled = [Compiled(one.way, one.case) for one in self.tried if one.case is not None]
        return sorted(compiled, key=lambda one: (not one.case.fits, one.case.step_seconds))

    @property
    def best(self) -> Compiled | None:
        return self._first(exact=True)

    @property
    def best_with_codes(self) -> Compiled | None:
        coded, exact = self._first(exact=False), self.best
        if coded is None or exact is None:
            return coded
        return coded if coded.case.step_seconds < FASTER * exact.case.step_seconds else None

    def _first(self, exact: bool) -> Compiled | None:
        fit = (one for one in self.compiled if one.case.fits and one.way.is_exact == exact)
        return next(fit, None)

    def python(self, way: WayToTrain) -> str:
        """Returns the lines that train so."""
        state, lines = [], []
        if way.names_levels:
            levels = f"node={self.devices // self.local}, gpu={self.local}"
            lines.append(f"mesh = zerojax.mesh({levels})")
            state += ["mesh=mesh"] + ['axis=("node", "gpu")'] * (way.groups is None)
        elif self.axis not in (None, DEFAULT_AXIS):
            lines.append(f"mesh = {_mesh.call_for(self.devices, axis=self.axis)}")
            state.append("mesh=mesh")
        placed = [f"{name}={quoted(value)}" for name, value in way.placed().items()]
        precision = way.precision(self.precision)
        if precision is not None:
            state.append(f"precision={_shown_precision(precision)}")
        package = "zerojax.nnx" if self.is_nnx else "zerojax"
        into = "state = zerojax.shard_train_state(make_state"
        into = f"model, optimizer = {package}.shard(make" if self.is_nnx else into
        stepped = "".join(f", {name}={quoted(value)}" for name, value in way.stepped().items())
        loss = f"losses[{quoted(way.variant)}]" if way.variant else "loss_fn"
        lines.append(f"{', '.join([into, *placed, *state])})")
        return "\n".join([*lines, f"step = {package}.train_step({loss}{stepped})"])

    def to_dict(self) -> dict[str, object]:
        """Returns all ways, with the costs of those that were compiled, and the Python of the
        best."""
        best = [self.python(one.way) for one in (self.best, self.best_with_codes) if one]
        ways = [
            {"way": dataclasses.asdict(one.way), "estimate": one.estimate, "peak": one.peak}
            for one in self.tried
        ]
        compiled = [
            {"way": dataclasses.asdict(way), **case.to_dict()} for way, case in self.compiled
        ]
        return {"gpus": self.gpus, "tried": ways, "compiled": compiled, "best": best}

    def table(self) -> Table:
        estimates = {one.way: one.estimate for one in self.tried}
        rows = [
            (
                str(way),
                estimates[way],
                case.step_seconds,
                case.exposed_seconds + case.waited_seconds,
                *(CASE_COLUMNS[title].value(case) for title in SPEEDS),
                case.peak,
                case.fits,
                "exact" if way.is_exact else "codes",
            )
            for way, case in self.compiled
        ]
        formats = dict.fromkeys(CHOICE_TIMES, human_time) | {"peak": human_bytes}
        formats |= {title: CASE_COLUMNS[title].form for title in SPEEDS}
        notes = list(self._advice())
        return Table(CHOICE_HEADER, rows, [self._title()], notes, formats=formats, optional=SPEEDS)

    def _title(self) -> str:
        *few, most = map(str, sorted({one.way.accumulate for one in self.tried}))
        counts = " or ".join(filter(None, (", ".join(few), most)))
        plural = "es" * (counts != "1")
        return "; ".join(
            [
                f"{self.gpus}, {human_bytes(self.gpu.usable)} usable of each",
                *matmuls_of([case for _, case in self.compiled]),
                f"{len(self.tried)} ways, of {counts} microbatch{plural}",
                f"{len(self.compiled)} compiled, which may be the fastest",
                "times modelled",
                "MFU of dense FLOP/s in 16 bits",
            ]
        )

    def _advice(self) -> Iterator[str]:
        best, coded = self.best, self.best_with_codes
        if best is None and coded is None:
            least = human_bytes(min(one.peak for one in self.tried))
            how = "use more GPUs or a smaller batch"
            yield f"Nothing fits. The least is about {least}: {how}."
        kinds = ("Fastest with exact numbers", best), ("Faster with codes", coded)
        for kind, one in kinds:
            if one is not None:
                kind = kind if best else kind.replace("Faster", "Fastest")
                yield f"\n{kind}, {_costs(*one)}:"
                yield f"\n{self.python(one.way)}"
        cases = [one.case for one in (best, coded) if one]
        if any(case.network_bytes for case in cases) and (
            advice := _network.advice(self.gpu, os.environ)
        ):
            yield from ("", advice)
        for line in _offload.told_of_pool(max((case.pinned for case in cases), default=0)):
            yield from ("", line)


def _costs(way: WayToTrain, case: Case) -> str:
    """Returns what is chosen by, and for how many microbatches."""
    speeds = [f"{case.mfu:.1%} MFU", f"{way.accumulate} microbatch{'es' * (way.accumulate > 1)}"]
    if case.tokens_per_second is not None:
        speeds.insert(0, f"{case.tokens_per_second:,.0f} tokens/s")
    return ", ".join([human_time(case.step_seconds), *speeds])


def _shown_precision(precision: Precision) -> str:
    fields = {f.name: getattr(precision, f.name) for f in dataclasses.fields(precision)}
    named = (f"{name}={_named(value)}" for name, value in fields.items() if value is not None)
    return f"zerojax.Precision({', '.join(named)})"


def _named(value: object) -> str:
    if isinstance(value, Quantized):
        return f'"{value.dtype}"' if value == Quantized(value.dtype) else f"zerojax.{value}"
    try:
        return f'"{jnp.dtype(value).name}"'  # type: ignore[arg-type]
    except TypeError:
        return str(value)


def choose(
    loss_fn: Loss | NnxStep | Mapping[str, Loss],
    make_state: Any,
    batch: PyTree,
    rng: PyTree = None,
    *,
    gpus: str,
    precision: Precision | None = None,
    lossy: bool = True,
    mutable: Sequence[str] = (),
    tx: optax.GradientTransformation | None = None,
    tokens: int | None = None,
    rates: Rates | None = None,
    per_host: int = aot.PER_HOST,
    axis: str | None = None,
) -> Choice:
    """Finds the fastest way to train that fits: what to pass to `shard_train_state` and
    `train_step`.

    Looks at stages, groups, hpZ, codes, host memory, microbatches and their order. It compiles one
    step of each loss, from which it knows how long every way takes at least, and then, best first,
    those that may be faster than the fastest so far. Print the result: it says which way is fastest
    with exact numbers, which with codes, and the Python to paste.

    Arguments:
        loss_fn, make_state, batch, rng, gpus, tokens, rates, per_host, mutable, tx: as for
            `zerojax.forecast`; of several losses, such as a model with and without
            `jax.checkpoint`, one is chosen too. A step of `zerojax.nnx.train_step` stands for its
            loss, with a function that returns a model and its optimizer. The batch stays as it is,
            so more microbatches have fewer rows each.
        precision: as for `zerojax.shard_train_state`; codes are added to it.
        lossy: whether to look at codes, which change the numbers a little.
        axis: what the loss calls the mesh axis over all GPUs. Where it calls it by any name, "data"
            too, ways that need an axis of hosts and one of their GPUs are not for it.

    Example:
        >>> def make_state():
        ...     params = {"w": jnp.zeros((8, 1024, 1024)), "b": jnp.zeros((8, 1024))}
        ...     return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> def loss_fn(params, batch):
        ...     layer = jax.checkpoint(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None))
        ...     return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)
        >>> batch = jax.ShapeDtypeStruct((8 * 512, 1024), jnp.float32)
        >>> choice = zerojax.tools.choose(loss_fn, make_state, batch, gpus="8xH100")
        >>> print(choice.python(choice.best.way))
        state = zerojax.shard_train_state(make_state, stage=3)
        step = zerojax.train_step(loss_fn)
    """
    if isinstance(loss_fn, Step):
        raise TypeError(
            "choose finds what to make a step with, and got one that is made. Give it the loss, "
            "with mutable= and tx= where the step has them; to --choose, return (loss_fn, "
            "make_state, batch), with a TrainState from make_state."
        )
    gpu = gpu_of(gpus, rates)
    check(make_state, batch, tokens)
    check_one(loss_fn)
    options: dict[str, Any] = {"tx": tx, "mutable": mutable, "precision": precision}
    is_nnx = is_of_nnx(loss_fn)
    if is_nnx:
        loss_fn, make_state, rng, own = parts_of_nnx(loss_fn, make_state, rng)
        _check_open(own)
        options = own | {name: value for name, value in options.items() if value}
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"": loss_fn}
    shared = WorkOptions(tokens=tokens, rates=rates, per_host=per_host, axis=axis, **options)
    work = Workload(make_state, batch, rng, gpus, gpu, shared)
    search = _Search(work, losses, shared.precision)
    return dataclasses.replace(search.run(lossy), is_nnx=is_nnx)


def _check_open(own: Mapping[str, Any]) -> None:
    """Raises where a step of nnx has what is to be found, or what the Python would not have."""
    if named := [f"{name}=..." for name in own if name not in KEPT]:
        rows = " choose splits batches along their first dimension." * ("batch_specs" in own)
        raise ValueError(
            "choose takes a step of nnx with its loss and precision= only, and this one is "
            f"train_step(loss_fn, {', '.join(named)}).{rows} Leave that out, and add what choose "
            "does not find to the step that it prints."
        )


@dataclasses.dataclass
class _Search:
    """Ranks all ways by what they take at least, and compiles those that may be the fastest."""

    work: Workload
    losses: Mapping[str, Loss]
    precision: Precision | None

    def __post_init__(self) -> None:
        self.usable, self.rates = self.work.gpu.usable, self.work.gpu.rates
        self.compiled: dict[WayToTrain, Case] = {}
        self.plan = functools.cache(self._plan)
        self.devices = self.of(WayToTrain()).mesh.size
        self.local = min(self.devices, self.work.options.per_host)

    def run(self, lossy: bool) -> Choice:
        levels = self.devices > self.local and self.work.options.axis is None
        if levels:  # what one loss calls one axis, no mesh of two has: it says so before a compile
            self.traced(next(iter(self.losses)), WayToTrain(groups=HSDP))
        every = ways(list(self.losses), self.counts(), levels, lossy)
        if self.devices == 1:  # where all stages are one
            every = (way for way in every if way.stage == 3)
        for variant in self.losses:
            self.case(WayToTrain(variant))
        ranked = sorted(map(self.estimated, every), key=lambda one: one.rank)
        self.compile_best(ranked)
        tried = [dataclasses.replace(one, case=self.compiled.get(one.way)) for one in ranked]
        work, sizes = self.work, (self.devices, self.local)
        axis = work.options.axis
        return Choice(work.gpus, work.gpu, self.precision, *sizes, tuple(tried), axis=axis)

    def counts(self) -> list[int]:
        """Returns the numbers of microbatches that the batch divides into."""
        rows = next(x.shape[0] for x in jax.tree.leaves(self.work.batch) if x.shape)
        powers = (2**k for k in range(MOST_MICROBATCHES.bit_length()))
        return [count for count in powers if count == 1 or rows % (count * self.devices) == 0]

    def compile_best(self, ranked: Sequence[Tried]) -> None:
        """Compiles the best ways of each kind that fit by the plan, while they may be faster than
        the best so far."""
        fit = [one for one in ranked if one.peak <= ROUGHLY * self.usable]
        ways = {one.way for one in fit}

        def offloads_in_vain(way: WayToTrain) -> bool:
            return bool(way.offload) and dataclasses.replace(way, offload=way.offload[:-1]) in ways

        for exact, most in ((True, EXACT_FAMILIES), (False, LOSSY_FAMILIES)):
            families: dict[tuple, list[Tried]] = {}
            for one in fit:
                if one.way.is_exact == exact and not offloads_in_vain(one.way):
                    families.setdefault(one.family, []).append(one)
            for family in itertools.islice(families.values(), most):
                fits = (case for case in self.compiled.values() if case.fits)
                fastest = min((case.step_seconds for case in fits), default=math.inf)
                if family[0].estimate < FASTER * fastest:
                    self._compile_family(family)

    def _compile_family(self, family: Sequence[Tried]) -> None:
        """Compiles the best of a family, or the next one with less memory until one fits."""
        peak = math.inf
        for one in family:
            if one.peak < peak and len(self.compiled) < MOST_COMPILED:
                if self.case(one.way).fits:
                    return
                peak = 0.9 * one.peak

    # -- one way

    def of(self, way: WayToTrain) -> Workload:
        options = dataclasses.replace(self.work.options, **way.options(self.precision))
        return dataclasses.replace(self.work, options=options)

    def case(self, way: WayToTrain) -> Case:
        """Compiles a way, once."""
        if way not in self.compiled:
            loss, how = self.losses[way.variant], (way.stage, way.accumulate, way.order)
            with working(f"compiling {way}"):
                self.compiled[way] = self.of(way).case(way.variant, loss, *how)
        return self.compiled[way]

    def _plan(self, *placement: Any) -> Plan:
        """Returns the plan of all ways that place the state so."""
        stage, groups, offload = placement
        return self.of(WayToTrain(groups=groups, offload=offload)).plan_at(stage)

    def traced(self, variant: str, way: WayToTrain) -> Jaxpr:
        plan = self.plan(*way.placement)
        step = self.work.step(self.losses[variant], plan)
        arguments = (aot.batch(one, plan) for one in (self.work.batch, self.work.rng))
        arguments = [one for one in arguments if one is not None]
        return step.without_options.trace(plan.abstract(), *arguments).jaxpr.jaxpr

    @functools.cached_property
    def kept(self) -> dict[str, int]:
        """The bytes that each loss keeps for backward."""
        return {name: stacked_bytes(self.traced(name, WayToTrain())) for name in self.losses}

    def estimated(self, way: WayToTrain) -> Tried:
        """Returns what a way takes at least, by the step of its loss at stage 3 over all GPUs."""
        first = self.case(WayToTrain(way.variant))
        assert first.report is not None, "it was compiled here"
        totals, gathered = first.report.totals, first.report.memory.gathered
        weights, grads = totals.get("all-gather", 0) / 2, totals.get("reduce-scatter", 0)
        plan, at_stage_3 = self.plan(*way.placement), self.plan(*WayToTrain().placement)
        parameters = sum(leaf.nbytes for leaf in plan.params)
        inside, between = sent(way, weights, grads, parameters)
        # A ring through all hosts leaves each of them by all of its network cards.
        between *= 1 / self.local if self.devices > self.local else 0
        wires = max(inside / self.rates.link, between / self.rates.network)
        rounds = 1 if way.order == LAYERS else way.accumulate
        crossings, on_host = {PARAMS: 1 + 2 * rounds}, plan.host_bytes_per_device()
        copied = sum(crossings.get(kind, 1) * nbytes for kind, nbytes in on_host.items())
        compute = first.compute_seconds * (1 if way.is_exact else 1 + CODING)
        seconds = max(compute, wires, copied / self.rates.to_host(self.local))
        kept = self.kept[way.variant]
        workspace = first.peak - _state_bytes(at_stage_3, True) - gathered - kept
        peak = _state_bytes(plan, way.keeps_gradients) + gathered
        peak += workspace / way.accumulate + kept / rounds
        peak += weights / self.local if way.regather == GPU_AXIS or way.groups == AMSP else 0
        return Tried(way, seconds, peak, wires)


def _state_bytes(plan: Plan, with_gradients: bool) -> int:
    """Returns what a device holds of the state, by the plan."""
    gradients = plan.gradient_bytes() if with_gradients else 0
    return sum(plan.bytes_per_device().values()) + gradients


def stacked_bytes(jaxpr: Jaxpr) -> int:
    """Returns the bytes on the device of what loops stack up, such as what backward needs."""
    total = 0
    for eqn in jaxpr.eqns:
        inside, trips = sum(map(stacked_bytes, _compat.inner_jaxprs(eqn))), 1
        if eqn.primitive.name == "scan":
            trips, (_, carry) = eqn.params["length"], _compat.scan_counts(eqn.params)
            total += nbytes(v for v in eqn.outvars[carry:] if not _compat.rests_on_host(v))
        total += inside * trips
    return total
