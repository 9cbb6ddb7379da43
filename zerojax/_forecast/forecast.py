"""`forecast`: what a training step will need and cost on GPUs that nobody has rented yet."""

import contextlib
import dataclasses
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import aot
from zerojax._audit import audit as _audit
from zerojax._audit.report import Report
from zerojax._forecast import plot as _plot
from zerojax._forecast.case import Case
from zerojax._forecast.mfu import needed_flops
from zerojax._hlo import gpus as _gpus
from zerojax._hlo.gpus import Gpu, Rates
from zerojax._plan import planner as _planner
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision
from zerojax._state import refusals as _refusals
from zerojax._state.state import PARAMS
from zerojax._step.step import Step, train_step
from zerojax._text import html_table, human_bytes, human_time, text_table


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast:
    """Made by `zerojax.forecast`; print or `plot` it. `best` is the fastest that fits, or None."""

    gpus: str
    gpu: Gpu
    cases: tuple[Case, ...]

    @property
    def best(self) -> Case | None:
        return min(
            (case for case in self.cases if case.fits), key=lambda c: c.step_seconds, default=None
        )

    def to_dict(self) -> dict[str, Any]:
        cases = [
            {f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name != "report"}
            | {"wire_bytes": case.wire_bytes}
            for case in self.cases
        ]
        best = None if self.best is None else self.cases.index(self.best)
        return {
            "gpus": self.gpus,
            "usable_bytes": self.gpu.usable,
            "cases": cases,
            "best": best,
        }

    def plot(self, path: str | None = None) -> Any:
        """Memory and step time of each case, as a matplotlib figure; saved to `path`."""
        return _plot.plot(self.cases, self.gpu.usable, self.gpus, path)

    def __str__(self) -> str:
        right = frozenset({0, 1, *range(3, 9), *range(10, 17)})
        return "\n".join([self._title(), text_table(self._rows(), right), self._advice()])

    def _repr_html_(self) -> str:
        return html_table([self._title()], self._rows(), below=[self._advice()])

    def _title(self) -> str:
        usable = human_bytes(self.gpu.usable)
        return (
            f"{self.gpus}, {usable} usable of {human_bytes(self.gpu.memory)} each; bytes per GPU, "
            "times modelled; grads and activations when fullest; MFU of the peak in 16 bits"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        header = (
            "stage",
            "accumulate",
            "remat",
            "params",
            "optimizer",
            "grads",
            "activations",
            "formula",
            "peak",
            "fits",
            "spare",
            "sent, host",
            "sent, network",
            "step",
            "exposed",
            "tokens/s",
            "MFU",
        )
        return [header, *(_row(case) for case in self.cases)]

    __repr__ = __str__

    def _advice(self) -> str:
        best = self.best
        if best is None:
            least = min(self.cases, key=lambda case: case.peak)
            return (
                f"Nothing fits. The least is {human_bytes(least.peak)} at stage {least.stage}: use "
                "more GPUs, more microbatches (accumulate), or more rematerialization."
            )
        how = f"stage={best.stage}" + (f", accumulate={best.accumulate}" * (best.accumulate > 1))
        remat = f", remat {best.variant!r}" if best.variant else ""
        return (
            f"Fastest that fits: {how}{remat}, {human_time(best.step_seconds)} a step, "
            f"{human_bytes(best.spare)} to spare."
        )


def forecast(
    loss_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]] | Step,
    make_state: Callable[[], Any],
    batch: Any,
    *,
    gpus: str,
    stages: Sequence[int] | int = (0, 1, 2, 3),
    accumulate: Sequence[int] | int = 1,
    precision: Precision | None = None,
    mutable: Sequence[str] = (),
    tx: Any = None,
    rng: Any = None,
    tokens: int | None = None,
    rates: Rates | None = None,
    per_host: int = aot.PER_HOST,
) -> Forecast:
    """Compiles a training step for GPUs that are not there, at each stage, and tells what it costs.

    Arguments:
        loss_fn: as for `zerojax.train_step`, or a dict of several: a model with and without
            `jax.checkpoint`, say. Or a step of `zerojax.train_step`, with all that it was made of.
        make_state: a function without arguments that makes the state, or the state's shapes.
        batch: the global batch of a step, arrays or `jax.ShapeDtypeStruct`s.
        gpus: such as "64xH100".
        stages, accumulate: what to try.
        precision, mutable, tx: as for `zerojax.shard_train_state` and `zerojax.train_step`.
        rng: a key, if the loss takes one.
        tokens: in a step, if not the size of the batch's first matrix of integers.
        rates: of the GPU, if not those that zerojax knows; `zerojax.Rates`.
        per_host: GPUs of a host.

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
    count, gpu = _gpus.parse_count(gpus)
    if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
        raise ValueError(f"tokens={tokens!r} must be positive: how many a step trains on.")
    if not jax.tree.leaves(batch):
        raise ValueError("the batch has no arrays. Pass the global batch of one step.")
    _refusals.check_arrays(batch, "batch")
    if not any(map(np.ndim, jax.tree.leaves(batch))):
        raise ValueError("the batch has no rows. Pass the global batch of one step, or its shapes.")
    if rates is not None:
        if not isinstance(rates, Rates):
            raise TypeError(f"rates={rates!r} are no rates. Pass zerojax.Rates(...).")
        gpu = dataclasses.replace(gpu, given_rates=rates)
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"": loss_fn}
    options: dict[str, Any] = {}
    if isinstance(loss_fn, Step):
        recipe = loss_fn.recipe
        losses, mutable, tx = {"": recipe.loss_fn}, recipe.mutable, tx or recipe.tx
        stages = stages if recipe.stage is None else (recipe.stage,)
        accumulate, precision = recipe.options.accumulate, precision or recipe.options.precision
        names = ("regather", "prefetch", "batch_specs")
        options = {name: getattr(recipe.options, name) for name in names}
    stages = [stages] if isinstance(stages, int) else stages
    microbatches = [accumulate] if isinstance(accumulate, int) else list(accumulate)
    each_once = dict.fromkeys(stages), dict.fromkeys(microbatches)  # nothing compiles twice
    choices = list(itertools.product(losses.items(), *each_once))
    if not choices:
        raise ValueError(
            f"nothing to try: stages={list(stages)}, accumulate={microbatches}, "
            f"{len(losses)} losses. Name at least one of each."
        )
    mesh = aot.mesh(gpus, per_host=per_host)
    cases = []
    for (variant, loss), stage, each in progress(
        choices, lambda choice: f"compiling stage {choice[1]} for {gpus}"
    ):
        plan = _planner.plan(make_state, stage=stage, mesh=mesh, precision=precision, tx=tx)
        step = train_step(loss, accumulate=each, mutable=mutable, plan=plan, tx=tx, **options)
        shapes = aot.batch(batch, plan, batch_specs=options.get("batch_specs"))
        key = aot.batch(rng, plan)
        started = time.perf_counter()
        report = _audit.audit(
            step,
            plan.abstract(),
            shapes,
            key,
            plan=plan,
            gpu=gpu,
            per_host=per_host,
            accumulate=each,
        )
        seconds = time.perf_counter() - started
        flops = needed_flops(loss, plan, batch, rng, mutable) / count
        cases.append(_case(report, plan, each, variant, batch, tokens, flops, seconds))
    return Forecast(gpus, gpu, tuple(cases))


def _case(
    report: Report,
    plan: Plan,
    accumulate: int,
    variant: str,
    batch: Any,
    tokens: int | None,
    flops: float,
    seconds: float,
) -> Case:
    memory, gpu, replay = report.memory, report.gpu, report.replay
    assert gpu is not None
    network = sum(t.total_bytes for t in report.traffic if t.on_host < t.group)
    leaves = jax.tree.leaves(batch)
    count = _tokens(leaves) if tokens is None else tokens
    return Case(
        stage=plan.stage,
        accumulate=accumulate,
        variant=variant,
        parameters=memory.parameters,
        optimizer=memory.optimizer,
        gradients=memory.gradients,
        activations=memory.activations + memory.gathered,
        formula=_formula(plan),
        peak=memory.peak,
        fits=memory.peak <= gpu.usable,
        spare=gpu.usable - memory.peak,
        link_bytes=report.wire_bytes - network,
        network_bytes=network,
        compute_seconds=replay.compute,
        exposed_seconds=replay.exposed,
        step_seconds=replay.step,
        examples_per_second=next(x.shape[0] for x in leaves if x.shape) / replay.step,
        tokens_per_second=None if count is None else count / replay.step,
        mfu=flops / (replay.step * gpu.flops),
        compile_seconds=seconds,
        report=report,
    )


def _formula(plan: Plan) -> int:
    """What lives between backward and update: the state, and gradients in parameters' dtypes."""
    cut = plan.shard_shardings if plan.sharded["grads"] else plan.shardings
    grads = (
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(plan.leaves, cut, strict=True)
        if leaf.kind == PARAMS
    )
    return sum(plan.bytes_per_device().values()) + sum(grads)


def _tokens(leaves: list[Any]) -> int | None:
    integers = (
        x.size for x in leaves if len(x.shape) == 2 and jnp.issubdtype(x.dtype, jnp.integer)
    )
    return next(integers, None)


def _row(case: Case) -> tuple[str, ...]:
    tokens = case.tokens_per_second
    return (
        str(case.stage),
        str(case.accumulate),
        case.variant or "-",
        *map(human_bytes, (case.parameters, case.optimizer, case.gradients, case.activations)),
        human_bytes(case.formula),
        human_bytes(case.peak),
        "yes" if case.fits else "no",
        human_bytes(case.spare),
        human_bytes(case.link_bytes),
        human_bytes(case.network_bytes),
        human_time(case.step_seconds),
        human_time(case.exposed_seconds),
        "-" if tokens is None else f"{tokens:,.0f}",
        f"{case.mfu:.1%}",
    )


T = TypeVar("T")


PATIENCE = 1.0  # seconds that need no explanation


WIPE = "\r\x1b[K"


def progress(items: Sequence[T], doing: Callable[[T], str]) -> Iterator[T]:
    """The items, each with a line that says what is done to it, how many there are, and how long
    the rest may take."""
    started = time.monotonic()
    for number, item in enumerate(items, start=1):
        left = (time.monotonic() - started) / max(number - 1, 1) * (len(items) - number + 1)
        rest = f", about {left:.0f} s left" if number > 1 else ""
        with working(doing(item) + (f" ({number}/{len(items)}{rest})" if len(items) > 1 else "")):
            yield item


@contextlib.contextmanager
def working(doing: str) -> Iterator[None]:
    """A line that counts the seconds of what is done inside, where it takes more than one."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    terminal = os.dup(2)  # the compiler's standard error goes elsewhere meanwhile
    counter = threading.Thread(target=_count, args=(doing, terminal, done), daemon=True)
    counter.start()
    try:
        yield
    finally:
        done.set()
        counter.join()
        os.close(terminal)


def _count(doing: str, terminal: int, done: threading.Event) -> None:
    started, shown = time.monotonic(), False
    while not done.wait(PATIENCE):
        line = f"{WIPE}{doing} ... {time.monotonic() - started:.0f} s"
        os.write(terminal, line.encode())
        shown = True
    if shown:
        os.write(terminal, WIPE.encode())
