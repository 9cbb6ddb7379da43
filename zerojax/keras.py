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
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import cast

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


@struct.dataclass
class _KerasState:
    """The values of a model and its optimizer, by the paths of their variables."""

    params: dict[str, PyTree]
    opt_state: dict[str, dict[str, PyTree]]
    variables: dict[str, PyTree]
    # Weak: zerojax computes what it finds in static fields, and variables may still be tracers.
    of: "weakref.ref[_KerasParts]" = struct.field(pytree_node=False)

    def apply_gradients(self, *, grads: dict[str, PyTree], **fields: PyTree) -> "_KerasState":
        """Returns the state after the update of Keras's optimizer, with what it has computed."""
        parts = cast(_KerasParts, self.of())
        optimizer, trained = parts.model.optimizer, parts.model.trainable_variables
        old, new = parts.values(vars(self)), parts.values(vars(self) | {"params": grads})
        slots, params = ([old[id(v)] for v in of] for of in (optimizer.variables, trained))
        params, slots = optimizer.stateless_apply(slots, [new[id(v)] for v in trained], params)
        new = _by_id(trained, params) | _by_id(optimizer.variables, slots)
        return dataclasses.replace(parts.state(old | new), **fields)


class _KerasParts:
    """The variables of a model and its optimizer, in the structure of a state."""

    def __init__(self, model: PyTree) -> None:
        self.model, others = model, model.non_trainable_variables
        self.trained = model.trainable_variables
        # Frozen weights, such as LoRA leaves, are parameters without gradients. Those of one
        # dimension may be statistics, and are small.
        frozen = [v for v in others if v.ndim > 1 and jnp.issubdtype(v.dtype, jnp.floating)]
        self.frozen = set(map(id, frozen))
        params = _by_path([*model.trainable_variables, *frozen])
        opt_state = _slots(model.optimizer.variables, params)
        variables = _by_path([v for v in others if id(v) not in self.frozen])
        self.tree = {"params": params, "opt_state": opt_state, "variables": variables}

    def state(self, values: dict[int, PyTree]) -> _KerasState:
        fields = jax.tree.map(lambda v: values.get(id(v)), self.tree)
        return _KerasState(**fields, of=weakref.ref(self))

    def values(self, fields: dict[str, PyTree]) -> dict[int, PyTree]:
        """Returns the values in a state's fields, by the identities of their variables."""
        variables, treedef = jax.tree.flatten(self.tree)
        return _by_id(variables, treedef.flatten_up_to({k: fields[k] for k in self.tree}))


def _by_id(variables: Sequence[PyTree], values: Sequence[PyTree]) -> dict[int, PyTree]:
    return dict(zip(map(id, variables), values, strict=True))


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
    keras = import_module("keras")

    if not isinstance(model, keras.Model):
        raise TypeError(
            f"zerojax.keras takes a keras.Model that is compiled, or a function without arguments "
            f"that makes one, not a {type(model).__name__}."
        )
    losses = keras.tree.flatten(model.loss) if model.compiled else []
    whole = [x for x in losses if getattr(x, "axis", 0) is None]
    whole += [x for x in losses if isinstance(x, keras.losses.Circle)]
    over = ", ".join(type(loss).__name__ for loss in whole)
    reductions = {str(getattr(loss, "reduction", "")) for loss in losses}
    sums = ", ".join(sorted(reductions & {"sum", "mean_with_sample_weight"}))
    optimizer = model.optimizer if model.compiled else None
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    steps = ("train_step", "test_step", "predict_step")
    own = ", ".join(s for s in steps if getattr(type(model), s) is not getattr(keras.Model, s))
    is_eager = getattr(model, "run_eagerly", False)
    for is_wrong, why in (
        (keras.backend.backend() != "jax", "runs without JAX: set KERAS_BACKEND=jax first"),
        (jax.process_count() > 1, "runs in one process. In several, use zerojax.train_step"),
        (not model.variables, "is not built. Call model.build(input_shape), or add an Input"),
        (not model.compiled, "is not compiled. First call model.compile(optimizer, loss)"),
        (own, f"has a {own} of its own, which zerojax would skip. Override compute_loss, "
         "compute_metrics or call instead"),
        (is_eager, "is compiled with run_eagerly=True. Leave it out"),
        (scales, "scales its loss in float16. Use the policy mixed_bfloat16"),
        (over, f"has the loss {over} over all rows, which differs on parts of a batch. Use a loss "
         "of each row, such as Dice(axis=(1, 2, 3))"),
        (sums, f"has a loss with reduction={sums!r}, which differs on parts of a batch. Use "
         "reduction='sum_over_batch_size'"),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(f"the model {model.name!r} {why}.")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return _KerasParts(model)


def _loss(parts: _KerasParts, training: bool | None = True) -> Callable[..., PyTree]:
    """Returns the loss of a model on one device's part of a batch, as a function."""
    keras = import_module("keras")

    model, masks = parts.model, []

    class Masks(keras.layers.Layer):
        supports_masking = True

        def call(self, x: PyTree, mask: PyTree = None) -> PyTree:
            masks.append(mask)  # Keras passes the one that x carries
            return x

    reads_outputs = type(model).compute_metrics is not keras.Model.compute_metrics
    mode = {"training": False} if "training" in inspect.signature(model.call).parameters else {}

    def loss(params: PyTree, batch: PyTree, rng: PyTree, variables: PyTree) -> PyTree:
        drawn = jax.random.bits(rng, (), jnp.uint32)  # another one on each device

        def moved(name: str, value: PyTree, by: jax.Array) -> PyTree:
            return value if value is None or SEED not in name else value.at[0].add(by)

        variables = {k: moved(k, v, drawn) for k, v in variables.items()}
        values = parts.values(parts.tree | {"params": params, "variables": variables})
        others = model.non_trainable_variables
        lists = [[values[id(v)] for v in of] for of in (model.trainable_variables, others)]
        if training is None:
            y_pred, new = model.stateless_call(*lists, batch[0], **mode)
            scaled, aux = jnp.zeros(()), {"y_pred": y_pred}
        else:
            zeros = [jnp.zeros(v.shape, v.dtype) for v in model.metrics_variables]
            scaled, (mean, y_pred, new, added) = model.compute_loss_and_updates(
                *lists, zeros, *batch, training=training, optimizer_variables=()
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
        # None: unchanged. A mean over the devices may round it.
        new = [None if x is before else x for x, before in zip(new, lists[1], strict=True)]
        for v, value in zip(others, new, strict=True):
            if id(v) in parts.frozen and value is not None:
                raise ValueError(
                    f"{v.path} {v.shape} is not trainable, and the model updates it in a call. "
                    "zerojax takes such variables of two or more dimensions for frozen weights."
                )
        fields = parts.state(values | _by_id(others, new)).variables
        return scaled, aux | {"variables": {k: moved(k, v, -drawn) for k, v in fields.items()}}

    return loss


class _Function:
    """What `fit`, `evaluate` or `predict` calls in place of Keras's own function:
    `(values of the variables, batches) -> (logs or outputs, values)`."""

    def __init__(self, parts: _KerasParts, plan: Plan, make: Callable[..., Step]) -> None:
        # The devices may not divide a last batch. Each of them then computes all of it.
        self.steps = [make(), make(batch_specs=PartitionSpec())]
        self.parts, self.plan, self.key = parts, plan, jax.random.key(0)
        self.tracked = jax.jit(self._tracked)

    def _tracked(self, metrics: list, aux: PyTree, ways: int, x: PyTree, *others: PyTree) -> PyTree:
        """Returns the logs of a whole batch, and the metrics that have seen it."""
        keras = import_module("keras")

        model, rows = self.parts.model, len(jax.tree.leaves(x)[0])
        now = [old + ways * new for old, new in zip(metrics, aux["added"], strict=True)]
        known = list(zip(model.metrics_variables, now, strict=True))
        with keras.StatelessScope(known) as scope:
            model.metrics[0].update_state(aux["mean"], sample_weight=rows)
            y, weight = others
            logs = model.compute_metrics(x, y, aux.get("y_pred"), weight)
        return logs, [scope.get_current_value(v) for v in model.metrics_variables]

    def state(self, values: dict[int, PyTree]) -> _KerasState:
        """Returns a state in its places: callbacks assign to variables, to learning rates say."""
        leaves, treedef = jax.tree.flatten(self.parts.state(values))
        back = self.plan._brought_back(leaves)
        return treedef.unflatten([back.get(at, leaf) for at, leaf in enumerate(leaves)])

    def __call__(self, lists: Sequence[list], batches: Iterator) -> tuple[PyTree, tuple]:
        keras = import_module("keras")

        model, results = self.parts.model, []
        of = [model.trainable_variables, model.non_trainable_variables]
        of += [model.optimizer.variables] * (len(lists) == 4)  # of `fit`
        of += [model.metrics_variables] * (len(lists) > 2)  # of `fit` and `evaluate`
        values = {} if len(lists) == 4 else {id(v): v.value for v in model.optimizer.variables}
        for variables, each in zip(of, lists, strict=True):
            values |= _by_id(variables, each)
        if len(lists) == 4 and list(map(id, of[0])) != list(map(id, self.parts.trained)):
            for variable in itertools.chain(*of):
                variable.assign(values[id(variable)])  # Keras has taken it
            raise ValueError(
                f"variables of {model.name!r} became trainable or frozen after shard. Call "
                "model.compile and zerojax.keras.shard again."
            )
        for data in itertools.islice(batches, model.steps_per_execution):
            batch = keras.utils.unpack_x_y_sample_weight(data)
            ways = self.plan._splits.ways
            is_odd = len(jax.tree.leaves(batch[0])[0]) % ways > 0
            state = self.state(values)
            result = self.steps[is_odd](state, batch, self.key)
            if len(lists) == 4:
                state, result = result
            else:  # some layers draw random numbers here, too
                state = dataclasses.replace(state, variables=result["aux"].pop("variables"))
            new, aux = self.parts.values(vars(state)), result["aux"]
            values |= {k: value for k, value in new.items() if value is not None}
            if len(lists) > 2:
                metrics = [values[id(v)] for v in model.metrics_variables]
                logs, metrics = self.tracked(metrics, aux, 1 if is_odd else ways, *batch)
                values |= _by_id(model.metrics_variables, metrics)
            results.append(aux["y_pred"] if len(lists) == 2 else logs)
        if not results:
            raise StopIteration
        lists = tuple([values[id(v)] for v in variables] for variables in of)
        if len(lists) > 2:
            return results[-1], lists
        return jax.tree.map(lambda *parts: np.concatenate(parts), *results), lists


def _apart(model: PyTree) -> tuple[_KerasParts, PyTree]:
    """Returns the variables of a model, and its state; or a function that makes the state, if one
    makes the model."""
    if not callable(model) or hasattr(model, "variables"):
        parts = _checked(model)
        return parts, parts.state({id(v): v.value for v in jax.tree.leaves(parts.tree)})
    traced = []

    def arrays() -> tuple[list[PyTree], list[PyTree]]:
        parts = _checked(model())
        values = [v.value for v in jax.tree.leaves(parts.tree)]
        others = {id(x): x for x in _patches.tracers_in(parts.model)}
        for value in values:
            others.pop(id(value), None)
        traced.extend((parts, others))
        return values, [*others.values()]

    run = jaxpr_as_fun(jax.make_jaxpr(arrays)())  # Keras names layers otherwise in a next call
    parts, others = traced
    variables = jax.tree.leaves(parts.tree)
    if others:  # constants of layers, and metrics: XLA leaves out the rest
        known = dict(zip(others, jax.jit(lambda: run()[len(variables) :])(), strict=True))
        _patches.replaced(parts.model, lambda tracer: known.get(id(tracer), tracer))
    return parts, lambda: parts.state(
        _by_id(variables, [*map(jnp.asarray, run()[: len(variables)])])
    )


@dataclasses.dataclass(frozen=True)
class _KerasOptions(PlanOptions):
    pad: bool = dataclasses.field(default=False, init=False)  # a variable has one shape
    schedule: Schedule = option(Schedule(), "as of `train_step`.", check=check_schedule)


@takes(_KerasOptions)
def shard(model: PyTree, options: _KerasOptions) -> PyTree:
    """Places a compiled Keras model and its optimizer for a ZeRO stage, in place.

    After another `compile`, call it again.

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
    parts, source = _apart(model)
    planned = {f.name: getattr(options, f.name) for f in dataclasses.fields(PlanOptions)}
    plan = _planner.plan(source, **planned)
    values = parts.values(vars(plan.place(source)))
    for variable in jax.tree.leaves(parts.tree):
        variable.assign(values[id(variable)])
    model, named = parts.model, {"plan": plan, "mutable": KERAS_FIELDS}
    train = functools.partial(train_step, _loss(parts), schedule=options.schedule, **named)
    model.train_function = _Function(parts, plan, train)
    model.test_function = _Function(
        parts, plan, functools.partial(eval_step, _loss(parts, False), **named)
    )
    model.predict_function = _Function(
        parts, plan, functools.partial(eval_step, _loss(parts, None), **named)
    )
    return model


@checked
def pure(model: PyTree, batch: tuple) -> tuple[Step, PyTree, tuple, jax.Array]:
    """Returns a step of states without objects, and its arguments, for `verify` and `audit`.

    Of a function that makes a model, it returns a function that makes a state, for `forecast`.

    Arguments:
        model: what `shard` has returned, or a function that makes a compiled model.
        batch: `(x, y)` or `(x, y, sample_weight)`, arrays or their shapes.
    """
    keras = import_module("keras")

    batch, key = keras.utils.unpack_x_y_sample_weight(batch), jax.random.key(0)
    if isinstance(model, keras.Model):
        function = model.train_function
        if not isinstance(function, _Function):
            raise ValueError(
                f"{model.name!r} is not sharded. First call zerojax.keras.shard(model, stage=3)."
            )
        variables = jax.tree.leaves(function.parts.tree)
        return function.steps[0], function.state({id(v): v.value for v in variables}), batch, key
    parts, source = _apart(model)
    return train_step(_loss(parts), mutable=KERAS_FIELDS), source, batch, key
