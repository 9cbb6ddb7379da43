"""What users pass first where something else belongs, and what they are told then."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer


def check_functional(state: Any) -> None:
    """Raises for Flax nnx objects, which are sharded in place."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    parts = state if isinstance(state, tuple | list) else ()
    if isinstance(state, nnx.Module) or any(isinstance(part, nnx.Optimizer) for part in parts):
        raise TypeError(
            "this is a Flax nnx model, not a state. Shard it with its optimizer, in place: "
            "zerojax.nnx.shard(model, optimizer, stage=3), or a function that makes both; steps "
            "are then those of zerojax.nnx.train_step."
        )


def check_alive(state: Any) -> None:
    """Raises where a step before was given this state's memory: all of it, so one leaf tells."""
    arrays = (leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
    leaf = next(arrays, None)
    if leaf is not None and not isinstance(leaf, Tracer) and leaf.is_deleted():
        raise ValueError(
            "this state was donated to an earlier step, which has made the next one of it. Go on "
            "with what that step returned, state, metrics = step(state, batch), or make the step "
            "with donate=False."
        )


def called(
    loss_fn: Callable[..., Any], args: Sequence[Any], fields: dict[str, Any], model: str = "params"
) -> Any:
    """`loss_fn(*args, **fields)`, with an error that names these where it takes others."""
    try:
        return loss_fn(*args, **fields)
    except TypeError as error:
        if _takes(loss_fn, args, fields):
            raise  # it is about something in the loss
        given = ", ".join([model, "batch", "rng"][: len(args)] + [f"{name}=" for name in fields])
        raise TypeError(
            f"the step calls the loss with ({given}): {error}. Random keys are given to the step "
            "after the batch, as jax.random.key(n), to losses that take one; fields of the state "
            "come with mutable=."
        ) from error


@contextlib.contextmanager
def closures_explained() -> Iterator[None]:
    """Notes what to do where Equinox refuses a closure of its own."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith("Closure-converted function called with different"):
            error.add_note(
                "Equinox raises this inside of any jax.shard_map, which a step is: it compares "
                "types with and without their mesh. In diffrax pass adjoint=DirectAdjoint() or "
                "adjoint=BacksolveAdjoint() to diffeqsolve; equinox.internal.while_loop takes "
                "kind='bounded'. Of optimistix no adjoint works."
            )
        raise


def _takes(function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError:
        return False
    except ValueError:  # of builtins and the like nobody knows
        return True
    return True
