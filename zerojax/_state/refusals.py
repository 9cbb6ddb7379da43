"""Errors for arguments that users often pass by mistake."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from zerojax import _compat
from zerojax._state import state as _state
from zerojax._state.state import Leaf
from zerojax._types import PyTree, kinds_of

T = TypeVar("T")
# Names of the random key of a loss: key, rngs, dropout_key.
KEY_NAMES = re.compile(r"(^|_)(p?rng|key|seed)s?(_|$)")


def _loaded(module: str, kind: str) -> Any:
    """Returns a class of another library for `isinstance`, or () if that is not imported."""
    return getattr(sys.modules.get(module), kind, ())


def is_flax_module(value: object) -> bool:
    return isinstance(value, (_loaded("flax.nnx", "Module"), _loaded("flax.linen", "Module")))


def check_functional(state: object) -> None:
    """Raises for Flax modules: nnx ones are sharded in place, linen ones have no parameters."""
    optimizer = _loaded("flax.nnx", "Optimizer")
    parts = state if isinstance(state, tuple | list) else ()
    if isinstance(state, _loaded("flax.linen", "Module")):
        raise TypeError(
            f"this is the Flax module {type(state).__name__}, not a state: it has no parameters. "
            "Make one with its init: TrainState.create(apply_fn=model.apply, "
            "params=model.init(key, x)['params'], tx=tx)."
        )
    if is_flax_module(state) or any(isinstance(part, optimizer) for part in parts):
        raise TypeError(
            "this is a Flax nnx model, not a state. Shard it with its optimizer, in place: "
            "zerojax.nnx.shard(model, optimizer, stage=3), or pass a function that makes both. "
            "Make steps with zerojax.nnx.train_step; zerojax.forecast takes the loss, or such a "
            "step, with that function. To save a model, pass zerojax.nnx.state(model, optimizer); "
            "to plan it, zerojax.plan(lambda: zerojax.nnx.state(*make()), stage=3)."
        )


NNX = (
    "Save zerojax.nnx.state(model, optimizer), read it with like=zerojax.nnx.state(model, "
    "optimizer), and put it back with zerojax.nnx.update(model, optimizer, state). Without an "
    "optimizer, use nnx.state(model) and nnx.update(model, state)."
)


def check_stored(tree: PyTree, name: str = "the state") -> None:
    """Raises for anything but a tree of arrays: a restore could not give it back."""
    if (node := _first_of("flax.nnx", "Pytree", tree)) is not None:
        raise TypeError(
            f"{name} {'is' if node is tree else 'has'} a Flax nnx object, {type(node).__name__}, "
            f"not only arrays. {NNX}"
        )
    if _first_of("zerojax._state.nnx_state", "Padded", tree) is not None:
        raise TypeError(f"{name} has Flax nnx variables that zerojax pads. {NNX}")
    check_functional(tree)
    leaves = _state.leaves_with_paths(tree)
    if not leaves:
        raise ValueError(
            f"{name} has no leaves, so there is nothing to save. You passed a "
            f"{type(tree).__name__} without arrays; pass one with them."
        )
    if np.isscalar(tree):
        raise TypeError(
            f"{name} is {tree!r}, not a tree of arrays. Pass the state, and numbers and text as "
            "metadata=."
        )
    for leaf in leaves:
        if has_numbers(leaf.value) or isinstance(leaf.value, jax.ShapeDtypeStruct):
            continue
        remedy = "Make it a static field, or save it as metadata=."
        if _first_of("equinox", "Module", tree) is not None:
            remedy = (
                "Of an Equinox model, pass equinox.filter(model, equinox.is_array), here and as "
                "like=, and put the arrays back with equinox.combine(arrays, model). To train it, "
                "make a state: zerojax.ModuleState.create(model, tx)."
            )
        elif callable(leaf.value):
            remedy = (
                "Checkpoints cannot store functions, and so no optimizers (optax) or transforms "
                "(Haiku): pass the state that their init returns, or make them static fields."
            )
        raise TypeError(f"{leaf.name or name} is a {_kind(leaf.value)}, not an array. {remedy}")


def _first_of(module: str, kind: str, tree: PyTree) -> PyTree:
    """Returns the first node of a class of another library."""
    cls = _loaded(module, kind)
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, cls))
    return next((node for node in nodes if isinstance(node, cls)), None)


def _kind(value: PyTree) -> str:
    of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
    return f"{type(value).__name__}{of}"


MAKER = "Pass the state, or a function with its arguments: lambda: make_state(key)."


def check_state_function(state_or_fn: PyTree, remedy: str = MAKER) -> None:
    """Raises for a function that needs arguments in place of one that makes the state."""
    if _state.is_state_function(state_or_fn) and not accepts(state_or_fn, (), {}):
        name = getattr(state_or_fn, "__name__", type(state_or_fn).__name__)
        raise TypeError(
            f"{name} takes arguments, but a function that makes the state takes none. {remedy}"
        )


def is_gone(value: object) -> bool:
    """Whether an array was donated or deleted."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted()


def has_gone(tree: PyTree) -> bool:
    """Whether any array of a tree was donated or deleted."""
    leaves = jax.tree.leaves(tree)
    # Python takes longer to say what each leaf is than JAX to say whether it is deleted.
    arrays = {k for k in kinds_of(leaves) if issubclass(k, jax.Array) and not issubclass(k, Tracer)}
    return any(leaf.is_deleted() for leaf in leaves if type(leaf) in arrays)


def check_alive(tree: PyTree, name: str = "state") -> None:
    """Raises for arrays that were donated to an earlier step, or deleted."""
    for leaf in _state.leaves_with_paths(tree):
        if is_gone(leaf.value) and name == "state":
            raise ValueError(
                "this state was donated to an earlier step, which made the next one in its memory "
                f"({where(name, leaf)} is gone). Continue with the state that this step returned, "
                "state, metrics = step(state, batch), or make the step with donate=False."
            )
        if is_gone(leaf.value):
            raise ValueError(
                f"{where(name, leaf)} was donated to an earlier function (donate_argnums of "
                f"jax.jit) or deleted. Pass a new {name}."
            )


def check_distinct(leaves: Sequence[PyTree], state: PyTree) -> None:
    """Raises for an array that a state has twice, whose memory a step would donate twice."""
    if len({*map(id, leaves)}) == len(leaves):
        return
    first: dict[int, Leaf] = {}
    for leaf in _state.leaves_with_paths(state):
        other = first.setdefault(id(leaf.value), leaf)
        is_array = isinstance(leaf.value, jax.Array) and not isinstance(leaf.value, Tracer)
        if other is not leaf and is_array:
            raise ValueError(
                f"state leaves {other.name} and {leaf.name} are one array, which a step would "
                "donate twice. Put a copy in place of one of them, jax.tree.map(jnp.copy, "
                "state.params), or make the step with donate=False."
            )


def has_numbers(value: PyTree) -> bool:
    """Whether a leaf has numbers that JAX knows, not text, objects, dates, records or a shape."""
    if isinstance(value, jax.Array):
        return True
    dtype = np.asarray(value).dtype
    return dtype.kind not in "OSUMm" and dtype.type not in (np.void, np.longdouble, np.clongdouble)


def check_values(tree: PyTree, name: str = "state", or_shapes: bool = False) -> None:
    """Raises for leaves that are not numbers, or shapes of them."""
    for leaf in _state.leaves_with_paths(tree):
        is_shape = or_shapes and isinstance(leaf.value, jax.ShapeDtypeStruct)
        if not (is_shape or has_numbers(leaf.value)):
            raise TypeError(
                f"{where(name, leaf)} is a {_kind(leaf.value)}, which JAX does not accept as an "
                f"array. Convert it to a numpy array of numbers, or leave it out of the {name}."
            )


def knowing_dtypes(cls: type[T]) -> type[T]:
    """Has `Precision` translate the names that other libraries give its options."""
    init, known = cls.__init__, inspect.signature(cls).parameters

    @functools.wraps(init)
    def __init__(self: T, *args: object, **named: object) -> None:
        for name in sorted(named.keys() - known):
            raise TypeError(
                f"Precision has no {name}=. Pass compute= (FSDP2's param_dtype, jmp's "
                "compute_dtype), reduce= (FSDP2's reduce_dtype), param= (jmp's and Flax's "
                "param_dtype: of stored parameters), master=, moments= or gather=."
            )
        init(self, *args, **named)

    cls.__init__ = __init__
    return cls


def check_tx(tx: object) -> object:
    """Raises unless it is an optimizer: for `optax.adam`, say, in place of `optax.adam(1e-3)`."""
    if tx is not None and not (hasattr(tx, "init") and hasattr(tx, "update")):
        name = getattr(tx, "__name__", type(tx).__name__)
        raise TypeError(
            f"tx= is {name}, not an optimizer. Pass an optax.GradientTransformation: call it, as "
            "in optax.adam(1e-3)."
        )
    return tx


def check_gradients_sum(params: Sequence[str]) -> None:
    """Raises for parameters whose gradients are their new values, which a step would sum."""
    for name in params:
        if "_overwrite_with_gradient" in name.split("/"):
            raise ValueError(
                f"{name} is of a collection whose gradients are its new values: a scale of fp8, or "
                "a history of amax. A step would sum them over the devices. Take their maximum in "
                "the loss, under another name, as examples/fp8.py does."
            )


def check_one_tx(state: PyTree, tx: object) -> None:
    """Raises if `tx=` is not the optimizer that a state has itself."""
    own = _state.get_tx(state)
    own, tx = (getattr(each, "original", each) for each in (own, tx))
    if None not in (own, tx) and own != tx:
        raise ValueError(
            f"tx= is another optimizer than that of the state: a {type(state).__name__} is updated "
            "by its field tx. Leave tx= out, or replace the field before you place the state: "
            "state.replace(tx=tx, opt_state=tx.init(state.params))."
        )


def where(name: str, leaf: Leaf) -> str:
    """Names a leaf of a step's argument: 'batch leaf x', or 'the batch' if that is a leaf."""
    return f"{name} leaf {leaf.name}" if leaf.path else f"the {name}"


def called(
    loss_fn: Callable[..., PyTree], args: Sequence[PyTree], fields: PyTree, model: str = "params"
) -> PyTree:
    """Returns `loss_fn(*args, **fields)`; names these arguments if the loss takes others."""
    try:
        return loss_fn(*args, **fields)
    except AttributeError as error:
        if model != "params" and any(error.obj is rng for rng in args[2:]):
            error.add_note("For streams, pass the step a nnx.Rngs after the batch, not a key.")
        raise
    except TypeError as error:
        if accepts(loss_fn, args, fields):
            raise  # the error comes from within the loss
        passed = ", ".join([model, "batch", "rng"][: len(args)] + [f"{name}=" for name in fields])
        names = _missing(error)
        others = [name for name in names if not KEY_NAMES.search(name)]
        if len(args) > 2 and accepts(loss_fn, args[:2], fields):
            step = "step(state, batch)" if model == "params" else "step(model, optimizer, batch)"
            remedy = (
                f"This loss takes no random key: leave it out, {step}, or have the loss take it "
                "after the batch. Pass several arrays as one batch, (x, y)."
            )
        elif model != "params" and others:
            remedy = (
                f"The loss is loss_fn({passed}) -> loss, or (loss, aux): the step takes its "
                "gradients, and updates the model by the optimizer."
            )
        elif model != "params" or (names and not others):
            remedy = (
                "Pass the step a random key after the batch, jax.random.key(n): it passes the key "
                "to losses that take one."
            )
        else:
            name = [*others, "batch_stats"][0]
            remedy = (
                "Pass the step a random key after the batch, jax.random.key(n), if the loss takes "
                f"one. Fields of the state come by name: mutable=({name!r},)."
            )
        raise TypeError(f"the step calls the loss with ({passed}): {error}. {remedy}") from error


def updated(update: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Returns `update(*args)`; explains if it needs more, or updates a field of `mutable=` too."""
    try:
        return update(*args)
    except (TypeError, ValueError) as error:
        if isinstance(args[1], _loaded("optax", "LookaheadParams")):
            raise TypeError(
                "optax.lookahead takes the gradients of its fast parameters, and a step has those "
                "of all. Take these out before it: tx = optax.GradientTransformation(tx.init, "
                "lambda grads, *others: tx.update(grads.fast, *others)), with the old tx on the "
                "right; docs/recipes.md shows it."
            ) from error
        if _compat.said(error, _compat.NO_NAMES) and jax.tree_util.all_leaves(args[1:2]):
            raise TypeError(
                "the parameters are one array, but flax's TrainState.apply_gradients looks for "
                "names among them. Put the array into a dict, params={'w': w}, and have the loss "
                "read params['w']."
            ) from error
        if twice := _compat.said(error, _compat.NAMED_TWICE):
            raise ValueError(
                f"mutable= names {twice[1]!r}, which the state's apply_gradients updates. Leave it "
                "out, and have the loss count in another field."
            ) from error
        if names := _missing(error, "keyword-only"):
            raise TypeError(
                f"the optimizer's update takes {', '.join(f'{name}=' for name in names)} in "
                "addition to the gradients, but train_step passes only these. Write your own loop: "
                "loss, grads = zerojax.value_and_grad(loss_fn, plan)(params, batch), then "
                f"tx.update(grads, opt_state, params, {names[0]}=...); docs/loop.md shows it."
            ) from error
        raise


def _missing(error: Exception, kind: str = r"[\w-]+") -> list[str]:
    """Returns the names of the arguments that Python says a call lacks."""
    message = _compat.said(error, _compat.MISSING.format(kind))
    return re.findall(r"'(\w+)'", message[1]) if message else []


def accepts(
    function: Callable[..., PyTree], args: Sequence[PyTree], named: dict[str, PyTree]
) -> bool:
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError:
        return False
    except ValueError:
        pass  # builtins and the like have no signature
    return True
