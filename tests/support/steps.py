"""The table of steps that tests read: each is placed, traced, compiled and run once.

    python -m tests.support.steps            # the rows
    python -m tests.support.steps groups     # one of them: its audit, its jaxpr, what XLA compiles

A row makes what a test asks it for, and keeps it. Another worker of pytest-xdist traces a row
again, and has its program from JAX's cache: see `tests/conftest.py`.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import zerojax
from tests.step import tensor
from tests.support import audits  # before JAX, which it has make 8 devices
from tests.support.models import Model, convnet, gpt, mlp
from tests.support.reference import make_state, split_aux
from tests.support.schedules import scheduled

BOTH = zerojax.Offload(params=True, min_bytes=0)
BF16 = zerojax.Precision(compute="bfloat16")
ROWS = 768  # of a batch: 2 to 6 devices and 4 microbatches divide them
VOCAB = 4096


def layers() -> Model:
    """A table of embeddings and a stack of layers, each with a norm."""
    draw = np.random.default_rng(0)
    params = {
        "layers": {
            "w": draw.normal(size=(audits.LAYERS, audits.DIM, audits.DIM)).astype("f") / 16,
            "norm": np.ones((audits.LAYERS, audits.DIM), "f"),
        },
        "embed": draw.normal(size=(VOCAB, audits.DIM)).astype("f"),
    }
    tokens = draw.integers(0, VOCAB, ROWS).astype("int32")
    return Model(params, functools.partial(audits.loss, dtype="float32"), tokens)


MODELS = {
    "layers": layers,
    "gpt": lambda: gpt(remat=True),
    "mlp": lambda: mlp(remat=True),
    "convnet": lambda: convnet(remat=True, axis_name="data"),  # norms of the whole batch
    "tensor": lambda: Model(tensor.make_state().params, tensor.scanned, rows(tensor.DIM)),
}


def rows(width: int) -> Any:
    """So many for each of two devices that a layer's input is not too small to travel."""
    return np.random.default_rng(0).normal(size=(2 * ROWS, width)).astype("f")


@functools.cache
def model_and_state(name: str) -> tuple[Model, Any]:
    """A model and its state, made by one program; in numpy, which JAX shards without another."""
    models = []

    @jax.jit
    def make():
        models.append(MODELS[name]())
        state = make_state(models[0], optax.adamw(1e-3, eps=1e-4))
        return state, models[0].batch

    state, batch = jax.device_get(make())
    parts = {"params": state.params, "batch": batch}
    parts["fields"] = {field: getattr(state, field) for field in models[0].fields}
    return dataclasses.replace(models[0], **parts), state


@functools.cache
def on_one_device(name: str) -> tuple[Any, float, float]:
    """The new state, the loss and the norm of the gradients, by plain JAX and optax."""
    model, state = model_and_state(name)
    losses = [model.loss]
    if name == "convnet":  # without the axis; traced, as its parameters are not needed
        jax.eval_shape(lambda: losses.append(convnet(remat=True).loss))

    @jax.jit
    def step(state, batch):
        loss = lambda params: split_aux(losses[-1](params, batch, **fields))
        fields = {field: getattr(state, field) for field in model.fields}
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        new = state.apply_gradients(grads=grads, **{field: aux[field] for field in fields})
        return new, value, optax.tree.norm(grads)

    return jax.device_get(step(state, model.batch))


class Result(NamedTuple):
    before: Any  # the state that the step was called with, donated or not
    state: Any
    metrics: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A step and what it is made of. `placed` is given to `zerojax.shard_train_state`, `options`
    to `zerojax.train_step`."""

    model: str
    mesh_of: Mapping[str, int] | str  # the sizes of its axes; or GPUs to compile for
    placed: Mapping[str, Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_eval: bool = False
    loss: Callable[..., Any] | None = None  # which gives the numbers of the model's own

    @functools.cached_property
    def mesh(self) -> Mesh:
        if isinstance(self.mesh_of, str):
            return zerojax.aot.mesh(self.mesh_of)
        sizes = tuple(self.mesh_of.values())
        devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
        return Mesh(devices, tuple(self.mesh_of), axis_types=(AxisType.Auto,) * len(sizes))

    @functools.cached_property
    def plan(self) -> zerojax.Plan:
        return zerojax.plan(model_and_state(self.model)[1], mesh=self.mesh, **self.placed)

    @functools.cached_property
    def state(self) -> Any:
        """The placed state; of GPUs that are not there, its shapes."""
        if isinstance(self.mesh_of, str):
            return self.plan.abstract()
        return self.fresh()

    def fresh(self) -> Any:
        """Another placed state, which a step may be given."""
        return self.plan.place(model_and_state(self.model)[1])

    @functools.cached_property
    def args(self) -> tuple[Any, ...]:
        """What the step is called with after the state."""
        args = (model_and_state(self.model)[0].batch,)
        return zerojax.aot.batch(args, self.plan) if isinstance(self.mesh_of, str) else args

    @functools.cached_property
    def step(self) -> Any:
        model, _ = model_and_state(self.model)
        loss = self.loss or model.loss
        if self.is_eval:
            return zerojax.eval_step(loss)
        return zerojax.train_step(loss, mutable=tuple(model.fields), **scheduled(self.options))

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        return self.step.trace(self.state, *self.args)

    @functools.cached_property
    def jaxpr(self) -> Any:
        return self.traced.jaxpr.jaxpr

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        return self.traced.lower()

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        return self.lowered.compile()

    @functools.cached_property
    def text(self) -> str:
        return self.compiled.as_text()

    @functools.cached_property
    def report(self) -> zerojax.tools.Report:
        return zerojax.audit(self.step, self.state, *self.args)

    @functools.cached_property
    def result(self) -> Result:
        """One call of the step, on a state of its own."""
        before = self.fresh()
        after = jax.block_until_ready(self.step(before, *self.args))
        return Result(before, *((before, after) if self.is_eval else after))

    @functools.cached_property
    def reference(self) -> tuple[Any, float, float]:
        return on_one_device(self.model)


FOUR, SIX, NODES = {"data": 4}, {"node": 2, "gpu": 3}, {"node": 2, "gpu": 2}
LEVELS = ("node", "gpu")
SPECS = {f"params/{name}": spec for name, spec in tensor.SPECS.items()}
TABLE = {
    "one_device": Row("layers", {"data": 1}, {"stage": 3}),
    **{f"stage{stage}": Row("gpt", FOUR, {"stage": stage}) for stage in (0, 1, 2, 3)},
    "ahead": Row("gpt", FOUR, {"stage": 3}, {"accumulate": 2, "prefetch": 1}),
    # Layers one after another, in no loop.
    "in_line": Row("mlp", FOUR, {"stage": 3}),
    "fields": Row("convnet", FOUR, {"stage": 3}),
    # 3 devices divide no dimension.
    "padded2": Row("layers", {"data": 3}, {"stage": 2}),
    "padded3": Row("layers", {"data": 3}, {"stage": 3}, {"prefetch": 1}),
    "microbatches1": Row("layers", FOUR, {"stage": 1}, {"accumulate": 2}),
    "microbatches3": Row("layers", FOUR, {"stage": 3}, {"accumulate": 4, "prefetch": 0}),
    "bfloat16": Row(
        "layers", FOUR, {"stage": 3, "precision": BF16}, {"update": "backward", "prefetch": 1}
    ),
    # Parameters are sharded over less than the optimizer state is, and padded.
    "groups": Row(
        "layers", SIX, {"groups": {"params": "gpu", "grads": "gpu", "opt_state": LEVELS}}
    ),
    "regather": Row("layers", NODES, {"axis": LEVELS}, {"regather": "gpu", "prefetch": 1}),
    "offload": Row(
        "layers", FOUR, {"stage": 3, "offload": BOTH}, {"activations": "host", "prefetch": 1}
    ),
    "tensor": Row(
        "tensor",
        {"data": 2, "tensor": 2},
        {"stage": 3, "axis": "data", "overrides": SPECS},
        {"activations": "tensor"},
    ),
    "not_donated": Row("layers", FOUR, {"stage": 2}, {"donate": False}),
    "evaluation": Row("layers", FOUR, {"stage": 3}, is_eval=True),
}
# Those of tests marked `gpu_code`: they have no result.
GPUS = {
    f"{gpus}-stage{stage}": Row("layers", gpus, {"stage": stage, "precision": BF16})
    for gpus, stage in [("8xH100", 1), ("8xH100", 2), ("8xH100", 3), ("6xH100", 3), ("16xH100", 3)]
}


def row(name: str) -> Row:
    return (TABLE | GPUS)[name]


if __name__ == "__main__":
    if unknown := [name for name in sys.argv[1:] if name not in TABLE | GPUS]:
        sys.exit(f"there is no row {unknown[0]!r}: name some of {', '.join(TABLE | GPUS)}")
    for name in sys.argv[1:]:
        print(row(name).report, row(name).jaxpr, row(name).text, sep="\n\n")
    if not sys.argv[1:]:
        print(*TABLE, *GPUS, sep="\n")
