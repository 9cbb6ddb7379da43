"""`choose`: the fastest way to train on some GPUs, by forecasts of the ways that may be it."""

import dataclasses
import functools
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from zerojax import aot
from zerojax._declared import Options, option, takes
from zerojax._plan.expert import Experts
from zerojax._plan.mesh import DEFAULT_AXIS
from zerojax._plan.plan import Plan
from zerojax._plan.plan_options import StateOptions
from zerojax._progress import working
from zerojax._specs import as_names
from zerojax._state.state import NNX_FIELDS, PARAMS
from zerojax._step.schedule import MICROBATCHES, Schedule
from zerojax._step.step import Step
from zerojax._step.step_options import TrainOptions
from zerojax._table import Column, Printed, Table, grouped, human_bytes, human_time, summed
from zerojax._types import PyTree
from zerojax.tools._audit.measurement import is_ours
from zerojax.tools._forecast.case import Case, titled, told_to_hosts, unread
from zerojax.tools._forecast.forecast import (
    LEVELS,
    LossFn,
    Workload,
    WorkOptions,
    changed_options,
    is_of_nnx,
)
from zerojax.tools._forecast.ways import (
    AMSP,
    GPU_AXIS,
    HSDP,
    PLACED,
    SCHEDULED,
    WayToTrain,
    sent,
    ways,
    with_experts,
)
from zerojax.tools._hlo.gpus import Gpu

MOST_MICROBATCHES = 16
EXACT_FAMILIES, LOSSY_FAMILIES = 4, 2  # how many families of ways of each kind are compiled
MOST_COMPILED = 9
FASTER = 0.99  # of a time: ways that may take less are compiled, quantized ones that do are chosen
SETTING = 1e-3  # of a step's time: what a setting must gain
ROUGHLY = 1.1  # the error of memory by the plan: ways that need more of the GPU are not compiled
CODING = 0.03  # of compute: what encoding and decoding add, of 7.5B on 64 H100s
WORDED = ("mesh", "axis", "sequence", "experts", "precision", "accumulate", "schedule")
OBJECT = re.compile(r"\w\(|<")  # in the text of a value


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
    case: PyTree = None  # a `Case`

    @property
    def rank(self) -> tuple[float, float]:
        """Of ways that take as long, the one with fewer settings is first, then fewer bytes."""
        settings = len(self.way.settings().keys() & {*PLACED, *SCHEDULED, "accumulate"})
        return self.estimate * (1 + SETTING * settings), self.sent


CHOICE_COLUMNS: dict[str, Column] = {
    "": (lambda one: str(one.way), str, ""),
    "at least": ("estimate", human_time, ""),
    "step": ("case.step_seconds", human_time, ""),
    "exposed": ("case.stalled_seconds", human_time, ""),
    "tokens/s": ("case.tokens_per_second", "{:,.0f}".format, ""),
    "MFU": ("case.mfu", "{:.1%}".format, ""),
    "peak": ("case.peak", human_bytes, ""),
    "fits": ("case.fits", str, ""),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Choice(Printed):
    """The result of `zerojax.tools.choose`: print it. `best` is the fastest way that fits with
    exact numbers, `best_quantized` one that sends quantized values, where that is faster; None
    where there is none. Each has its `way` and its `case`."""

    gpus: str
    options: WorkOptions
    tried: tuple[Tried, ...]
    is_nnx: bool = False

    @property
    def gpu(self) -> Gpu:
        return self.options.gpu_of(self.gpus)

    @property
    def compiled(self) -> list[Tried]:
        """The ways that were compiled, those that fit first, the fastest before the others."""
        compiled = [one for one in self.tried if one.case is not None]
        return sorted(compiled, key=lambda one: _rank(one.case))

    @property
    def best(self) -> Tried | None:
        return self._first(exact=True)

    @property
    def best_quantized(self) -> Tried | None:
        lossy, exact = self._first(exact=False), self.best
        if lossy is None or exact is None:
            return lossy
        return lossy if lossy.case.step_seconds < FASTER * exact.case.step_seconds else None

    def _first(self, exact: bool) -> Tried | None:
        fit = (one for one in self.compiled if one.case.fits and one.way.is_exact == exact)
        return next((one for one in fit if one.case.step_seconds is not None), None)

    def python(self, way: WayToTrain) -> str:
        """Returns the lines that train so."""
        settings, options = way.settings(), way.on(self.options)
        state = [f"{name}={settings[name]}" for name in PLACED if name in settings]
        sizes, axis = options.sizes(self.gpus), options.rows_over(self.gpus)
        lines = []
        if tuple(sizes) != (DEFAULT_AXIS,):
            named = ", ".join(f"{name}={size}" for name, size in sizes.items())
            lines.append(f"mesh = zerojax.mesh({named})")
            state.append("mesh=mesh")
        if isinstance(axis, str) or (way.groups is None and len(axis or ()) > 1):
            state.append(f"axis={axis!r}".replace("'", '"'))
        if options.split:
            state.append(f"sequence=zerojax.{options.split!r}")
        if options.experts:
            module = "zerojax." * isinstance(options.experts, Experts)
            state.append(f"experts={module}{options.experts!r}")
        if options.precision is not None:
            state.append(f"precision=zerojax.{options.precision}")
        state += _as_python(options, StateOptions)
        package = "zerojax.nnx" if self.is_nnx else "zerojax"
        into = "state = zerojax.shard_train_state(make_state"
        into = f"model, optimizer = {package}.shard(make" if self.is_nnx else into
        step = [f'losses["{way.variant}"]' if way.variant else "loss_fn"]
        step += _as_python(options, TrainOptions)
        step += [f"accumulate={way.accumulate}"] * (way.accumulate > 1)
        step += [f"schedule={options.schedule}"] * (options.schedule != Schedule())
        lines.append(f"{', '.join([into, *state])})")
        return "\n".join([*lines, f"step = {package}.train_step({', '.join(step)})"])

    def to_dict(self) -> dict[str, object]:
        """Returns the compiled ways with their costs, and the Python of the best."""
        best = [self.python(one.way) for one in (self.best, self.best_quantized) if one]
        compiled = [
            {"way": dataclasses.asdict(one.way), "at_least": one.estimate, **one.case.to_dict()}
            for one in self.compiled
        ]
        return {"gpus": self.gpus, "compiled": compiled, "best": best}

    def table(self) -> Table:
        *few, most = map(str, sorted({one.way.accumulate for one in self.tried}))
        counts = " or ".join(filter(None, (", ".join(few), most)))
        cases = [one.case for one in self.compiled]
        title = titled(
            f"{self.gpus}, {human_bytes(self.gpu.usable)} usable of each",
            cases,
            f"{len(self.tried)} configurations, of {counts} microbatch{'es' * (counts != '1')}",
            f"{len(cases)} compiled, which may be the fastest",
        )
        notes, optional = [*unread(cases), *self._advice()], ("tokens/s", "MFU")
        return Table.of(CHOICE_COLUMNS, self.compiled, title=title, notes=notes, optional=optional)

    def _advice(self) -> Iterator[str]:
        best, lossy = self.best, self.best_quantized
        if best is lossy is None:
            least = human_bytes(min(one.peak for one in self.tried))
            yield f"Nothing fits. The least is about {least}: use more GPUs or a smaller batch."
        faster = "Faster" if best else "Fastest"
        for kind, one in (("Fastest with exact numbers", best), (f"{faster} quantized", lossy)):
            if one is not None:
                tokens, count = one.case.tokens_per_second, one.way.accumulate
                costs = [human_time(one.case.step_seconds)]
                costs += [] if tokens is None else [f"{tokens:,.0f} tokens/s"]
                costs += [f"{one.case.mfu:.1%} MFU", f"{count} microbatch{'es' * (count > 1)}"]
                yield f"\n{kind}, {', '.join(costs)}:"
                yield f"\n{self.python(one.way)}"
        for line in told_to_hosts(self.gpu, [one.case for one in (best, lossy) if one]):
            yield from ("", line)


def _as_python(options: WorkOptions, kind: type[Options]) -> list[str]:
    """Returns the arguments that a plan or a step takes from its user, as Python. What Python
    cannot read back has the name of its option."""
    names = {field.name for field in dataclasses.fields(kind)} - {*PLACED, *WORDED}
    changed = changed_options(options, WorkOptions()).items()
    texts = {name: repr(value) for name, value in changed if name in names and value != NNX_FIELDS}
    return [f"{name}={name if OBJECT.search(text) else text}" for name, text in texts.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceOptions(WorkOptions):
    """What `choose` keeps of the options of a plan and a step."""

    groups: None = dataclasses.field(default=None, init=False)
    offload: None = dataclasses.field(default=None, init=False)
    accumulate: int = dataclasses.field(default=1, init=False)
    schedule: Schedule = dataclasses.field(default=Schedule(), init=False)
    rng: PyTree = dataclasses.field(default=None, kw_only=False)
    gpus: str = dataclasses.field(metadata={"text": 'such as "64xH100".'})
    lossy: bool = option(
        True, "whether to look at quantized values, too, which change the numbers a little."
    )


@takes(ChoiceOptions)
def choose(
    loss_fn: LossFn | Mapping[str, LossFn],
    make_state: PyTree,
    batch: PyTree,
    options: ChoiceOptions,
) -> Choice:
    """Finds the fastest options that fit, for `shard_train_state` and `train_step`.

    Looks at stages, groups, hpZ, quantized weights and gradients, host memory, microbatches and
    their order, with the other options as you pass them. It compiles one step of each loss, from
    which it knows how long each takes at least, and then, best first, those that may be faster than
    the fastest so far. Print the result: it says which choice is fastest with exact numbers, which
    quantized, and the Python to paste.

    A loss that names an axis, as "data" too, cannot train with options that need an axis of hosts
    and one of their GPUs: pass `axis`. With `sequence` or `mesh`, no option needs these, unless
    `axis=("node", "gpu")` of the mesh. With `experts`, it also compiles a step that gathers these,
    without their axis where nothing else names it, and one where it has another size.

    Arguments:
        loss_fn, make_state, batch: as for `zerojax.forecast`; of several losses, such as a model
            with and without `jax.checkpoint`, one is chosen too. Of Flax nnx, a function that
            returns a model and its optimizer. The batch stays as it is, so more microbatches have
            fewer rows each.
        {options}

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
    if isinstance(loss_fn, Step) or is_of_nnx(loss_fn):
        raise TypeError(
            "You passed a step, which already has its options; choose looks for these. Pass the "
            "loss, with precision=, mutable= and tx= where the step has them; of Flax nnx also a "
            "function that returns model and optimizer. To --choose, return (loss_fn, make_state, "
            "batch)."
        )
    work = WorkOptions(**changed_options(options, WorkOptions()))
    work = Workload.of(loss_fn, make_state, batch, options.rng, options.gpus, work)
    is_nnx = work.options.mutable == NNX_FIELDS
    with warnings.catch_warnings():  # of ways that nobody has asked for
        warnings.filterwarnings("ignore", ".* puts nothing in host memory")
        return Choice(options.gpus, work.options, Search(work).run(options.lossy), is_nnx)


def _seconds(case: Case) -> float:
    """Returns the time of a step; of one that is unknown, more than any."""
    return math.inf if case.step_seconds is None else case.step_seconds


def _rank(case: Case) -> tuple[bool, float]:
    """Orders cases: those that fit first, the fastest before the others."""
    return not case.fits, _seconds(case)


class Search:
    """Ranks all ways by the time that they take at least, and compiles those that may be the
    fastest."""

    def __init__(self, work: Workload) -> None:
        self.work, self.usable, self.rates = work, work.gpu.usable, work.gpu.rates
        self.compiled: dict[WayToTrain, Case] = {}
        self.planned = functools.cache(lambda placed: self.of(placed).plan_at(placed.stage))
        mesh, options = work.mesh, work.options
        self.devices, self.share = mesh.size, work.share
        self.on_host = min(mesh.size, options.per_host)
        # Of the devices that share weights, those of a host.
        axes = self.plan_of(WayToTrain()).batch_axes
        along = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
        hosts = np.arange(mesh.size).reshape(mesh.devices.shape)[along] // self.on_host
        self.local, self.hosts = int(np.sum(hosts == 0)), len(np.unique(hosts))
        alone = options.mesh is None and options.axis is None and options.sequence is None
        self.levels = self.hosts > 1 and (alone or as_names(options.axis) == LEVELS)

    def run(self, lossy: bool) -> tuple[Tried, ...]:
        losses = list(self.work.losses)
        if self.levels:  # a loss that names one axis raises on two, before anything compiles
            self.trace(WayToTrain(losses[0], groups=HSDP))
        rows = next(x.shape[0] for x in jax.tree.leaves(self.work.batch) if x.shape)
        powers = (2**k for k in range(MOST_MICROBATCHES.bit_length()))
        counts = [
            count
            for count in powers
            if count == 1 or rows * self.share % (count * self.devices) == 0
        ]
        every = ways(losses, counts, self.levels, lossy)
        # On one device all stages are the same.
        every = (way for way in every if way.stage == 3 or self.devices > 1)
        for variant in losses:
            self.case(WayToTrain(variant))
        others = self.with_experts()
        best = self.fastest.instead
        every = [dataclasses.replace(way, instead=best) for way in every]
        every = dict.fromkeys([*every, *self.compiled, *others])
        ranked = sorted(map(self.estimated, every), key=lambda one: one.rank)
        self.compile_best([one for one in ranked if one.way.instead == best])
        return tuple(dataclasses.replace(one, case=self.compiled.get(one.way)) for one in ranked)

    @property
    def fastest(self) -> WayToTrain:
        """The fastest way so far that fits, or of all, if none does."""
        return min(self.compiled, key=lambda way: _rank(self.compiled[way]))

    @property
    def to_beat(self) -> float:
        """The time of the fastest way so far that fits."""
        case = self.compiled[self.fastest]
        return _seconds(case) if case.fits else math.inf

    def with_experts(self) -> list[WayToTrain]:
        """Returns the fastest way so far with experts gathered, and apart over other numbers of
        devices. Compiles that with the most devices and the gathered one, if they may be faster."""
        plan, variant = self.plan_of(WayToTrain()), self.fastest.variant
        if plan.experts is None:
            return []
        rows, axis = plan._splits.rows, plan.experts.axis
        rest = next(name for name in (*reversed(rows), DEFAULT_AXIS, GPU_AXIS) if name != axis)
        counts = [leaf.shape[leaf.experts] for leaf in plan.params if leaf.experts is not None]
        every = [*with_experts(plan.mesh.shape, rest, axis, math.gcd(*counts), self.on_host)]
        try:
            self.trace(WayToTrain(variant, instead=every[-1]))
        except (NameError, ValueError):  # the loss or overrides= name the axis, which then stays
            every[-1] = ("axis", rows), ("experts", None)
        others = [WayToTrain(variant, instead=one) for one in every]
        # Along n devices, 1 / n of the weights is gathered, and 1 - 1 / n of the rows travels,
        # whose bytes only a trace knows: the fewest are along many devices, or along none.
        for way in others[-2:]:
            may_be_faster = self.estimated(way).sent < FASTER * self.to_beat
            if may_be_faster and len(self.compiled) < MOST_COMPILED:
                self.case(way)
        return others

    def compile_best(self, ranked: Sequence[Tried]) -> None:
        """Compiles the best ways of each kind that fit by the plan, while they may be faster than
        the best so far."""
        fit = [one for one in ranked if one.peak <= ROUGHLY * self.usable]
        # To offload more is in vain where less of it fits.
        more = {one.way: dataclasses.replace(one.way, offload=one.way.offload[:-1]) for one in fit}
        in_vain = {way for way, less in more.items() if way.offload and less in more}
        plain = {"variant": "", "accumulate": 1, "order": MICROBATCHES}  # of all ways of a family
        for exact, most in ((True, EXACT_FAMILIES), (False, LOSSY_FAMILIES)):
            kind = [x for x in fit if x.way.is_exact == exact and x.way not in in_vain]
            families = grouped(kind, lambda one: dataclasses.replace(one.way, **plain))
            for family in itertools.islice(families.values(), most):
                peak = math.inf if family[0].estimate < FASTER * self.to_beat else 0
                for one in family:  # the next one needs less memory, until one fits
                    if one.peak < peak and len(self.compiled) < MOST_COMPILED:
                        peak = 0 if self.case(one.way).fits else 0.9 * one.peak

    def trace(self, way: WayToTrain) -> None:
        plan, work = self.plan_of(way), self.of(way)
        batch = aot.batch(work.batch, plan, batch_specs=work.options.batch_specs)
        rng = [] if work.rng is None else [aot.batch(work.rng, plan)]
        work.step(way.variant, plan)._without_options.trace(plan.abstract(), batch, *rng)

    def of(self, way: WayToTrain) -> Workload:
        return dataclasses.replace(self.work, options=way.on(self.work.options))

    def case(self, way: WayToTrain) -> Case:
        """Compiles a way, once."""
        if way not in self.compiled:
            with working(f"compiling {way}"):
                work = self.of(way)
                case = work.case(way.variant, way.stage, way.accumulate, work.options.schedule)
            self.compiled[way] = case
        return self.compiled[way]

    def plan_of(self, way: WayToTrain) -> Plan:
        placed = {name: getattr(way, name) for name in (*PLACED, "instead")}
        return self.planned(WayToTrain(**placed))

    def estimated(self, way: WayToTrain) -> Tried:
        """Returns the least that a way takes, by the step of its loss at stage 3 over all GPUs;
        where that is not compiled on its mesh, by the one on the user's."""
        usual = WayToTrain(way.variant, instead=way.instead)
        usual = usual if usual in self.compiled else WayToTrain(way.variant)
        first = self.case(usual)
        assert first.report is not None, "it was compiled here"
        if first.unread:
            raise ValueError(f"choose has no times to compare: {first.unread}")
        plan, at_stage_3 = self.plan_of(way), self.plan_of(usual)
        ours = [one for one in first.report.traffic if is_ours(one, at_stage_3)]
        totals = summed((one.kind, one.total_bytes) for one in ours)
        gathered = first.report.memory.gathered
        weights, grads = totals.get("all-gather", 0) / 2, totals.get("reduce-scatter", 0)
        whole, of_usual = (
            sum(leaf.bytes_at(leaf.update.over(()), layout.mesh) for leaf in layout.params)
            for layout in (plan, at_stage_3)
        )
        share = whole / of_usual
        inside, between = sent(way, share * weights, share * grads, whole)
        # A ring through all hosts leaves each of them by all of its network cards.
        between *= 1 / self.local if self.hosts > 1 else 0
        wires = max(inside / self.rates.between(self.local), between / self.rates.network)
        crossings, on_host = {PARAMS: 1 + 2 * way.rounds}, plan.host_bytes_per_device()
        copied = sum(crossings.get(kind, 1) * nbytes for kind, nbytes in on_host.items())
        compute = first.compute_seconds * (1 if way.is_exact else 1 + CODING)
        seconds = max(compute, wires, copied / self.rates.to_host(self.on_host))
        state, state_at_3 = (sum(one.bytes_per_device().values()) for one in (plan, at_stage_3))
        gradients = plan._gradient_bytes() if way.keeps_gradients else 0
        activations = first.peak - state_at_3 - at_stage_3._gradient_bytes() - gathered
        peak = state + gradients + gathered + activations / way.rounds
        peak += weights / self.local if way.regather == GPU_AXIS or way.groups == AMSP else 0
        return Tried(way, seconds, peak, wires)
