"""`study`: how models scale, from a forecast of each stage on each number of GPUs."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax import aot
from zerojax._progress import progress
from zerojax._step.step_options import MICROBATCHES
from zerojax.tools._forecast import cache as _cache
from zerojax.tools._forecast.forecast import Workload, axis_names, gpu_of, mesh_of, names_levels
from zerojax.tools._forecast.memory_table import STAGES
from zerojax.tools._hlo.gpus import Gpu, Rates
from zerojax.tools._study import models as _models, rows as _rows
from zerojax.tools._study.cell import LARGEST, Cell, Figures
from zerojax.tools._study.models import Given, Model
from zerojax.tools._study.result import Study
from zerojax.tools._study.stored import Stored

PLANNED = ("groups", "pad", "precision", "offload")
STEPPED = ("tx", "mutable", "regather", "update", "activations")
HOW = ("accumulate", "order")
OPTIONS = (*HOW, *PLANNED, *STEPPED, "axis")
DEFAULTS = {"accumulate": 1, "order": MICROBATCHES, "pad": True, "mutable": ()}


def study(
    models: str | Sequence[str] | Mapping[str, Given],
    *,
    gpus: str | Sequence[str],
    stages: int | Sequence[int] = (1, 2, 3),
    rows: int | str | Sequence[int | str] = LARGEST,
    out: str | os.PathLike[str] | None = None,
    remat: str = "full",
    rates: Rates | None = None,
    per_host: int = aot.PER_HOST,
    cache: bool = True,
    **options: Any,
) -> Study:
    """Forecasts models on several numbers of GPUs, at several stages, with several batches.

    Print the result, or `plot` it: how the throughput of each GPU changes with their number. With
    the "largest" rows, what a stage frees of a GPU's memory goes into its batch.

    Arguments:
        models: presets by name, or a dict of models of your own: a name for each, and `(loss_fn,
            make_state, batch)`, where `batch(rows)` returns a global batch of so many rows. A step
            of `zerojax.nnx.train_step` and the function that makes its model and optimizer stand in
            for the first two.
        gpus: such as "64xH100", one or several.
        stages: one or several.
        rows: of each GPU, one or several numbers, or "largest": as many as fit, all numbers up to
            16, and eight between two powers of two.
        out: a file of JSON, to which each result is written at once. A later call finds there what
            has been done, and adds what has not, or what it no longer matches.
        remat: what presets compute again in backward: "full", "dots" or "none"; or what they keep,
            such as "qkv+up".
        rates: of the GPU, if not those that zerojax knows; `zerojax.Rates`.
        per_host: GPUs of a host.
        cache: keep the programs that are compiled, as the command line does, in the user's cache.
        options: accumulate, order, groups, pad, precision, offload, regather, update, activations,
            mutable, tx and axis, as for `zerojax.forecast`, one of each.

    Example:
        >>> def make_state():
        ...     params = {"w": jnp.zeros((4, 512, 512))}
        ...     return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> def loss_fn(params, batch):
        ...     return jnp.mean(jax.lax.scan(lambda x, w: (x @ w, None), batch, params["w"])[0])
        >>> def batch(rows):
        ...     return jax.ShapeDtypeStruct((rows, 512), jnp.float32)
        >>> models = {"mine": (loss_fn, make_state, batch)}
        >>> study = zerojax.study(models, gpus=["8xH100", "16xH100"], stages=3, rows=256)
        >>> [(cell.gpus, cell.figures.fits) for cell in study.cells]
        [('8xH100', True), ('16xH100', True)]
    """
    models = _models.given(models)
    sizes, stages, rows = _each(gpus), _each(stages), _each(rows)
    _check(sizes, stages, rows, options, rates)
    run = _Run(models, remat, rates, per_host, options)
    asked = [run.asked(*way) for way in itertools.product(models, sizes, stages, rows)]
    stored = Stored(out)
    missing = [cell for cell in asked if stored.done(cell) is None]
    if missing:
        aot.check_packages()
    with _cache.kept(_cache.folder() if cache else None):
        for cell in progress(missing, lambda cell: f"compiling {cell}"):
            stored.put(run.made(cell))
    return Study(tuple(stored.found(cell) for cell in asked))


def _each(given: Any) -> list[Any]:
    """Returns one or several as a list, each once; a text is one."""
    return [given] if isinstance(given, int | str) else list(dict.fromkeys(given))


def _check(
    gpus: Sequence[str],
    stages: Sequence[int],
    rows: Sequence[int | str],
    options: Mapping[str, Any],
    rates: Rates | None,
) -> None:
    if not (gpus and stages and rows):
        raise ValueError(f"nothing to try: gpus={gpus}, stages={stages}, rows={rows}.")
    kinds = {gpu_of(size, rates).name for size in gpus}
    if rates is not None and len(kinds) > 1:
        raise ValueError(
            f"these are the rates of one GPU, and gpus= names {', '.join(sorted(kinds))}. Make a "
            "study of each."
        )
    if odd := [stage for stage in stages if stage not in STAGES]:
        raise ValueError(f"stages={odd[0]!r} is none of {STAGES}.")
    if odd := [n for n in rows if n != LARGEST and (not isinstance(n, int) or n < 1)]:
        raise ValueError(f"rows={odd[0]!r} must be positive, or {LARGEST!r}: rows of each GPU.")
    count = options.get("accumulate", 1)
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"accumulate={count!r} must be one positive number of microbatches.")
    if odd := [name for name in options if name not in OPTIONS]:
        raise TypeError(f"study() takes no {odd[0]}=. Beside its own: {', '.join(OPTIONS)}.")


@dataclasses.dataclass
class _Run:
    """Makes the cells of a study, each number of rows once."""

    models: Mapping[str, Given]
    remat: str
    rates: Rates | None
    per_host: int
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self.compiled: dict[tuple[str, str, int, int], Figures] = {}
        self.model = functools.cache(self._model)

    def _model(self, name: str, kind: Gpu) -> tuple[Model, str]:
        """Returns a model as a kind of GPU computes it, and its digest."""
        found = _models.model(name, self.models[name], kind, self.remat)
        given = self.given(found)
        names = axis_names(given.get("axis"), names_levels(given))
        return found, found.digest(given.get("tx"), given.get("mutable", ()), names)

    def given(self, model: Model) -> dict[str, Any]:
        """Returns the options of a study's steps; those of a model's own give way.

        The fields that a loss updates are its own: those of another would not be there.
        """
        own = {name: value for name, value in model.options.items() if name == "mutable"}
        return model.options | self.options | own

    def asked(self, name: str, gpus: str, stage: int, rows: int | str) -> Cell:
        gpu = gpu_of(gpus, self.rates)
        model, program = self.model(name, gpu)
        flags = os.environ.get("XLA_FLAGS", "")
        parts = [program, repr(gpu), self.per_host, flags, _cache.versions()]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return Cell(name, gpus, stage, rows, self._settings(model, gpu), key)

    def _settings(self, model: Model, gpu: Gpu) -> str:
        given = self.given(model)
        named = {name: given.get(name) for name in (*OPTIONS, *given) if name != "tx"}
        named |= {"per_host": self.per_host}
        usual = DEFAULTS | {"per_host": aot.PER_HOST}
        usual["mutable"] = model.options.get("mutable", ())
        shown = [f"{k}={v!r}" for k, v in named.items() if v not in (None, usual.get(k))]
        speed = [f"network cards of {gpu.rates.network / 1e9:g} GB/s"] if gpu.given_rates else []
        return ", ".join([*([f"remat {model.remat}"] if model.remat else []), *shown, *speed])

    def made(self, cell: Cell) -> Cell:
        """Returns the cell with its figures, or with the reason why there are none."""
        figures = functools.partial(self.figures, cell.model, cell.gpus, cell.stage)
        try:
            if cell.asked == LARGEST:
                model, _ = self.model(cell.model, gpu_of(cell.gpus, self.rates))
                found = _rows.largest(figures, self.given(model).get("accumulate", 1))
            else:
                found = figures(int(cell.asked))
        except Exception as error:  # of one of many: the others go on
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            text = " ".join(str(error).split())[:400]
            return dataclasses.replace(cell, failed=kind + text)
        return dataclasses.replace(cell, figures=found)

    def figures(self, name: str, gpus: str, stage: int, rows: int) -> Figures:
        """Compiles a step with so many rows on each GPU, once."""
        key = name, gpus, stage, rows
        if key not in self.compiled:
            gpu = gpu_of(gpus, self.rates)
            model, _ = self.model(name, gpu)
            given = self.given(model)
            mesh = mesh_of(gpus, self.per_host, names_levels(given), given.get("axis"))
            planned = {"mesh": mesh} | {k: v for k, v in given.items() if k in PLANNED}
            options = {"tx": None, "mutable": ()}
            options |= {k: v for k, v in given.items() if k not in ("axis", *PLANNED, *HOW)}
            batch = model.batch(rows * mesh.size)
            work = Workload(model.make_state, batch, model.rng, None, gpu, planned, options)
            how = given.get("accumulate", 1), given.get("order", MICROBATCHES)
            self.compiled[key] = Figures.of(work.case("", model.loss, stage, *how), rows, gpu)
        return self.compiled[key]
