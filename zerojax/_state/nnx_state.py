"""A Flax nnx model and its optimizer as one state without objects, and back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from flax.training.train_state import TrainState

from zerojax._state import carried as _carried


@struct.dataclass
class Variables:
    """What a model holds besides parameters, and the graph that makes a model of both."""

    values: Any
    graphdef: Any = struct.field(pytree_node=False)


class State(TrainState):
    """A model and its optimizer without objects. `variables`: batch statistics, random streams."""

    variables: Variables


def state(model: Any, optimizer: nnx.Optimizer) -> State:
    """The arrays of a model and its optimizer as one state, for `zerojax.save` and others."""
    graphdef, *parts = nnx.split(model, optimizer.wrt, nnx.Param, ...)
    trained, frozen, others = map(nnx.as_pure, parts)
    params, tx = trained, optimizer.tx
    if frozen:
        params = nnx.merge_state(trained, frozen)
        paths = frozenset(path for path, _ in nnx.to_flat_state(trained))
        plan = getattr(tx, "plan", None)
        tx = updating_only(paths, getattr(tx, "original", tx))
        tx = tx if plan is None else _carried.PlannedTransformation(tx, plan)
    fields: dict[str, Any] = {
        "step": optimizer.step.get_value(),
        "apply_fn": None,
        "params": params,
        "tx": tx,
        "opt_state": nnx.as_pure(optimizer.opt_state),
        "variables": Variables(others, graphdef),
    }
    return State(**fields)


def update(model: Any, optimizer: nnx.Optimizer, state: State) -> None:
    """Puts a state's arrays into a model and its optimizer."""
    nnx.update(model, state.params, state.variables.values)
    optimizer.step.set_value(state.step)
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    held = jax.tree.leaves(optimizer.opt_state, is_leaf=is_variable)
    for variable, value in zip(held, jax.tree.leaves(state.opt_state), strict=True):
        variable.set_value(value)


@functools.lru_cache(maxsize=64)  # the same functions each time, or steps would compile again
def updating_only(
    trained: frozenset[tuple], tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`tx` for the parameters at the paths `trained`; the others stay as they are."""

    def chosen(tree: Any) -> Any:
        return nnx.from_flat_state((p, v) for p, v in nnx.to_flat_state(tree) if p in trained)

    def init(params: Any) -> Any:
        return tx.init(chosen(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new: Any
        new, state = tx.update(chosen(updates), state, chosen(params))
        found = dict(nnx.to_flat_state(new))
        flat = nnx.to_flat_state(updates)
        return nnx.from_flat_state((p, found.get(p, jnp.zeros_like(g))) for p, g in flat), state

    return optax.GradientTransformation(init, update)


def check_unannotated(model: Any) -> None:
    """Raises where weights want axes that a model made inside of `jax.jit` cannot tell."""
    for path, spec in nnx.to_flat_state(nnx.get_partition_spec(nnx.state(model))):
        spec = spec.get_value() if isinstance(spec, nnx.Variable) else spec
        if spec is not None and any(entry is not None for entry in spec):
            raise ValueError(
                f"{'/'.join(map(str, path))} is annotated to lie along {spec}, which is lost where "
                "models are born sharded. Make the model first, under jax.set_mesh(mesh), and pass "
                "it with its optimizer: zerojax.nnx.shard(model, optimizer, mesh=mesh)."
            )
