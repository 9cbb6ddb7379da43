"""zerojax.quantize: puts the frozen weights of a state into codes, and takes them out again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from zerojax._declared import checked
from zerojax._plan import optimizer as _optimizer
from zerojax._plan.precision import is_float
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.hints import layer_dims
from zerojax._state.packed import (
    LEAST_RUN,
    TOP_LEVELS,
    Coding,
    Packed,
    coding_for,
    is_packed,
    weights_of,
)
from zerojax._state.state import PARAMS, Leaf
from zerojax._types import PyTree


@checked
def quantize(
    state: PyTree, codes: str = "nf4", *, where: str | None = None, block: int = 64
) -> PyTree:
    """Quantizes frozen weights of a state to 4 or 8 bits, before the state is placed.

    Devices store and gather them so: an eighth or a quarter of the bytes of float32. A loss sees
    the weights, which each device decodes after the gather, a layer at a time where they are
    gathered so. Only activations have gradients. The optimizer must not read the gradient of a
    quantized weight, not even for a clip; the plan refuses it otherwise.

    Arguments:
        state: any state that `zerojax.plan` takes, or a tree of parameters. For models too large
            for one device, call this in the function that makes the state, which then has all
            weights before it quantizes them. Of shapes, it returns the shapes of the quantized
            weights: a state for files to fill can begin with zeros of these.
        codes: "nf4" (the levels of QLoRA), "int4" or "int8". A weight then takes 4.25 or 8.25 bits.
        where: a pattern of the paths of weights, such as "kernel"; default, all matrices, those of
            stacks of layers among them, that the optimizer of the state does not update.
        block: how many neighbours along the last dimension share a scale, at most. Where this does
            not divide a weight, the largest number from there down to 32 that does is taken.
            Without `where`, weights that no such number divides stay as they are.

    Returns:
        The state, with a node of one leaf of bytes in place of each such weight.
        `zerojax.manual.dequantize` returns the weights.

    Example:
        >>> params = {"w": jnp.ones((256, 64)), "a": jnp.ones((256, 4)), "b": jnp.zeros((4, 64))}
        >>> tx = optax.selective_transform(
        ...     optax.adam(1e-3), freeze_mask={"w": True, "a": False, "b": False})
        >>> state = TrainState.create(apply_fn=None, params=params, tx=tx)
        >>> state = zerojax.shard_train_state(zerojax.quantize(state), stage=3)
        >>> print(state.params["w"].rows.addressable_shards[0].data.nbytes, "of", 256 * 64 * 4)
        1088 of 65536
        >>> print(zerojax.manual.dequantize(state.params)["w"].shape)
        (256, 64)
    """
    _refusals.check_alive(state)
    if callable(state) and jax.tree_util.all_leaves([state]):  # no module that is a pytree
        raise TypeError(
            "zerojax.quantize takes a state, got a function. Call it in the function that you pass "
            "to zerojax.shard_train_state: lambda: zerojax.quantize(make_state())."
        )
    if codes not in TOP_LEVELS:
        known = ", ".join(map(repr, TOP_LEVELS))
        raise ValueError(f"codes={codes!r} is not known. Pass one of {known}.")
    if type(block) is not int or block < LEAST_RUN:
        raise ValueError(f"block={block!r} must be an integer, {LEAST_RUN} or more.")
    if _carried.carried_plan(state) is not None:
        raise ValueError(
            "zerojax.quantize takes a state before it is placed. Call it first: "
            "zerojax.shard_train_state(zerojax.quantize(state), stage=3)."
        )
    params = _state.params_in(state)
    codings = _codings(state, params, functools.partial(coding_for, codes, block), where)

    def pack(path: tuple, value: PyTree) -> PyTree:
        if path not in codings:
            return value
        coding = codings[path]
        if isinstance(value, jax.ShapeDtypeStruct):
            return Packed(jax.eval_shape(coding.bytes_of, value), coding)
        rows = coding.bytes_of(value)
        # In a function that makes the state, and that JAX traces, the rows have no values yet.
        stays_numpy = isinstance(value, np.ndarray) and not isinstance(rows, Tracer)
        return Packed(np.asarray(rows) if stays_numpy else rows, coding)

    new = jax.tree_util.tree_map_with_path(pack, params, is_leaf=is_packed)
    return new if params is state else _with_params(state, new)


def _codings(state: PyTree, params: PyTree, coding_of, where: str | None) -> dict[tuple, Coding]:
    """Returns, by path, how each weight is written that goes into codes."""
    leaves = _state.leaves_with_paths(params)
    if where is not None:
        names = {leaf.path: leaf.name for leaf in leaves}
        chosen = _state.matching(where.removeprefix(f"{PARAMS}/"), names, "where=")
        leaves = [leaf for leaf in leaves if leaf.path in chosen]
    else:
        leaves = _frozen_matrices(state, params, leaves)
    found: dict[tuple, Coding] = {}
    for leaf in leaves:
        struct = _state.shape_dtype(leaf.value)
        is_matrix = jnp.issubdtype(struct.dtype, jnp.floating) and len(struct.shape) > 1
        coding = coding_of(struct.shape, struct.dtype) if is_matrix else None
        if coding is not None:
            found[leaf.path] = coding
        elif where is not None:
            raise ValueError(
                f"where={where!r} matches {leaf.name}, {struct.dtype}{list(struct.shape)}: only "
                "float matrices whose last dimension a block divides are quantized. Pass a "
                "narrower pattern, or a smaller block=."
            )
    odd = [leaf for leaf in leaves if is_float(leaf.value)]
    if odd and not found:
        struct = _state.shape_dtype(odd[0].value)
        raise ValueError(
            f"zerojax.quantize quantizes nothing: no block of {LEAST_RUN} or more, up to "
            f"block=, divides the rows of {odd[0].name}, {struct.dtype}{list(struct.shape)}. Give "
            "the weight longer rows: (64, 64) for (64, 4, 16)."
        )
    if not found:
        raise ValueError(
            "zerojax.quantize found no frozen matrix in the state. Pass where=, a pattern of "
            "their paths, or an optimizer that reads no gradient of some: "
            "optax.selective_transform(tx, freeze_mask=...), with clips inside of tx."
        )
    return found


def _frozen_matrices(state: PyTree, params: PyTree, leaves: list[Leaf]) -> list[Leaf]:
    """Returns the matrices that the optimizer of a state does not update; all, without one."""
    stacks = layer_dims(params, None)
    tx, is_frozen = _state.get_tx(state), [True] * len(leaves)
    if tx is not None or hasattr(state, "apply_gradients"):
        is_frozen = _optimizer.frozen_params(state, _optimizer.update_of(state, tx))
    pairs = zip(leaves, is_frozen, strict=True)
    return [x for x, yes in pairs if yes and np.ndim(x.value) - stacks.get(x.path, 0) >= 2]


def _with_params(state: PyTree, params: PyTree) -> PyTree:
    """Returns a state with these parameters, and its optimizer state with the same arrays.

    A mask that is a function may have made a tree of the old parameters' structure.
    """
    tx, opt_state = _state.get_tx(state), _state.get_opt_state(state)
    if tx is None or opt_state is None:
        return _state.replace(state, params=params)
    try:
        wanted = jax.eval_shape(tx.init, params)
    except Exception:  # the plan says what is wrong with it
        return _state.replace(state, params=params)
    old = jax.tree.leaves(opt_state)
    if list(map(np.shape, old)) == list(map(np.shape, jax.tree.leaves(wanted))):
        opt_state = jax.tree.structure(wanted).unflatten(old)
    return _state.replace(state, params=params, opt_state=opt_state)


def dequantize(tree: PyTree) -> PyTree:
    """Returns a tree with quantized weights decoded, for a model that you call yourself.

    Inside `jax.jit` XLA decodes them where they are used; a stack of layers is decoded a layer at a
    time only if this is called in the body of its loop. Outside, the weights take their full bytes,
    as each device has them: sharded, if the quantized weights are.

    Example:
        >>> params = zerojax.quantize({"w": jnp.ones((4, 64))}, "int8")
        >>> print(jax.tree.leaves(params)[0].dtype, zerojax.manual.dequantize(params)["w"].dtype)
        uint8 float32
    """
    return weights_of(tree)


def check_frozen(state: PyTree, frozen: set[str]) -> None:
    """Raises if the optimizer updates a weight that is in codes."""
    nodes = jax.tree_util.tree_leaves_with_path(_state.get_params(state), is_leaf=is_packed)
    for path, node in nodes:
        if not is_packed(node):
            continue
        name = "/".join(filter(None, (PARAMS, _state.path_name(path))))
        if not any(one == f"{name}/{node.coding.kind}" for one in frozen):
            raise ValueError(
                f"{name} is stored in {node.coding.kind}, which has no gradient, and the "
                "optimizer reads it. Freeze it, as in optax.selective_transform(tx, "
                "freeze_mask=...), with clips inside of tx, and make the optimizer state for that."
            )
