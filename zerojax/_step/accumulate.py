"""Several microbatches a step: sums over a scan, and counts that are known before it starts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._kernel.jaxprs import Atom, Inliner, alive, is_var, reads
from zerojax._loss.mean import COUNT, MEAN
from zerojax._types import PyTree


def summed(
    step: Callable[[Array, list[Array]], tuple[PyTree, PyTree]],
    parts: list[Array],
    count: int,
    like: PyTree,
) -> tuple[PyTree, PyTree]:
    """Scans `step(index, parts) -> (to sum, to stack)` over microbatches, stacked in `parts`.

    Sums start from zeros of `like`'s shapes and keep its dtypes.
    """

    def body(total: PyTree, index_and_parts: tuple[Array, list[Array]]) -> tuple[PyTree, PyTree]:
        part, stack = step(*index_and_parts)
        # In the dtype of the sum, which may be wider than that of one microbatch's gradients.
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part), stack

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return lax.scan(body, zeros, (jnp.arange(count), parts))


class HoistedCounts(NamedTuple):
    """A loss whose counts over the batch come in as inputs.

    `counter` maps the loss's inputs and `constants` to the counts of one microbatch on one
    device; `loss` takes the same and, at the end, the counts to divide by.
    """

    counter: Jaxpr
    loss: Jaxpr
    constants: list[ArrayLike]


# [Note: counts before microbatches]
# A mean over microbatches is exact if each microbatch divides its sum by the count of all of them.
# That count must exist before the first one runs, so what computes it becomes a jaxpr of its own,
# and the loss takes it as an input. Then the parts of the loss add up, provided that each mean
# enters it linearly.
def hoist_counts(jaxpr: Jaxpr, from_batch: Sequence[bool]) -> HoistedCounts:
    """Takes the calls of `zerojax.mean` that count over the devices out of a loss.

    `from_batch` says which inputs are known before any microbatch runs (not the parameters).
    """
    inliner, means = Inliner(), dict[Var, int]()
    eqns = list(_equations(jaxpr, inliner, means))
    counts = [eqn for eqn in eqns if is_call(eqn, COUNT)]
    kept = [eqn for eqn in eqns if not is_call(eqn, COUNT)]
    outvars = [inliner.named(v) for v in jaxpr.outvars]
    _check_linear(kept, means, outvars)
    wanted = [eqn.invars[0] for eqn in counts]
    needed = alive(kept, wanted, reads)
    _check_known(needed, jaxpr, from_batch)
    inputs = [*jaxpr.invars, *inliner.constants]
    counter = _compat.make_jaxpr(needed, inputs, wanted)
    loss = _compat.make_jaxpr(kept, [*inputs, *(eqn.outvars[0] for eqn in counts)], outvars)
    return HoistedCounts(counter, loss, list(inliner.constants.values()))


def _equations(jaxpr: Jaxpr, inliner: Inliner, means: dict[Var, int]) -> Iterator[JaxprEqn]:
    """Yields the equations, calls that count expanded; `means` gets the results of each mean."""

    def expands(eqn: JaxprEqn) -> bool:
        # The result of a mean has degree 1, whatever the call computes inside.
        if is_call(eqn, MEAN):
            means.update(dict.fromkeys(eqn.outvars, 1))
        is_count = is_call(eqn, COUNT)
        return eqn.primitive.name in _compat.CALLS and not is_count and contains_count(eqn)

    for eqn in inliner.flat(jaxpr.eqns, expands):
        if not is_call(eqn, COUNT) and contains_count(eqn):
            raise ValueError(
                f"zerojax.mean inside {eqn.primitive.name} cannot be made exact through "
                "accumulate=: its count is needed before the microbatches run. Call it outside "
                "of loops and jax.checkpoint, or use accumulate=1."
            )
        yield eqn


def _check_linear(eqns: list[JaxprEqn], means: dict[Var, int], outvars: list[Atom]) -> None:
    """Raises where averages over microbatches would not be those over the batch."""
    if max(degrees(eqns, means, outvars), default=0) > 1:
        raise ValueError(
            "zerojax.mean enters the loss or the aux in a way that is not linear (exp, a square, a "
            "quotient of two means, a mean of a mean, ...), so microbatches cannot be averaged "
            "exactly. Apply it to the metrics outside of the loss, or use accumulate=1."
        )


def _check_known(eqns: list[JaxprEqn], jaxpr: Jaxpr, from_batch: Sequence[bool]) -> None:
    """Raises where the equations of the counts read parameters."""
    roots = {v for eqn in eqns for v in reads(eqn)}
    if any(v in roots and not known for v, known in zip(jaxpr.invars, from_batch, strict=True)):
        raise ValueError(
            "zerojax.mean(values, where=mask): the mask depends on parameters, so its count "
            "cannot be known before the microbatches run. Compute the mask from the batch, or "
            "use accumulate=1."
        )


def is_call(eqn: JaxprEqn, name: str) -> bool:
    return eqn.primitive.name in _compat.CALLS and eqn.params.get("name") == name


def has_counts(jaxpr: Jaxpr) -> bool:
    return any(is_call(eqn, COUNT) for eqn in _compat.every_eqn(jaxpr))


def contains_count(eqn: JaxprEqn) -> bool:
    return any(map(has_counts, _compat.inner_jaxprs(eqn)))


# Primitives that are linear in one operand, or in all of several.
_SUMS = {"add", "add_any", "cumsum", "neg", "psum", "psum_invariant", "reduce_sum", "sub"}
_MOVES = {"broadcast_in_dim", "concatenate", "copy", "expand_dims", "reshape", "rev", "slice"}
_MOVES |= {"squeeze", "stack", "transpose"}
_CASTS = {"convert_element_type", "optimization_barrier", "pcast", "pvary", "stop_gradient"}
KEEP = _SUMS | _MOVES | _CASTS
NOT_LINEAR = 2  # a degree: 0 does not depend, 1 depends linearly


def degrees(
    eqns: Sequence[JaxprEqn], known: Mapping[Var, int], outvars: Sequence[Atom]
) -> list[int]:
    """Returns the degree of each of `outvars` in the variables that `known` gives degree 1."""
    found = dict(known)

    def degree(atom: Atom) -> int:
        return found.get(atom, 0) if is_var(atom) else 0

    for eqn in eqns:
        inputs = [degree(v) for v in eqn.invars]
        if not any(inputs):
            continue  # independent of the means, whatever it computes
        name = eqn.primitive.name
        if name in _compat.CALLS:
            jaxpr, _ = _compat.inner_jaxpr(eqn)
            inside = dict(zip(jaxpr.invars, inputs, strict=True))
            outputs = degrees(jaxpr.eqns, inside, jaxpr.outvars)
        else:
            outputs = [_output_degree(name, inputs)] * len(eqn.outvars)
        # A mean of what depends on a mean is one of two numbers that differ by microbatch.
        pairs = zip(eqn.outvars, outputs, strict=True)
        found.update({v: NOT_LINEAR if v in known else d for v, d in pairs})
    return [degree(v) for v in outvars]


def _output_degree(name: str, inputs: list[int]) -> int:
    if name in KEEP:
        return max(inputs)
    if name in ("dynamic_slice", "gather") and not any(inputs[1:]):
        return inputs[0]
    if name in ("mul", "dot_general"):  # degrees add up, as in a product of polynomials
        return min(sum(inputs), NOT_LINEAR)
    if name == "div" and not inputs[1]:
        return inputs[0]
    if name == "select_n" and not inputs[0]:
        return max(inputs)
    return NOT_LINEAR
