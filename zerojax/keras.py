"""Keras 3 on JAX: a compiled model, sharded in place and trained by its own `fit`.

    import zerojax.keras

    model.compile("adamw", "sparse_categorical_crossentropy", metrics=["accuracy"])
    zerojax.keras.shard(model, stage=3)
    model.fit(x, y, batch_size=64, epochs=3)
    model.save("model.keras")

`fit`, `evaluate` and `predict` then run steps of zerojax. `zerojax.keras.pure(model, batch)`
returns the arguments of `zerojax.verify`, `audit` and `forecast`.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from zerojax._declared import checked, option, takes
from zerojax._plan import planner as _planner
from zerojax._plan.plan import Plan
from zerojax._plan.plan_options import PlanOptions
from zerojax._state import patches as _patches
from zerojax._step.schedule import Schedule, check_schedule
from zerojax._step.step import Step, eval_step, train_step
from zerojax._types import PyTree

SEED = "seed_generator_state"  # Keras's name of what its random layers draw from
KERAS_FIELDS = ("variables",)  # the field of a state that a call of the model updates
# How many lists of variables Keras passes in each mode: of weights, others, the optimizer, metrics.
FIT, EVALUATE, PREDICT = 4, 3, 2


def _keras() -> PyTree:
    return import_module("keras")  # late: it reads KERAS_BACKEND


class _KerasState(struct.PyTreeNode):
    """The values of a model and its optimizer, by the paths of their variables."""

    params: dict[str, PyTree]
    opt_state: dict[str, dict[str, PyTree]]
    variables: dict[str, PyTree]
    # A weak reference to a _KerasParts, whose variables may still be tracers: zerojax computes what
    # it finds in static fields.
    of: PyTree = struct.field(pytree_node=False)

    def apply_gradients(self, *, grads: dict[str, PyTree], **fields: PyTree) -> "_KerasState":
        """Returns the state after the update of Keras's optimizer, with what it has computed."""
        parts = self.of()
        known = zip(*map(jax.tree.leaves, (parts.variables, self)), strict=True)
        with _keras().StatelessScope(list(known)) as scope:
            gradients = parts.values(self.replace(params=grads))
            parts.model.optimizer.apply(_of(parts.model.trainable_variables, gradients))
        return jax.tree.map(scope.get_current_value, parts.variables).replace(**fields)


class _KerasParts:
    """The variables of a model and its optimizer, in the structure of a state."""

    def __init__(self, model: PyTree) -> None:
        self.model, others = model, model.non_trainable_variables
        self.trained = model.trainable_variables
        params = _by_path([*model.trainable_variables, *filter(_is_frozen, others)])
        variables = _by_path([v for v in others if not _is_frozen(v)])
        slots = _slots(model.optimizer.variables, params)
        self.variables = _KerasState(params, slots, variables, weakref.ref(self))

    def state(self, values: dict[int, PyTree]) -> _KerasState:
        return jax.tree.map(lambda v: values[id(v)], self.variables)

    def values(self, state: _KerasState) -> dict[int, PyTree]:
        """Returns the values in a state, by the identities of their variables."""
        variables, treedef = jax.tree.flatten(self.variables)
        return _by_id(variables, treedef.flatten_up_to(state))


def _by_id(variables: Sequence[PyTree], values: Sequence[PyTree]) -> dict[int, PyTree]:
    return dict(zip(map(id, variables), values, strict=True))


def _of(variables: Sequence[PyTree], values: dict[int, PyTree]) -> list[PyTree]:
    return [values[id(v)] for v in variables]


def _is_frozen(variable: PyTree) -> bool:
    """Whether an untrained variable is a weight, such as LoRA leaves: a parameter without gradient.
    Those of one dimension may be statistics, and are small."""
    return variable.ndim > 1 and jnp.issubdtype(variable.dtype, jnp.floating)


def _by_path(variables: Sequence[PyTree]) -> dict[str, PyTree]:
    """Names variables by their paths, of which a model may have two alike."""
    named: dict[str, PyTree] = {}
    for v in variables:
        named[f"{v.path}_{len(named)}" if v.path in named else v.path] = v
    return named


def _slots(variables: Sequence[PyTree], params: dict[str, PyTree]) -> dict[str, dict[str, PyTree]]:
    """Returns an optimizer's variables by slot and parameter, so that a plan has one follow the
    other: Keras names the momentum of `dense/kernel` `dense_kernel_momentum`."""
    slots: dict[str, dict[str, PyTree]] = {}
    starts = {name: p.path.replace("/", "_") + "_" for name, p in params.items()}
    for at, v in enumerate(variables):
        fits = (n for n, s in starts.items() if v.name.startswith(s) and params[n].shape == v.shape)
        name = max(fits, key=lambda n: len(starts[n]), default="")
        slot = v.name.removeprefix(starts.get(name, v.name)) or "others"
        name = name if name and name not in slots.get(slot, {}) else f"{at}_{v.name}"
        slots.setdefault(slot, {})[name] = v
    return slots


def _checked(model: PyTree) -> _KerasParts:
    """Returns the variables of a model; raises where a step would train it otherwise than Keras."""
    keras = _keras()
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"zerojax.keras takes a keras.Model that is compiled, or a function without arguments "
            f"that makes one, not a {type(model).__name__}."
        )
    losses = [*map(keras.losses.get, keras.tree.flatten(getattr(model, "loss", None)))]
    of_all = [getattr(x, "fn", x) for x in losses if getattr(x, "axis", None) is None]
    names = {getattr(function, "__name__", "") for function in of_all}
    over = ", ".join(sorted(names & {"circle", "dice", "tversky"}))
    ignores = any(getattr(loss, "ignore_class", None) is not None for loss in losses)
    reductions = {str(getattr(loss, "reduction", "")) for loss in losses}
    sums = ", ".join(sorted(reductions & {"sum", "mean_with_sample_weight"}))
    scales = isinstance(getattr(model, "optimizer", None), keras.optimizers.LossScaleOptimizer)
    steps = ("train_step", "test_step", "predict_step")
    own = ", ".join(s for s in steps if getattr(type(model), s) is not getattr(keras.Model, s))
    for is_wrong, why in (
        (keras.backend.backend() != "jax", "runs without JAX: set KERAS_BACKEND=jax first"),
        (jax.process_count() > 1, "runs in one process. In several, use zerojax.train_step"),
        (not model.variables, "is not built. Call model.build(input_shape), or add an Input"),
        (not model.compiled, "is not compiled. First call model.compile(optimizer, loss)"),
        (
            own,
            f"has a {own} of its own, which zerojax would skip. Override compute_loss, "
            "compute_metrics or call instead",
        ),
        (getattr(model, "run_eagerly", False), "is compiled with run_eagerly=True. Leave it out"),
        (scales, "scales its loss in float16. Use the policy mixed_bfloat16"),
        (
            over,
            f"has the loss {over} over all rows, which differs on parts of a batch. Use a loss "
            "of each row, such as Dice(axis=(1, 2, 3))",
        ),
        (
            ignores,
            "has a loss with ignore_class=, whose rows each device would count by itself. "
            "Pass them a sample_weight= of 0",
        ),
        (
            sums,
            f"has a loss with reduction={sums!r}, which differs on parts of a batch. Use "
            "reduction='sum_over_batch_size'",
        ),
    ):
        if is_wrong:
            raise ValueError(f"the model {model.name!r} {why}.")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return _KerasParts(model)


def _loss(parts: _KerasParts, mode: int) -> Callable[..., PyTree]:
    """Returns the loss of a model on one device's part of a batch, as a function."""
    model, masks = parts.model, []

    class Masks(_keras().layers.Layer):
        supports_masking = True

        def call(self, x: PyTree, mask: PyTree = None) -> PyTree:
            masks.append(mask)  # Keras passes the one that x carries
            return x

    reads_outputs = type(model).compute_metrics is not _keras().Model.compute_metrics

    def loss(params: PyTree, batch: PyTree, rng: PyTree, variables: PyTree) -> PyTree:
        drawn = jax.random.bits(rng, (), jnp.uint32)  # another one on each device
        variables = _moved(variables, drawn)
        values = parts.values(parts.variables.replace(params=params, variables=variables))
        others = model.non_trainable_variables
        weights, old = _of(model.trainable_variables, values), _of(others, values)
        if mode == PREDICT:
            y_pred, new = model.predict_step((weights, old), batch)
            scaled, aux = jnp.zeros(()), {"y_pred": y_pred}
        else:
            zeros = [jnp.zeros(v.shape, v.dtype) for v in model.metrics_variables]
            scaled, (mean, y_pred, new, added) = model.compute_loss_and_updates(
                weights, old, zeros, *batch, training=mode == FIT, optimizer_variables=()
            )
            jax.tree.map(Masks(), y_pred)
            aux = {"mean": mean, "added": added}
            if reads_outputs or len(model.metrics) > 1:  # logits fill memory
                aux["y_pred"] = y_pred
        if any(mask is not None for mask in masks):
            raise ValueError(
                f"the outputs of {model.name!r} have a mask, which each device would count by "
                "itself. Pass it as sample_weight=, and end it in the model: by a last layer that "
                "returns None from compute_mask."
            )
        for v, before, after in zip(others, old, new, strict=True):
            if after is not before and _is_frozen(v):
                raise ValueError(
                    f"{v.path} {v.shape} is not trainable, and the model updates it in a call. "
                    "zerojax takes such variables of two or more dimensions for frozen weights."
                )
            # None: unchanged. A mean over the devices may round it.
            values[id(v)] = None if after is before else after
        return scaled, aux | {"variables": _moved(parts.state(values).variables, -drawn)}

    return loss


def _moved(variables: dict[str, PyTree], by: jax.Array) -> dict[str, PyTree]:
    """Returns variables with other seeds, but for None."""
    seeds = {k: v.at[0].add(by) for k, v in variables.items() if SEED in k and v is not None}
    return variables | seeds


class _Function:
    """What `fit`, `evaluate` and `predict` call in place of Keras's own functions:
    `(values of the variables, batches) -> (logs or outputs, values)`."""

    def __init__(self, parts: _KerasParts, plan: Plan, schedule: Schedule) -> None:
        self.parts, self.plan, self.ways = parts, plan, plan._splits.ways
        self.key, self.tracked, self.steps = jax.random.key(0), jax.jit(self._tracked), {}
        train = functools.partial(train_step, schedule=schedule)
        for mode, make in ((FIT, train), (EVALUATE, eval_step), (PREDICT, eval_step)):
            make = functools.partial(make, _loss(parts, mode), plan=plan, mutable=KERAS_FIELDS)
            # The devices may not divide a last batch. Each of them then computes all of it.
            self.steps[mode] = {1: make(batch_specs=PartitionSpec()), self.ways: make()}

    def _tracked(self, metrics: list, aux: PyTree, ways: int, batch: tuple) -> PyTree:
        """Returns the logs of a whole batch, and the metrics that have seen it."""
        model, (x, y, weight) = self.parts.model, batch
        seen = zip(model.metrics_variables, metrics, aux["added"], strict=True)
        with _keras().StatelessScope([(v, old + ways * new) for v, old, new in seen]) as scope:
            model.metrics[0].update_state(aux["mean"], sample_weight=len(jax.tree.leaves(x)[0]))
            logs = model.compute_metrics(x, y, aux.get("y_pred"), weight)
        return logs, [scope.get_current_value(v) for v in model.metrics_variables]

    def __call__(self, lists: Sequence[list], batches: Iterator) -> tuple[PyTree, tuple]:
        model, mode, results = self.parts.model, len(lists), []
        slots, metrics = model.optimizer.variables, model.metrics_variables
        of = [model.trainable_variables, model.non_trainable_variables]
        of += {FIT: [slots, metrics], EVALUATE: [metrics], PREDICT: []}[mode]
        values = {id(v): v.value for v in slots if mode != FIT}
        values |= _by_id([*itertools.chain(*of)], [*itertools.chain(*lists)])
        try:
            if mode == FIT and list(map(id, of[0])) != list(map(id, self.parts.trained)):
                raise ValueError(
                    f"variables of {model.name!r} became trainable or frozen after shard. Call "
                    "model.compile again."
                )
            for data in itertools.islice(batches, model.steps_per_execution):
                batch = _keras().utils.unpack_x_y_sample_weight(data)
                results.append(self._step(mode, batch, values))
            if not results:
                raise StopIteration
        except BaseException:
            for variable in itertools.chain(*of):
                variable.assign(values[id(variable)])  # Keras has taken it
            model._jax_state_synced = True  # what Keras has of the last call is donated
            raise
        if mode == PREDICT:
            results = [jax.tree.map(lambda *parts: np.concatenate(parts), *results)]
        return results[-1], tuple(_of(variables, values) for variables in of)

    def _step(self, mode: int, batch: tuple, values: dict[int, PyTree]) -> PyTree:
        """Runs a step, puts the new values of variables in place, and returns logs or outputs."""
        metrics = self.parts.model.metrics_variables
        ways = 1 if len(jax.tree.leaves(batch[0])[0]) % self.ways else self.ways
        # Callbacks assign to variables, such as learning rates.
        state = self.plan._brought_back(self.parts.state(values))
        result = self.steps[mode][ways](state, batch, self.key)
        if mode == FIT:
            state, result = result
        else:  # some layers draw random numbers here, too
            state = state.replace(variables=result["aux"].pop("variables"))
        new, aux = self.parts.values(state), result["aux"]
        values |= {k: value for k, value in new.items() if value is not None}
        if mode == PREDICT:
            return aux["y_pred"]
        logs, new = self.tracked(_of(metrics, values), aux, ways, batch)
        values |= _by_id(metrics, new)
        return logs


def _apart(model: PyTree) -> tuple[_KerasParts, PyTree]:
    """Returns the variables of a model, and its state; or a function that makes the state, if one
    makes the model."""
    if not callable(model) or hasattr(model, "variables"):
        parts = _checked(model)
        return parts, jax.tree.map(lambda v: v.value, parts.variables)
    traced = []

    def arrays() -> list[PyTree]:
        parts = _checked(model())
        values = [v.value for v in jax.tree.leaves(parts.variables)]
        known = set(map(id, values))
        others = [x for x in _patches.tracers_in(parts.model) if id(x) not in known]
        traced.extend((parts, others))
        return [*others, *values]

    run = jaxpr_as_fun(jax.make_jaxpr(arrays)())  # Keras names layers otherwise in a next call
    parts, others = traced
    # Constants of layers, and metrics. XLA leaves out the rest.
    known = _by_id(others, jax.jit(lambda: run()[: len(others)])())
    _patches.replaced(parts.model, lambda tracer: known.get(id(tracer), tracer))
    treedef = jax.tree.structure(parts.variables)
    return parts, lambda: treedef.unflatten(map(jnp.asarray, run()[len(others) :]))


@dataclasses.dataclass(frozen=True)
class _KerasOptions(PlanOptions):
    pad: bool = dataclasses.field(default=False, init=False)  # a variable has one shape
    schedule: Schedule = option(Schedule(), "as of `train_step`.", check=check_schedule)


@takes(_KerasOptions)
def shard(model: PyTree, options: _KerasOptions) -> PyTree:
    """Places a compiled Keras model and its optimizer for a ZeRO stage, in place.

    It stays sharded after another `compile`.

    Arguments:
        model: a `keras.Model` that is built and compiled; or a function that makes one. It is
            compiled, so that the variables are sharded from the start.
        {options}

    Returns:
        The model.
    """
    if options.precision is not None and options.precision.stores:
        raise ValueError(
            f"{options.precision} says how to store variables, which Keras's dtype policy does. "
            "Leave param=, master= and moments= out."
        )
    return _placed(model, options)


def _placed(model: PyTree, options: _KerasOptions) -> PyTree:
    parts, source = _apart(model)
    planned = {f.name: getattr(options, f.name) for f in dataclasses.fields(PlanOptions)}
    plan = _planner.plan(source, **planned)
    placed = jax.tree.leaves(plan.place(source))
    for variable, value in zip(jax.tree.leaves(parts.variables), placed, strict=True):
        variable.assign(value)
    model, function = parts.model, _Function(parts, plan, options.schedule)
    model.train_function = model.test_function = model.predict_function = function

    def make(force: bool = False) -> None:
        if force or model.train_function is None:  # after another `compile`
            _placed(model, options)

    model.make_train_function = model.make_test_function = model.make_predict_function = make
    return model


@checked
def pure(model: PyTree, batch: tuple) -> tuple[Step, PyTree, tuple, jax.Array]:
    """Returns a step of states without objects, and its arguments, for `verify` and `audit`.

    Of a function that makes a model, it returns a function that makes a state, for `forecast`.

    Arguments:
        model: what `shard` has returned, or a function that makes a compiled model.
        batch: `(x, y)` or `(x, y, sample_weight)`, arrays or their shapes.
    """
    batch, key = _keras().utils.unpack_x_y_sample_weight(batch), jax.random.key(0)
    if isinstance(model, _keras().Model):
        model.make_train_function()  # after another `compile`
        function = model.train_function
        if not isinstance(function, _Function):
            raise ValueError(
                f"{model.name!r} is not sharded. First call zerojax.keras.shard(model, stage=3)."
            )
        state = jax.tree.map(lambda v: v.value, function.parts.variables)
        state = function.plan._brought_back(state)
        return function.steps[FIT][function.ways], state, batch, key
    parts, source = _apart(model)
    return train_step(_loss(parts, FIT), mutable=KERAS_FIELDS), source, batch, key
