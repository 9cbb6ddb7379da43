"""A Flax nnx model and its optimizer as one state without objects, and back.

Below: padded variables of a model, and the random streams of a model or of a step's arguments.

[Note: padded variables]
nnx has two views of a variable. Splits, merges, transforms and optimizers move its raw value;
`variable[...]`, arithmetic and a layer's call ask `get_value`. So the raw value is the padded
array, and a subclass drops the padding in `get_value`: a model computes with the shapes it was
written for, while `nnx.jit` gets arrays that the devices divide. Attributes of the values
(`kernel.T`) are those of the logical array, attributes of its place (`kernel.sharding`) those of
the raw one. nnx deprecates its hooks for such uses, and asks for subclasses. Variables stay the
same objects: [Note: the class of a variable], in `patches.py`.
"""

import copy
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.core import spmd
from flax.training.train_state import TrainState
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._axis_types import auto_axes, computed_with, explicit_sharding, typed, typed_as
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.patches import set_class
from zerojax._state.state import OTHER, PARAMS
from zerojax._types import PyTree, Shape


class State(TrainState):
    """A model and its optimizer without objects.

    `variables` has the `values` of the batch statistics and of the random streams, and the
    `graphdef` that makes a model of them and the parameters.
    """

    makes_models = True  # `update` has variables show logical shapes: see `carried.hides_padding`
    # What to do where a plan, or the optimizer, was made for another model.
    plan_again = (
        "Place both again: zerojax.nnx.shard(model, optimizer, stage=...). If parameters are new, "
        "gone or of another shape, first make optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param). "
        "If you decoded weights in it, first call zerojax.nnx.quantize(model, optimizer) again."
    )
    no_parameters = (
        "the optimizer updates nothing in this model: its wrt= selects no variable. Make the "
        "parameters nnx.Param, and optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)."
    )
    optimizer_again = "Make it again: optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)."

    variables: dict[str, PyTree]

    def with_streams(self, key_of: Callable[[jax.Array], jax.Array]) -> "State":
        """Returns a state with other keys in the random streams of the model."""
        streams = {path for path, _ in self._flat(nnx.RngKey)}
        values = nnx.to_flat_state(self.variables["values"])
        new = nnx.from_flat_state((p, key_of(v) if p in streams else v) for p, v in values)
        return self.replace(variables=self.variables | {"values": new})

    @property
    def annotations(self) -> dict[str, PartitionSpec]:
        """The mesh axes in the annotations of variables, by the paths of their leaves.

        An annotation may be names, which the rules translate, a `PartitionSpec`, a
        `NamedSharding`, or a `Format` of one.
        """
        params: PyTree = self.params
        own, specs = {path for path, _ in nnx.to_flat_state(params)}, {}
        for path, variable in self._flat():
            rules = variable.get_metadata("sharding_rules", None)
            sharding = spmd.get_pspec(variable.get_metadata("out_sharding", None) or (), rules)
            sharding = getattr(sharding, "sharding", sharding)
            if spec := getattr(sharding, "spec", sharding):
                of = PARAMS if path in own else "variables/values"
                specs["/".join([of, *map(str, path)])] = spec
        return specs

    def _flat(self, kind: type[nnx.Variable] = nnx.Variable) -> PyTree:
        """Returns the model's variables of a kind, with their paths."""
        model = nnx.merge(self.variables["graphdef"], self.params, self.variables["values"])
        return nnx.to_flat_state(nnx.state(model, kind))


def state(model: nnx.Module, optimizer: nnx.Optimizer) -> State:
    """Returns the arrays of a model and its optimizer as one state, for `zerojax.save`."""
    if not isinstance(model, nnx.Pytree):
        raise TypeError(
            f"model is a {type(model).__name__}. Pass a nnx.Module, then its optimizer."
        )
    return nnx.as_pure(with_variables(model, optimizer))


def shown_state(model: nnx.Module, optimizer: nnx.Optimizer) -> State:
    """Returns that state for a plan: of a new optimizer, which has none that says what is padded,
    with the values that variables show."""
    apart = with_variables(model, optimizer)

    def shown(value: PyTree) -> PyTree:
        return value.get_value() if isinstance(value, Padded) else value

    if _carried.carried_plan(apart) is None:
        apart = jax.tree.map(shown, apart, is_leaf=lambda value: isinstance(value, Padded))
    return nnx.as_pure(apart)


ARGUMENTS = (
    "Pass the loss, loss_fn(model, batch), or a step of zerojax.nnx.train_step; then a function "
    "that makes both, def make(): model = Model(nnx.Rngs(0)); return model, nnx.Optimizer(model, "
    "tx, wrt=nnx.Param); then the batch."
)


def called(make: PyTree) -> PyTree:
    """Returns what a function makes, or a value that is none.

    The plan shards variables. Flax would do so at once, over axes that the mesh may lack, and in
    conflict with `jax.jit`.
    """
    if not callable(make) or isinstance(make, nnx.Pytree | type):
        return make
    with nnx.use_eager_sharding(False):
        value: Any = make()
    if is_pair(value):
        _as_outside(*value)
    return value


def _as_outside(model: nnx.Module, optimizer: nnx.Optimizer) -> None:
    """Makes a model and its optimizer what the same code makes outside of a trace."""
    count = 0
    for _, node in nnx.iter_graph((model, optimizer)):
        if isinstance(node, nnx.Variable) and node.get_metadata("eager_sharding") is False:
            node.set_metadata("eager_sharding", nnx.using_eager_sharding())
        # Flax takes an attribute that is a tracer for static, and not for data.
        for name, value in [*vars(node).items()] if isinstance(node, nnx.Pytree) else ():
            if isinstance(value, Tracer):
                setattr(node, name, nnx.data(value))
                count += 1
    if count:
        optimizer.opt_state = nnx.Optimizer(model, optimizer.tx, wrt=optimizer.wrt).opt_state


def is_pair(value: PyTree) -> bool:
    """Whether these are a model and its optimizer."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], nnx.Optimizer)


def made_state(make: PyTree) -> State:
    """Returns the state of the model and the optimizer that a function makes, for a forecast."""
    if not isinstance(make, nnx.Pytree | type):
        _refusals.check_state_function(make, ARGUMENTS)
    value = called(make)
    if isinstance(value, State):
        return value
    if is_pair(value):
        return state(*value)
    kinds = [type(one).__name__ for one in (value if isinstance(value, tuple) else (value,))]
    kind = f"the class {value.__name__}" if isinstance(value, type) else " and ".join(kinds)
    if value is make:
        mistake = f"you passed {kind}, and not a function that makes a model and its optimizer"
    else:
        name = getattr(make, "__name__", "the function")
        mistake = f"{name} returns {kind}, and not a model and its optimizer"
    raise TypeError(f"{mistake}. {ARGUMENTS}")


def abstract_objects(make: PyTree) -> PyTree:
    """Returns the shapes of the state that a function makes, or whose model and optimizer it makes.
    Where it makes other objects of nnx, or is one itself or a class, returns it; else None.

    A function that takes arguments is not called.
    """
    is_value = not _state.is_state_function(make) or isinstance(make, nnx.Pytree | type)
    if is_value or not _refusals.accepts(make, (), {}):
        return make if _has_objects(make) else None

    def made() -> State | bool | None:
        value = state(*value) if is_pair(value := called(make)) else value
        return value if isinstance(value, State) else _has_objects(value) or None

    shapes = jax.eval_shape(functools.partial(_state.state_of, made))
    return shapes if shapes is None or isinstance(shapes, State) else make


def _has_objects(tree: PyTree) -> bool:
    of_nnx = (State, nnx.Pytree)
    return any(
        isinstance(one, of_nnx) or (isinstance(one, type) and issubclass(one, nnx.Pytree))
        for one in jax.tree.leaves([tree], is_leaf=lambda one: isinstance(one, of_nnx))
    )


def with_variables(model: nnx.Module, optimizer: nnx.Optimizer) -> State:
    """Returns that state with the variables themselves in place of their arrays."""
    graphdef, trained, frozen, others = nnx.split(model, optimizer.wrt, nnx.Param, ...)
    params, tx = trained, optimizer.tx
    if frozen:
        params = nnx.merge_state(trained, frozen)
        paths = frozenset(path for path, _ in nnx.to_flat_state(trained))
        plan = getattr(tx, "plan", None)
        tx = updating_only(paths, getattr(tx, "original", tx))
        tx = tx if plan is None else _carried.PlannedTransformation(tx, plan)
    fields: dict[str, PyTree] = {"apply_fn": None, "params": params, "tx": tx}
    fields |= {"opt_state": optimizer.opt_state, "step": optimizer.step}
    return State(variables={"values": others, "graphdef": graphdef}, **fields)


def update(model: nnx.Module, optimizer: nnx.Optimizer, state: State) -> None:
    """Puts a state's arrays into a model and its optimizer."""
    plan = _carried.carried_plan(state)
    if plan is not None and plan._pads_params:
        _show_logical(model, plan)
    nnx.update(model, state.params, state.variables["values"])
    optimizer.step.set_value(state.step)
    variables = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    # If an optimizer updates only some parameters, the variables of the others have no array.
    held = [variable for variable in variables if jax.tree.leaves(variable.get_raw_value())]
    for variable, value in zip(held, jax.tree.leaves(state.opt_state), strict=True):
        variable.set_value(value)


@functools.lru_cache(maxsize=64)  # new functions would have steps compile again
def updating_only(
    trained: frozenset[tuple], tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns `tx` for the parameters at the paths in `trained`; the others stay unchanged."""

    def chosen(tree: PyTree) -> PyTree:
        return nnx.from_flat_state((p, v) for p, v in nnx.to_flat_state(tree) if p in trained)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        new: PyTree
        new, state = tx.update(chosen(updates), state, chosen(params))
        steps, flat = dict(nnx.to_flat_state(new)), nnx.to_flat_state(updates)
        zeros = ((p, jax.tree.map(jnp.zeros_like, g)) for p, g in flat if p not in steps)
        steps.update(zeros)
        return nnx.from_flat_state((p, steps[p]) for p, _ in flat), state

    return optax.GradientTransformation(lambda params: tx.init(chosen(params)), update)


# -- padded variables

RESTS = "rests"  # in a variable's metadata, which splits and merges keep
# Attributes of an array's place and type, which padding does not change.
OF_THE_ARRAY = {"sharding", "addressable_shards", "global_shards", "addressable_data", "devices"}
OF_THE_ARRAY |= {"device", "is_fully_addressable", "is_fully_replicated", "committed", "format"}
OF_THE_ARRAY |= {"dtype", "weak_type", "ndim", "is_deleted", "delete", "block_until_ready"}


@dataclasses.dataclass(frozen=True)
class Rests:
    """The shape that a variable shows, and the shape and sharding of its padded array."""

    shape: Shape
    padded_shape: Shape
    sharding: NamedSharding = dataclasses.field(repr=False)

    def shown(self, shape: Shape) -> Shape | None:
        """Returns the shape that a raw value of this shape shows; None if that is not padded.

        Transforms over a stack of layers show one layer: a value without some other dimensions.
        """
        dims = range(len(self.shape))
        others = [d for d in dims if self.shape[d] == self.padded_shape[d]]
        for gone in itertools.combinations(others, max(len(dims) - len(shape), 0)):
            kept = [d for d in dims if d not in gone]
            if shape == tuple(self.padded_shape[d] for d in kept):
                return tuple(self.shape[d] for d in kept)
        return None


@functools.partial(jax.jit, static_argnums=1)
@auto_axes()
def _logical(given: jax.Array, rests: Rests) -> jax.Array:
    value, shape = computed_with(given), rests.shown(given.shape)
    assert shape is not None
    is_whole = value.shape == rests.padded_shape  # of one layer, only XLA knows where it is
    value = jax.lax.with_sharding_constraint(value, rests.sharding) if is_whole else value
    logical = jax.lax.slice(value, (0,) * value.ndim, shape)
    logical = _compat.constrained(logical, rests.sharding) if is_whole else logical
    return typed_as(logical, given, PartitionSpec())


@functools.partial(jax.jit, static_argnums=(1, 2))
@auto_axes()
def _padded(value: jax.Array, rests: Rests, explicit: NamedSharding | None) -> jax.Array:
    widths = [(0, p - n) for n, p in zip(rests.shape, rests.padded_shape, strict=True)]
    value = jnp.pad(computed_with(value), widths)
    value = jax.lax.with_sharding_constraint(value, rests.sharding)
    return value if explicit is None else typed(value, explicit)


class Padded(nnx.Variable):
    """A variable whose raw value may be padded; a base before the user's class."""

    shown_as: type[nnx.Variable]  # the user's class

    def get_value(self, **options: PyTree) -> PyTree:
        index = options.pop("index", ...)
        value, rests = super().get_value(**options), self.get_metadata(RESTS, None)
        is_array = isinstance(value, jax.Array | np.ndarray)  # not a placeholder of one
        if rests is not None and is_array and rests.shown(value.shape) is not None:
            value = _logical(value, rests)
        return value if index is ... else value[index]

    def set_value(self, value: PyTree, **options: PyTree) -> None:
        if "index" in options:
            value = self.get_value().at[options.pop("index")].set(value)
        rests = self.get_metadata(RESTS, None)
        if rests is not None and np.shape(value) == rests.shape:
            value = _padded(value, rests, explicit_sharding(self.get_raw_value()))
        super().set_value(value, **options)

    @property
    def shape(self) -> Shape:
        rests, shape = self.get_metadata(RESTS, None), tuple(self.get_raw_value().shape)
        return (rests and rests.shown(shape)) or shape

    def __getattr__(self, name: str) -> Any:
        inner = name in OF_THE_ARRAY or (name.startswith("_") and not name.startswith("__"))
        if inner or self.has_metadata(name):
            return super().__getattr__(name)
        return getattr(self.get_value(), name)

    def __copy__(self) -> nnx.Variable:
        return self.copy()

    def __deepcopy__(self, memo: dict) -> nnx.Variable:
        return self.copy(copy.deepcopy(self.get_raw_value(), memo))

    def __reduce__(self) -> tuple:  # without the sharding: devices cannot be pickled
        metadata = {key: value for key, value in self.get_metadata().items() if key != RESTS}
        return self.shown_as.from_metadata, (self.get_value(), metadata)


@functools.cache
def _padded_class(cls: type[nnx.Variable]) -> type[nnx.Variable]:
    namespace = {"shown_as": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (Padded, cls), exec_body=lambda ns: ns.update(namespace))


def _show_logical(model: nnx.Module, plan: _carried.CarriedPlan) -> None:
    """Has the variables that `plan` pads show their logical values."""
    leaves = {
        leaf.path.removeprefix(prefix): leaf
        for leaf in plan.leaves
        for prefix in (f"{PARAMS}/", "variables/values/")
        if leaf.rest.padding and leaf.kind in (PARAMS, OTHER) and leaf.path.startswith(prefix)
    }
    for path, variable in nnx.to_flat_state(nnx.state(model)) if leaves else ():
        if (leaf := leaves.get("/".join(map(str, path)))) is None:
            continue
        if not isinstance(variable, nnx.Variable):
            raise TypeError(
                f"{leaf.path} is a plain array of shape {leaf.shape}, which the devices do not "
                "divide. Only variables can be padded: make it a nnx.Param, or pass pad=False."
            )
        rests = Rests(leaf.shape, leaf.padded_shape, leaf.rest.sharding(plan.mesh))
        if not isinstance(variable, Padded):
            set_class(variable, _padded_class(type(variable)))
        if variable.get_metadata(RESTS, None) != rests:
            variable.set_metadata(RESTS, rests)


# -- random streams


def without_objects(rng: PyTree) -> PyTree:
    """Returns the argument after the batch with a pair, a graphdef and its values, for `nnx.Rngs`.

    Each key and count is a scalar in it. A step would split the arrays of forked streams over the
    devices, like the batch. It folds a scalar key for each device, and leaves a scalar count.
    """

    def pair(streams: PyTree) -> tuple[nnx.GraphDef, PyTree]:
        graphdef, values = nnx.split(streams)
        return graphdef, jax.tree.map(_scalars, nnx.as_pure(values))

    return jax.tree.map(lambda x: pair(x) if _is_streams(x) else x, rng, is_leaf=_is_streams)


def with_objects(rng: PyTree) -> PyTree:
    def is_pair(value: PyTree) -> bool:
        return isinstance(value, tuple) and isinstance(next(iter(value), None), nnx.GraphDef)

    def merged(graphdef: nnx.GraphDef, scalars: PyTree) -> PyTree:
        values = jax.tree.map(_stacked, scalars, is_leaf=lambda x: isinstance(x, tuple))
        return nnx.merge(graphdef, values)

    return jax.tree.map(lambda x: merged(*x) if is_pair(x) else x, rng, is_leaf=is_pair)


def stream_variables(rng: PyTree, kind: type[nnx.RngState]) -> list[PyTree]:
    """Returns the keys, the counts (how many keys were drawn) or both of an argument's streams."""
    streams = filter(_is_streams, jax.tree.leaves(rng, is_leaf=_is_streams))
    return [v for one in streams for _, v in nnx.to_flat_state(nnx.state(one, kind))]


def drawn(rng: PyTree, before: list[jax.Array]) -> list[PyTree]:
    """Returns how many keys a loss has drawn, as scalars: arrays in aux belong to the examples.

    All devices have the same counts, small enough to be exact as floats, which aux becomes.
    """
    after = [count.get_value() for count in stream_variables(rng, nnx.RngCount)]
    if list(map(jnp.shape, after)) != list(map(jnp.shape, before)):
        raise ValueError(
            "the loss left the step's random streams in another shape. Undo nnx.split_rngs(rngs, "
            "splits=n) by nnx.restore_rngs(backups), or use it as a decorator."
        )
    pairs = zip(after, before, strict=True)
    return [_scalars((new - old).astype(jnp.int32)) for new, old in pairs]


def advance(rng: PyTree, drawn: list[PyTree]) -> None:
    """Advances streams, in place, by the number of keys that a step has drawn."""
    if counts := stream_variables(rng, nnx.RngCount):
        new = _advanced([count.get_value() for count in counts], drawn)
        for count, value in zip(counts, new, strict=True):
            count.set_value(value)


@jax.jit
def _advanced(before: list[jax.Array], drawn: list[PyTree]) -> list[jax.Array]:
    pairs = zip(before, map(_stacked, drawn), strict=True)
    return [old + jnp.round(new).astype(jnp.int32).astype(old.dtype) for old, new in pairs]


def check_arguments(model: nnx.Module, batch: PyTree, rng: PyTree) -> None:
    """Raises for nnx objects that a step would not update."""
    for value in (batch, rng):
        if isinstance(value, nnx.Pytree) and not _is_streams(value):
            use = "If the loss only reads it, have the loss close over it."
            if isinstance(value, nnx.Metric):
                use = (
                    "Have the loss return the values that the metrics need, return loss, logits, "
                    "and update them after the step: values = step(model, optimizer, batch); "
                    "metrics.update(loss=values['loss'], logits=values['aux'], labels=...)."
                )
            raise TypeError(
                "call a step of zerojax.nnx as step(model, optimizer, batch) or step(model, "
                f"optimizer, batch, rng): a {type(value).__name__} is neither batch nor rng. {use}"
            )
    if any(map(_is_streams, jax.tree.leaves(batch, is_leaf=_is_streams))):
        raise TypeError(
            "the batch has a nnx.Rngs, which would not advance there. Pass it after the batch: "
            "step(model, optimizer, batch, rngs)."
        )
    counts = set(map(id, stream_variables(rng, nnx.RngCount)))
    held = nnx.to_flat_state(nnx.state(model, nnx.RngCount)) if counts else ()
    if any(id(count) in counts for _, count in held):
        raise ValueError(
            "the model holds the nnx.Rngs that you pass after the batch. Leave it out, "
            "step(model, optimizer, batch), and have the loss draw from the model's."
        )


def set_apart(model: nnx.Module, device_key: jax.Array) -> None:
    """Folds the random streams of a model with a key of this device and microbatch."""
    salt = jax.random.bits(device_key)

    def fold(keys: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), salt).reshape(keys.shape)

    nnx.update(model, jax.tree.map(fold, nnx.state(model, nnx.RngKey)))


def _is_streams(value: object) -> bool:
    return isinstance(value, nnx.Rngs | nnx.RngStream)


def _scalars(value: jax.Array) -> PyTree:
    return tuple(map(_scalars, value)) if value.shape else value


def _stacked(scalars: PyTree) -> jax.Array:
    is_one = not isinstance(scalars, tuple)
    return jnp.asarray(scalars) if is_one else jnp.stack(list(map(_stacked, scalars)))
