"""The exact mean over the global batch without its padding, from code that sees one shard of it."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._kernel.device import exact_share as exact_share
from zerojax._kernel.jaxprs import Atom, is_var, type_of
from zerojax._plan.precision import wide

# The names of the calls below, which accumulation looks for, and `check_gradients`.
MEAN, COUNT, SUM = "zerojax_mean", "zerojax_count", "zerojax_sum"

# The axes of the loss that is being traced, which may see no mesh to read them from.
_axes: ContextVar[tuple[str, ...]] = ContextVar("axes", default=())


@contextlib.contextmanager
def over(axes: tuple[str, ...]) -> Iterator[None]:
    """Has means be over these axes, inside a `with`, where no mesh says over which."""
    token = _axes.set(axes)
    try:
        yield
    finally:
        _axes.reset(token)


def mean(values: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """Returns the mean of `values` over the global batch; with a mask, over its true elements.

    Inside a zerojax step this is the number that one device would get from the global batch, even
    where shards have different numbers of true elements. With `accumulate=` it is exact too; there
    it must enter the loss and the aux linearly, and anything else is an error. A gradient of it
    that the loss takes itself is that of the device's own part, and an error until
    `jax.lax.pmean` has averaged it over the devices. Outside of a step
    it is `jnp.mean(values, where=where)`, and 0 where nothing is true. `zerojax.pad_batch` makes
    the mask for a batch that the devices do not divide.

    Example:
        >>> print(zerojax.mean(jnp.array([1.0, 2.0, 9.0]), where=jnp.array([True, True, False])))
        1.5
    """
    if values is None or isinstance(values, str | dict):
        raise TypeError(
            f"zerojax.mean takes an array, got a {type(values).__name__}. Pass one array, with a "
            "value for each example or token."
        )
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        values = values.astype(wide(values.dtype))
    mask = jnp.ones((), bool) if where is None else jnp.asarray(where)
    if jnp.issubdtype(mask.dtype, jnp.inexact):
        raise TypeError(
            f"zerojax.mean(values, where=mask): the mask is of dtype {mask.dtype}, and where= "
            "takes no weights. Pass weights > 0, and weigh the values yourself."
        )
    axes = _compat.bound_axes() or _axes.get()

    def zerojax_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
        dtype = wide(values.dtype)
        total = jnp.sum(jnp.where(mask, values, 0), dtype=dtype)
        count = jnp.sum(mask, dtype=dtype)
        if axes:
            total, count = zerojax_sum(total, axes).reshape(()), zerojax_count(count, axes)
        # Under accumulation the count is a mean over microbatches, and may be below 1.
        any_true = count > 0
        mean = jnp.where(any_true, total / jnp.where(any_true, count, 1), 0)
        return mean.astype(values.dtype)

    return jax.jit(zerojax_mean)(values, jnp.broadcast_to(mask.astype(bool), values.shape))


@functools.partial(jax.jit, static_argnums=1)
def zerojax_sum(total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `total` over all devices, in one dimension more: by that, `_is_transposed` knows
    this call from its transpose."""
    return lax.psum(total, axes)[None]


@functools.partial(jax.jit, static_argnums=1)
def zerojax_count(count: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `count` over all devices, from a call whose name lets accumulation find it.

    Each microbatch must divide by the mean count of all microbatches, which the loss cannot know;
    `_step/accumulate.py` puts that in place of this call's result.
    """
    return lax.psum(count, axes)


# -- gradients of a mean that a loss takes itself

# [Note: gradients in a loss]
# A step differentiates the losses of all devices together: through the sum of `zerojax.mean`, a
# gradient reaches the part of each device. Where the loss itself calls `jax.grad` (MAML, a learned
# optimizer), what that returns is therefore the gradient of the device's own part, and
# `jax.lax.pmean` of it is one device's. The mean cannot know with respect to what it is
# differentiated, so the loss, once traced, is searched for such gradients. Until they are averaged,
# all that is computed of them must be linear, as what backward does on its way to a gradient is.

Left = frozenset[str]  # the mesh axes that a gradient of a mean is not averaged over yet
NONE: Left = frozenset()

_AVERAGES = ("psum", "all_gather")  # how the names of primitives begin
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
_CURVED = {"abs", "sign", "square", "sqrt", "rsqrt", "cbrt", "integer_pow", "pow", "max", "min"}
_CURVED |= {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "tan"}
_CURVED |= {"asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "rem"}
_CURVED |= {"erf", "erfc", "erf_inv", "lgamma", "digamma", "floor", "ceil", "round", "clamp"}
_CURVED |= {"eq", "ne", "lt", "le", "gt", "ge", "is_finite", "sort", "top_k", "argmax", "argmin"}
_CURVED |= {"reduce_max", "reduce_min", "reduce_prod", "cummax", "cummin", "cumprod"}
_CURVED |= {"cumlogsumexp", "reduce_window_max", "reduce_window_min", "cholesky", "eigh", "svd"}


class UnaveragedError(Exception):
    """A gradient is used before it is averaged."""


def check_gradients(loss: Jaxpr, mesh: Mesh, batch_axes: Sequence[str]) -> None:
    """Raises where a traced loss uses its own gradient of a `zerojax.mean`."""
    axes = [axis for axis in batch_axes if mesh.shape[axis] > 1]
    if not axes or not any(map(_is_transposed, _compat.every_eqn(loss))):
        return
    try:
        left, *_ = _outputs(loss, [NONE] * len(loss.invars), frozenset(axes))
    except UnaveragedError:
        left = frozenset(axes)
    if left:
        name = repr(axes[0] if len(axes) == 1 else tuple(axes))
        raise ValueError(
            "the loss takes a gradient of zerojax.mean itself (jax.grad), on each device that of "
            "its own part of the batch. With respect to parameters, average it before you use it: "
            f"jax.lax.pmean(jax.grad(...)(...), {name}). With respect to examples, take that of a "
            "sum, jnp.sum."
        )


def takes_gradients(loss: Jaxpr) -> bool:
    """Whether a traced loss has equations of a derivative that it takes itself."""
    return any("transpose(" in _compat.scope_of(eqn) for eqn in _compat.every_eqn(loss))


def _is_sum(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _compat.CALLS and eqn.params.get("name") == SUM


def _is_transposed(eqn: JaxprEqn) -> bool:
    """Whether an equation is the transpose of a sum, which has a dimension more than its terms."""
    return _is_sum(eqn) and any(
        type_of(new).ndim < type_of(old).ndim
        for old, new in zip(eqn.invars, eqn.outvars, strict=False)
    )


def _outputs(jaxpr: Jaxpr, inputs: Sequence[Left], axes: Left) -> list[Left]:
    """Returns the axes that each output is not averaged over, as these inputs are not."""
    found: dict[Var, Left] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Atom) -> Left:
        return found.get(atom, NONE) if is_var(atom) else NONE

    for eqn in jaxpr.eqns:
        outs = _of_eqn(eqn, list(map(of, eqn.invars)), axes)
        found.update(zip(eqn.outvars, outs, strict=True))
    return list(map(of, jaxpr.outvars))


def _of_eqn(eqn: JaxprEqn, inputs: list[Left], axes: Left) -> list[Left]:
    name, inner = eqn.primitive.name, _compat.inner_jaxprs(eqn)
    left = NONE.union(*inputs)
    if _is_sum(eqn):
        return [axes if _is_transposed(eqn) else NONE] * len(eqn.outvars)
    if name.startswith(_AVERAGES):
        return [left - _crossed(eqn)] * len(eqn.outvars)
    if name == "while":
        return _of_while(eqn, inputs, axes)
    if name == "cond":
        which, *operands = inputs
        _check(not which)
        branches = [_outputs(branch, operands, axes) for branch in inner]
        return [NONE.union(*outs) for outs in zip(*branches, strict=True)]
    if len(inner) == 1 and len(inner[0].invars) == len(inputs):  # a call of some kind
        counts = _compat.scan_counts(eqn.params) if name == "scan" else (0, 0)
        return _of_loop(inner[0], inputs, *counts, axes)
    _check_linear(eqn, inputs)
    return [left] * len(eqn.outvars)


def _crossed(collective: JaxprEqn) -> set[str]:
    """Returns the mesh axes that a collective crosses from end to end."""
    if collective.params.get("axis_index_groups") is not None:
        return set()
    names = collective.params.get("axes", collective.params.get("axis_name", ()))
    return set(names) if isinstance(names, tuple) else {names}


def _of_while(eqn: JaxprEqn, inputs: list[Left], axes: Left) -> list[Left]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, _ = _compat.opened(eqn.params["cond_jaxpr"])
    body, _ = _compat.opened(eqn.params["body_jaxpr"])
    outs = _of_loop(body, inputs[first:], second, len(inputs) - first - second, axes)
    _check(not any(_outputs(cond, [*inputs[:first], *outs], axes)))
    return outs


def _of_loop(
    body: Jaxpr, inputs: list[Left], num_consts: int, num_carry: int, axes: Left
) -> list[Left]:
    """Returns the outputs of a loop; of a body without a carry, which runs once, the same."""
    while True:
        outs = _outputs(body, inputs, axes)
        carry = slice(num_consts, num_consts + num_carry)
        grown = [a | b for a, b in zip(inputs[carry], outs[:num_carry], strict=True)]
        if grown == inputs[carry]:
            return [*grown, *outs[num_carry:]]
        inputs = [*inputs[: carry.start], *grown, *inputs[carry.stop :]]


def _check_linear(eqn: JaxprEqn, inputs: list[Left]) -> None:
    """Raises for an equation that is known not to be linear in what is not averaged yet."""
    if not any(inputs):
        return
    name, (first, *others) = eqn.primitive.name, inputs
    if name in _PRODUCTS:
        _check(not (first and others[0]))
    elif name == "div":
        _check(not others[0])
    elif name == "select_n":
        _check(not first)
    elif name == "convert_element_type":
        _check(type_of(eqn.outvars[0]).dtype.kind not in "biu")
    else:
        _check(name not in _CURVED)


def _check(is_linear: bool) -> None:
    if not is_linear:
        raise UnaveragedError
