"""A Flax nnx model and its optimizer as one state without objects, and back."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from flax.core import spmd
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

from zerojax._state import carried as _carried, nnx_padded as _nnx_padded
from zerojax._types import PyTree


@struct.dataclass
class Variables:
    """A model's variables other than parameters, and the graph that makes a model of both."""

    values: PyTree
    graphdef: nnx.GraphDef = struct.field(pytree_node=False)


class State(TrainState):
    """A model and its optimizer without objects.

    `variables` has the batch statistics and the random streams.
    """

    makes_models = True  # `update` has variables show logical shapes: see `carried.hides_padding`

    variables: Variables

    def with_streams(self, key_of: Callable[[jax.Array], jax.Array]) -> "State":
        """Returns a state that has other keys in the streams of the model."""
        values = nnx.to_flat_state(self.variables.values)
        model = nnx.merge(self.variables.graphdef, self.params, self.variables.values)
        streams = {path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.RngKey))}
        new = nnx.from_flat_state((p, key_of(v) if p in streams else v) for p, v in values)
        return self.replace(variables=Variables(new, self.variables.graphdef))

    @property
    def annotations(self) -> dict[str, PartitionSpec]:
        """The mesh axes that variables are annotated with, by the paths of their leaves."""
        own: PyTree = self.params
        model = nnx.merge(self.variables.graphdef, own, self.variables.values)
        params = {path for path, _ in nnx.to_flat_state(own)}
        return {
            "/".join(["params" if path in params else "variables/values", *map(str, path)]): spec
            for path, variable in nnx.to_flat_state(nnx.state(model))
            for spec in [_annotation(variable)]
            if spec is not None
        }


def _annotation(variable: nnx.Variable) -> PartitionSpec | None:
    """Returns the mesh axes that a variable is annotated with, as the rules have them.

    A model may have written names, a `PartitionSpec`, a `NamedSharding`, or a `Format` of one.
    """
    rules = variable.get_metadata("sharding_rules", None)
    sharding = spmd.get_pspec(variable.get_metadata("out_sharding", None) or (), rules)
    sharding = getattr(sharding, "sharding", sharding)
    return getattr(sharding, "spec", sharding) or None


def state(model: nnx.Module, optimizer: nnx.Optimizer) -> State:
    """Returns the arrays of a model and its optimizer as one state, as `zerojax.save` takes it."""
    graphdef, *parts = nnx.split(model, optimizer.wrt, nnx.Param, ...)
    trained, frozen, others = map(nnx.as_pure, parts)
    params, tx = trained, optimizer.tx
    if frozen:
        params = nnx.merge_state(trained, frozen)
        paths = frozenset(path for path, _ in nnx.to_flat_state(trained))
        plan = getattr(tx, "plan", None)
        tx = updating_only(paths, getattr(tx, "original", tx))
        tx = tx if plan is None else _carried.PlannedTransformation(tx, plan)
    fields: dict[str, PyTree] = {
        "step": optimizer.step.get_value(),
        "apply_fn": None,
        "params": params,
        "tx": tx,
        "opt_state": nnx.as_pure(optimizer.opt_state),
        "variables": Variables(others, graphdef),
    }
    return State(**fields)


def update(model: nnx.Module, optimizer: nnx.Optimizer, state: State) -> None:
    """Puts a state's arrays into a model and its optimizer."""
    nnx.update(model, state.params, state.variables.values)
    plan = _carried.carried_plan(state)
    if plan is not None and plan.pads_params:
        _nnx_padded.show_logical(model, plan)
    optimizer.step.set_value(state.step)
    variables = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    # Where an optimizer is for some parameters alone, the others' variables have no array.
    held = [variable for variable in variables if jax.tree.leaves(variable.get_raw_value())]
    for variable, value in zip(held, jax.tree.leaves(state.opt_state), strict=True):
        variable.set_value(value)


@functools.lru_cache(maxsize=64)  # the same functions each time, or steps would compile again
def updating_only(
    trained: frozenset[tuple], tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns `tx` for the parameters at the paths in `trained`; the others stay as they are."""

    def chosen(tree: PyTree) -> PyTree:
        return nnx.from_flat_state((p, v) for p, v in nnx.to_flat_state(tree) if p in trained)

    def init(params: PyTree) -> PyTree:
        return tx.init(chosen(params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        new: PyTree
        new, state = tx.update(chosen(updates), state, chosen(params))
        found = dict(nnx.to_flat_state(new))
        flat = nnx.to_flat_state(updates)
        return nnx.from_flat_state((p, found.get(p, jnp.zeros_like(g))) for p, g in flat), state

    return optax.GradientTransformation(init, update)
