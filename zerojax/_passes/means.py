"""The exact mean over the global batch without its padding, in code that sees one shard of it.

A loss needs it where devices or microbatches have different numbers of true elements: an average of
their means would weigh all of them alike. It costs 130 lines of code and, for each mean, two sums
of one number over the devices.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Generator, Sequence
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._jaxprs import LINEAR, Eqn, Inliner, alive, inferred, is_call, reads, type_of
from zerojax._passes.loss import Loss
from zerojax._types import wide

# The names of the calls below, by which `with_counts_first` and `check_gradients` find them.
MEAN, COUNT, SUM = "zerojax_mean", "zerojax_count", "zerojax_sum"

# The axes of the loss that is being traced, which may see no mesh to read them from, and the one of
# them that splits no rows.
AXES: ContextVar[tuple[str, ...]] = ContextVar("axes", default=())
TOKENS: ContextVar[str | None] = ContextVar("tokens", default=None)


@contextlib.contextmanager
def over_rows(tokens: str | None) -> Generator[None]:
    """Has means count over no axis `tokens`, whose devices see the same rows."""
    before = TOKENS.set(tokens)
    try:
        yield
    finally:
        TOKENS.reset(before)


def _as_array(name: str, value: ArrayLike | None) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"zerojax.mean takes an array, got a {type(value).__name__}. Pass one array as "
            f"{name}=, with a value for each example or token."
        ) from None


def mean(values: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """Returns the mean of `values` over the global batch; with a mask, over its true elements.

    Inside a zerojax step this is the number that one device would get from the global batch, even
    where shards have different numbers of true elements. It is exact with `accumulate=` too, where
    it must enter the loss and the aux linearly; anything else is an error. So is a gradient of it
    that the loss takes itself (`jax.grad`). Outside of a step it is `jnp.mean(values,
    where=where)`, and 0 where nothing is true. `zerojax.pad_batch` makes the mask for a batch that
    the devices do not divide.

    Example:
        >>> print(zerojax.mean(jnp.array([1.0, 2.0, 9.0]), where=jnp.array([True, True, False])))
        1.5
    """
    values = _as_array("values", values)
    mask = jnp.ones((), bool) if where is None else _as_array("where", where)
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        values = values.astype(wide(values.dtype))
    if jnp.issubdtype(mask.dtype, jnp.inexact):
        raise TypeError(
            f"zerojax.mean(values, where=mask): the mask is of dtype {mask.dtype}, and where= "
            "takes no weights. Pass weights > 0, and weigh the values yourself."
        )
    try:
        mask = jnp.broadcast_to(mask.astype(bool), values.shape)
    except ValueError:
        raise ValueError(
            f"zerojax.mean(values, where=mask): a mask of shape {mask.shape} does not broadcast to "
            f"values of shape {values.shape}, which in a step are those of one device's part of "
            "the batch. With an element for each row, pass mask[:, None]."
        ) from None
    bound = _compat.bound_axes() or AXES.get()
    axes = tuple(axis for axis in bound if axis != TOKENS.get())

    def zerojax_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
        dtype = wide(values.dtype)
        total = jnp.sum(jnp.where(mask, values, 0), dtype=dtype)
        count = jnp.sum(mask, dtype=dtype)
        if bound:
            total, count = zerojax_sum(total, axes).reshape(()), zerojax_count(count, axes)
        # Under accumulation the count is a mean over microbatches, and may be below 1.
        any_true = count > 0
        return jnp.where(any_true, total / jnp.where(any_true, count, 1), 0).astype(values.dtype)

    return jax.jit(zerojax_mean)(values, mask)


@functools.partial(jax.jit, static_argnums=1)
def zerojax_sum(total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `total` over all devices, with one dimension more, by which `_is_transposed` tells
    this call from its transpose."""
    return lax.psum(total, axes)[None]


@functools.partial(jax.jit, static_argnums=1)
def zerojax_count(count: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `count` over all devices.

    A microbatch must divide by the mean count of all microbatches, which the loss cannot know:
    `with_counts_first` puts an input in place of this call's result.
    """
    return lax.psum(count, axes)


def _calls(eqn: JaxprEqn, name: str) -> bool:
    return is_call(eqn) and Eqn(eqn).name == name


# -- counts of all microbatches


# [Note: counts before microbatches]
# A mean over microbatches is exact if each microbatch divides its sum by the count of all of them.
# That count must exist before the first one runs, so what computes it becomes a jaxpr of its own,
# and the loss takes it as an input. Then the parts of the loss add up, provided that each mean
# enters it linearly.
def with_counts_first(loss: Loss, differ: Sequence[bool]) -> Loss:
    """Takes the calls that count over the devices out of a loss, which then divides by counts that
    it is given. Its `counter` returns those of one microbatch on one device. Of the arguments, some
    `differ` between microbatches."""
    jaxpr, inliner, means = loss.jaxpr, Inliner(), set[Var]()

    def expands(eqn: JaxprEqn) -> bool:
        if _calls(eqn, MEAN):
            means.update(eqn.outvars)
        opens = is_call(eqn) and not _calls(eqn, COUNT)
        return opens and any(map(has_counts, _compat.inner_jaxprs(eqn)))

    eqns = list(inliner.flat(jaxpr.eqns, expands))
    counts = [eqn for eqn in eqns if _calls(eqn, COUNT)]
    kept = [eqn for eqn in eqns if not _calls(eqn, COUNT)]
    for eqn in kept:
        if any(map(has_counts, _compat.inner_jaxprs(eqn))):
            raise ValueError(
                f"zerojax.mean inside {eqn.primitive.name} cannot be made exact through "
                "accumulate=: its count is needed before the microbatches run. Call it outside "
                "of loops and jax.checkpoint, or use accumulate=1."
            )
    wanted, first = [eqn.invars[0] for eqn in counts], len(jaxpr.invars) - len(loss.constants)
    params, others = jaxpr.invars[: len(loss.params)], jaxpr.invars[len(loss.params) : first]
    constants = [*jaxpr.invars[first:], *inliner.constants]
    invars = [*params, *others, *(eqn.outvars[0] for eqn in counts), *constants]
    outvars = [inliner.named(v) for v in jaxpr.outvars]
    new = _compat.make_jaxpr(kept, invars, outvars)
    varying = {v for v, differs in zip(others, differ, strict=False) if differs}
    inputs = [DIFFERS if v in varying else SHARED for v in invars]
    degrees = inferred(new, inputs, SHARED, functools.partial(_degrees, means))
    if NOT_LINEAR in degrees:
        raise ValueError(
            "zerojax.mean enters the loss or the aux in a way that is not linear (exp, a square, a "
            "quotient of two means, a mean of a mean, ...), or is multiplied by what differs "
            "between microbatches, so they cannot be averaged exactly. Apply it to the metrics "
            "outside of the loss, or use accumulate=1. Give what all rows share a "
            "PartitionSpec() in batch_specs=. A loss that balances experts may leave zerojax.mean "
            "out: each microbatch balances its own."
        )
    needed = alive(kept, wanted, reads)
    if not {v for eqn in needed for v in reads(eqn)}.isdisjoint(params):
        raise ValueError(
            "zerojax.mean(values, where=mask): the mask depends on parameters, so its count "
            "cannot be known before the microbatches run. Compute the mask from the batch, or "
            "use accumulate=1."
        )
    counter = _compat.make_jaxpr(needed, [*others, *constants], wanted)
    constants = (*loss.constants, *inliner.constants.values())
    return dataclasses.replace(loss, jaxpr=new, counter=counter, constants=constants)


def has_counts(jaxpr: Jaxpr) -> bool:
    """Whether a loss counts over the devices."""
    return any(_calls(eqn, COUNT) for eqn in _compat.every_eqn(jaxpr))


# A degree: of what microbatches share, what differs between them, and what a mean enters.
SHARED, DIFFERS, IS_LINEAR, NOT_LINEAR = range(4)


def _degrees(means: Collection[Var], eqn: JaxprEqn, inputs: list[int]) -> list[int]:
    """Returns the degree of each output in the `means`, from those of the inputs."""
    name, degree, most = eqn.primitive.name, NOT_LINEAR, max(inputs, default=SHARED)
    if most <= DIFFERS or name in LINEAR or (name == "select_n" and inputs[0] == SHARED):
        degree = most
    elif name in ("dynamic_slice", "gather", "div") and not any(inputs[1:]):
        degree = inputs[0]
    elif name in ("mul", "dot_general") and SHARED in inputs:
        degree = most
    outputs = [degree] * len(eqn.outvars)
    if is_call(eqn):
        inner, _ = _compat.inner_jaxpr(eqn)
        outputs = inferred(inner, inputs, SHARED, functools.partial(_degrees, means))
    # A mean of what depends on a mean is one of two numbers that differ by microbatch.
    of_mean = [IS_LINEAR if degree <= DIFFERS else NOT_LINEAR for degree in outputs]
    pairs = zip(eqn.outvars, outputs, of_mean, strict=True)
    return [mean if v in means else degree for v, degree, mean in pairs]


# -- gradients of a mean that a loss takes itself

# [Note: gradients in a loss]
# A step differentiates the losses of all devices together: through the sum of `zerojax.mean`, a
# gradient reaches the part of each device. Where the loss itself calls `jax.grad` (MAML, a learned
# optimizer), that returns the gradient of the device's own part. The mean cannot know with respect
# to what it is differentiated, so the step refuses such gradients. Those of `jnp.mean`, averaged by
# `jax.lax.pmean`, are one device's.


def check_gradients(loss: Jaxpr, mesh: Mesh, batch_axes: Sequence[str]) -> None:
    """Raises where a traced loss differentiates a `zerojax.mean` itself."""
    axes = [axis for axis in batch_axes if mesh.shape[axis] > 1]
    if axes and any(map(_is_transposed, _compat.every_eqn(loss))):
        name = repr(axes[0] if len(axes) == 1 else tuple(axes))
        raise ValueError(
            "the loss differentiates zerojax.mean itself (jax.grad), which gives each device the "
            "gradient of its own part of the batch. With respect to parameters, differentiate "
            "jnp.mean, and average its gradient before you use it: "
            f"jax.lax.pmean(jax.grad(...)(...), {name}). With respect to examples, differentiate "
            "a sum, jnp.sum."
        )


def takes_gradients(loss: Jaxpr) -> bool:
    """Whether a traced loss differentiates something itself."""
    return any("transpose(" in _compat.scope_of(eqn) for eqn in _compat.every_eqn(loss))


def _is_transposed(eqn: JaxprEqn) -> bool:
    """Whether an equation is the transpose of `zerojax_sum`, whose result lacks a dimension."""
    pairs = zip(eqn.invars, eqn.outvars, strict=False)
    return _calls(eqn, SUM) and any(type_of(new).ndim < type_of(old).ndim for old, new in pairs)
