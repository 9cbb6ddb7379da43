"""`choose`: the fastest way to train on some GPUs, ranked by a formula and then compiled."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import Mesh

from zerojax import _compat, aot
from zerojax._kernel.jaxprs import nbytes
from zerojax._plan import planner as _planner
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision
from zerojax._progress import working
from zerojax._step.step import Step, train_step
from zerojax._types import PyTree
from zerojax.tools._choose import ways as _ways
from zerojax.tools._choose.choice import FASTER, Choice, Tried
from zerojax.tools._choose.ways import Facts, Way
from zerojax.tools._forecast.forecast import Loss, Workload, check, gpu_of, mesh_of
from zerojax.tools._forecast.result import Case
from zerojax.tools._forecast.steps import NnxStep, check_one, is_of_nnx, parts_of_nnx
from zerojax.tools._hlo.gpus import Rates

MOST_MICROBATCHES = 16
KEPT = ("precision", "mutable", "tx")  # of what a step of nnx was made with
EXACT, LOSSY = 4, 2  # how many ways of each kind are compiled
SLOWER = 1.07  # than the best so far, by the formula: what may be faster after all
MOST_COMPILED = 9
SETTING = 1e-3  # of a step's time: what a setting must gain
ROUGHLY = 1.1  # the formula's error: what needs more than the GPU has by it is not compiled


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

    Ranks stages, groups, hpZ, codes, host memory, microbatches and their order by a formula, from
    one compiled step of each loss; then compiles the best of them. Print the result: it says which
    way is fastest with exact numbers, which with codes, and the Python to paste.

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
        >>> choice = zerojax.choose(loss_fn, make_state, batch, gpus="8xH100")
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
    options, is_nnx = {"tx": tx, "mutable": mutable}, is_of_nnx(loss_fn)
    if is_nnx:
        loss_fn, make_state, rng, made = parts_of_nnx(loss_fn, make_state, rng)
        _check_open(made)
        own = made.pop("precision", None)
        precision = own if precision is None else precision
        options |= made if tx is None else made | {"tx": tx}
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"": loss_fn}
    given = dict(make_state=make_state, batch=batch, rng=rng, tokens=tokens, gpu=gpu)
    search = _Search(gpus, per_host, losses, precision, given, options, axis, is_nnx)
    return search.run(lossy)


def _check_open(made: Mapping[str, Any]) -> None:
    """Raises where a step of nnx has what is to be found, or what the Python would not have."""
    if named := [f"{name}=..." for name in made if name not in KEPT]:
        rows = " choose splits batches along their first dimension." * ("batch_specs" in made)
        raise ValueError(
            "choose takes a step of nnx with its loss and precision= alone, and this one is "
            f"train_step(loss_fn, {', '.join(named)}).{rows} Leave that out, and add what choose "
            "does not find to the step that it prints."
        )


@dataclasses.dataclass
class _Search:
    gpus: str
    per_host: int
    losses: Mapping[str, Loss]
    precision: Precision | None
    given: dict[str, Any]  # of a `Workload`
    options: dict[str, Any]
    axis: str | None = None
    is_nnx: bool = False

    def __post_init__(self) -> None:
        self.usable = self.given["gpu"].usable
        self.plans: dict[tuple, Plan] = {}
        self.compiled: dict[Way, Case] = {}

    def run(self, lossy: bool) -> Choice:
        flat = self.mesh(levels=False)
        local = min(flat.size, self.per_host)
        facts = self.facts(flat.size, local)
        levels = flat.size > local and self.axis is None
        if levels:  # what one loss calls one axis, no mesh of two has: it says so before a compile
            self.traced(next(iter(self.losses)), Way(groups=_ways.HSDP))
        every = _ways.ways(list(self.losses), self.counts(flat.size), levels, lossy)
        if flat.size == 1:  # where all stages are one
            every = (way for way in every if way.stage == 3)
        tried = [self.estimated(way, facts) for way in every]
        self.compile_best(sorted(tried, key=_rank))
        made = self.gpus, self.given["gpu"], self.precision, flat.size, local
        return Choice(*made, tuple(tried), self.compiled, self.is_nnx, self.axis)

    def mesh(self, levels: bool) -> Mesh:
        return mesh_of(self.gpus, self.per_host, levels, self.axis)

    def counts(self, devices: int) -> list[int]:
        """Returns the numbers of microbatches that the batch divides into."""
        rows = next(x.shape[0] for x in jax.tree.leaves(self.given["batch"]) if x.shape)
        powers = (2**k for k in range(MOST_MICROBATCHES.bit_length()))
        return [count for count in powers if count == 1 or rows % (count * devices) == 0]

    def compile_best(self, ranked: Sequence[Tried]) -> None:
        """Compiles the best ways of each kind that fit by the formula, while it says that they may
        be faster than the best so far."""
        fit = [one for one in ranked if one.peak <= ROUGHLY * self.usable]
        ways = {one.way for one in fit}
        # Nothing goes to the host that need not.
        fit = [one for one in fit if not one.way.offload or one.way.with_less_offload not in ways]
        for exact, most, within in ((True, EXACT, SLOWER), (False, LOSSY, FASTER)):
            # Of those that differ only in microbatches and loss, the formula's best.
            families: dict[tuple, list[Tried]] = {}
            for one in fit:
                if one.way.is_exact == exact:
                    families.setdefault(_family(one.way), []).append(one)
            for family in itertools.islice(families.values(), most):
                if family[0].estimate < within * self.fastest():
                    self._compile_family(family)

    def fastest(self) -> float:
        """Returns the least time of what is compiled and fits."""
        return min((c.step_seconds for c in self.compiled.values() if c.fits), default=math.inf)

    def _compile_family(self, family: Sequence[Tried]) -> None:
        """Compiles the best of a family, or the next one with less memory until one fits."""
        peak = math.inf
        for one in family:
            if one.peak < peak and len(self.compiled) < MOST_COMPILED:
                if self.case(one.way).fits:
                    return
                peak = 0.9 * one.peak

    # -- one way

    def case(self, way: Way) -> Case:
        """Compiles a way, once."""
        if way not in self.compiled:
            mesh = self.mesh(way.names_levels)
            placed = {k: v for k, v in way.placed().items() if k != "stage"}
            planned = {"mesh": mesh, "precision": way.precision(self.precision)} | placed
            options = self.options | {"regather": way.regather}
            work = Workload(**self.given, planned=planned, options=options)
            with working(f"compiling {way}"):
                self.compiled[way] = work.case(
                    way.variant, self.losses[way.variant], way.stage, way.accumulate, way.order
                )
        return self.compiled[way]

    def plan(self, way: Way) -> Plan:
        """Returns the plan of a way, made once for all that place the state so."""
        key = way.placement
        if key not in self.plans:
            mesh = self.mesh(way.groups is not None)
            placed = {"mesh": mesh, "axis": mesh.axis_names, "precision": self.precision}
            placed |= way.placed() | {"tx": self.options["tx"]}
            self.plans[key] = _planner.plan(self.given["make_state"], **placed)
        return self.plans[key]

    def estimated(self, way: Way, facts: Facts) -> Tried:
        plan = self.plan(way)
        seconds = facts.seconds(way, plan.host_bytes_per_device())
        return Tried(way, seconds, facts.peak(way, _state_bytes(plan, way.keeps_gradients)))

    def traced(self, variant: str, way: Way) -> Jaxpr:
        plan = self.plan(way)
        step = train_step(self.losses[variant], plan=plan, **self.options)
        arguments = aot.batch(self.given["batch"], plan), aot.batch(self.given["rng"], plan)
        arguments = [one for one in arguments if one is not None]
        return step.without_options.trace(plan.abstract(), *arguments).jaxpr.jaxpr

    def facts(self, size: int, local: int) -> Facts:
        """Compiles a step of each loss at stage 3, and returns what it tells."""
        cases = {name: self.case(Way(name)) for name in self.losses}
        kept = {name: stacked_bytes(self.traced(name, Way())) for name in self.losses}
        first = next(iter(cases.values())).report
        plan = self.plan(Way())
        known = _state_bytes(plan) + first.memory.gathered
        return Facts(
            rates=self.given["gpu"].rates,
            devices=size,
            local=local,
            parameters=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in plan.params),
            compute={name: case.compute_seconds for name, case in cases.items()},
            kept=kept,
            workspace={name: case.peak - known - kept[name] for name, case in cases.items()},
            weights={
                name: case.report.totals.get("all-gather", 0) / 2 for name, case in cases.items()
            },
            gathered=first.memory.gathered,
            gradients=first.totals.get("reduce-scatter", 0),
        )


def _state_bytes(plan: Plan, with_gradients: bool = True) -> int:
    """Returns what a device holds of the state, by the plan."""
    gradients = plan.gradient_bytes() if with_gradients else 0
    return sum(plan.bytes_per_device().values()) + gradients


def _rank(one: Tried) -> float:
    """Orders ways by their time; of two that take as long, the one with fewer settings is first."""
    return one.estimate * (1 + SETTING * len(one.way.placed() | one.way.stepped()))


def _family(way: Way) -> tuple:
    return way.placement, way.regather, way.gather, way.reduce


def stacked_bytes(jaxpr: Jaxpr) -> int:
    """Returns the bytes on the device of what loops stack up, such as what backward needs."""
    total = 0
    for eqn in jaxpr.eqns:
        total += sum(map(stacked_bytes, _compat.inner_jaxprs(eqn))) * _trips(eqn)
        if eqn.primitive.name == "scan":
            _, num_carry = _compat.scan_counts(eqn.params)
            total += nbytes(v for v in eqn.outvars[num_carry:] if not _compat.rests_on_host(v))
    return total


def _trips(eqn: JaxprEqn) -> int:
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1
