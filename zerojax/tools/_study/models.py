"""The models of a study: presets by name, or the user's losses with batches of any size."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from zerojax import _fingerprint, aot
from zerojax._plan import planner as _planner
from zerojax._plan.mesh import DEFAULT_AXIS
from zerojax._state import refusals as _refusals
from zerojax._step.step import train_step
from zerojax._types import PyTree
from zerojax.tools._forecast import presets as _presets
from zerojax.tools._forecast.forecast import Loss
from zerojax.tools._forecast.presets import Gpt
from zerojax.tools._forecast.steps import NnxStep, is_of_nnx, parts_of_nnx
from zerojax.tools._hlo.gpus import Gpu

OWN = "(loss_fn, make_state, batch), with a function batch(rows) that returns a global batch"
# A preset or its name; or a loss and make_state, or a step of nnx and what makes its model and
# optimizer, and a function of the rows of a global batch.
Given: TypeAlias = str | Gpt | tuple[Loss | NnxStep, Callable[[], PyTree], Callable[[int], PyTree]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as one kind of GPU computes it."""

    name: str
    loss: Loss
    make_state: Callable[[], PyTree]
    make_batch: Callable[[int], PyTree]
    remat: str = ""  # of a preset
    rng: PyTree = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a step of nnx

    def batch(self, rows: int) -> PyTree:
        """Returns the shapes of a global batch."""
        batch = self.make_batch(rows)
        _refusals.check_arrays(batch, "batch")
        found = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
        if (rows,) not in found:
            raise ValueError(
                f"the batch({rows}) of {self.name!r} has no array of {rows} rows. Let it return "
                "the global batch of so many rows, or its shapes."
            )
        return batch

    def digest(
        self,
        tx: optax.GradientTransformation | None,
        mutable: Sequence[str],
        axes: Sequence[str] = (DEFAULT_AXIS,),
    ) -> str:
        """Digests the step of one device: the model, its loss, its optimizer and their numbers."""
        one = np.array(jax.devices()[:1]).reshape((1,) * len(axes))
        mesh = Mesh(one, axes, axis_types=(AxisType.Auto,) * len(axes))
        plan = _planner.plan(self.make_state, stage=0, mesh=mesh, axis=axes, tx=tx)
        step = train_step(self.loss, plan=plan, tx=tx, mutable=mutable)
        args = [plan.abstract(), aot.batch(self.batch(1), plan)]
        args += [] if self.rng is None else [aot.batch(self.rng, plan)]
        program = _fingerprint.of_program(step.without_options.trace(*args).jaxpr)
        return hashlib.sha256(f"{_fingerprint.of_shapes(args)}\n{program}".encode()).hexdigest()


def given(models: str | Sequence[str] | Mapping[str, Given]) -> dict[str, Given]:
    """Returns the models by name, all of them known."""
    models = [models] if isinstance(models, str) else models
    named = dict(models) if isinstance(models, Mapping) else {name: name for name in models}
    if not named:
        raise ValueError("no models. Name one or several presets, or pass a dict of your own.")
    return {name: _checked(name, one) for name, one in named.items()}


def _checked(name: str, one: Given) -> Given:
    if isinstance(one, str):
        return _presets.preset(one)
    if isinstance(one, Gpt):
        return one
    if not isinstance(one, tuple) or len(one) != 3 or not all(map(callable, one)):
        raise ValueError(f"the model {name!r} is no preset, and not {OWN}.")
    return one


def model(name: str, one: Given, gpu: Gpu, remat: str) -> Model:
    """Returns a model that computes in the 16 bits of a GPU, if it is a preset."""
    if isinstance(one, tuple) and is_of_nnx(one[0]):
        loss, make_state, rng, options = parts_of_nnx(*one[:2], None)
        return Model(name, loss, make_state, one[2], rng=rng, options=options)
    if isinstance(one, tuple):
        return Model(name, *one)
    assert isinstance(one, Gpt), "`given` has looked up names"
    preset = _presets.on(one, gpu)
    loss = preset.losses([remat])[remat]
    return Model(name, loss, preset.make_state, preset.batch, remat)
