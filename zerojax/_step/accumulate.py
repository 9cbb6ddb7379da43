"""Several microbatches a step: gradients summed in a scan, counts known before it starts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from zerojax import _compat
from zerojax._jaxpr import Inliner, alive, is_var
from zerojax._loss.mean import COUNT, MEAN


def summed(
    step: Callable[[Any, list[Any]], tuple[Any, Any]], parts: list[Any], count: int, like: Any
) -> tuple[Any, Any]:
    """Scans `step(index, parts) -> (to sum, to stack)` over microbatches, stacked in `parts`.

    Sums start from zeros of `like`'s shapes and keep its dtypes.
    """

    def body(total: Any, index_and_parts: tuple[Any, list[Any]]) -> tuple[Any, Any]:
        part, stack = step(*index_and_parts)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part), stack

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return lax.scan(body, zeros, (jnp.arange(count), parts))


class HoistedCounts(NamedTuple):
    """A loss whose counts over the batch come in as inputs.

    `counter` maps the loss's inputs and `constants` to the counts of one microbatch on one
    device; `loss` takes the same and, at the end, the counts to divide by.
    """

    counter: Any
    loss: Any
    constants: list[Any]


def hoist_counts(jaxpr: Any, from_batch: Sequence[bool]) -> HoistedCounts:
    """Takes the calls of `zerojax.mean` that count over the devices out of a loss.

    `from_batch` says which inputs are known before any microbatch runs (not the parameters).
    """
    counts: list[jex_core.JaxprEqn] = []
    kept: list[jex_core.JaxprEqn] = []
    means: dict[Any, int] = {}
    inliner = Inliner()

    def walk(eqn: jex_core.JaxprEqn) -> None:
        eqn = inliner.resolved(eqn)
        if is_call(eqn, MEAN):
            means.update(dict.fromkeys(eqn.outvars, 1))
        if is_call(eqn, COUNT):
            counts.append(eqn)
        elif eqn.primitive.name in _compat.CALLS and contains_count(eqn):
            for inner in inliner.expand(eqn):
                walk(inner)
        elif contains_count(eqn):
            raise ValueError(
                f"zerojax.mean inside {eqn.primitive.name} cannot be made exact through "
                "accumulate=: its count is needed before the microbatches run. Call it outside "
                "of loops and jax.checkpoint, or use accumulate=1."
            )
        else:
            kept.append(eqn)

    for eqn in jaxpr.eqns:
        walk(eqn)
    outvars = [inliner.named(v) for v in jaxpr.outvars]
    if max(degrees(kept, means, outvars), default=0) > 1:
        raise ValueError(
            "zerojax.mean enters the loss or the aux in a way that is not linear (exp, a square, a "
            "quotient of two means, ...), so microbatches cannot be averaged exactly. Apply it to "
            "the metrics outside of the loss, or use accumulate=1."
        )
    wanted = [eqn.invars[0] for eqn in counts]
    needed = alive(kept, wanted, reads)
    roots = {v for eqn in needed for v in reads(eqn)}
    if any(v in roots and not known for v, known in zip(jaxpr.invars, from_batch, strict=True)):
        raise ValueError(
            "zerojax.mean(values, where=mask): the mask depends on parameters, so its count "
            "cannot be known before the microbatches run. Compute the mask from the batch, or "
            "use accumulate=1."
        )
    consts, values = list(inliner.constants), list(inliner.constants.values())
    counter = _compat.make_jaxpr(needed, [*jaxpr.invars, *consts], wanted)
    made = [eqn.outvars[0] for eqn in counts]
    loss = _compat.make_jaxpr(kept, [*jaxpr.invars, *consts, *made], outvars)
    return HoistedCounts(counter, loss, values)


def reads(eqn: jex_core.JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if is_var(v)]


def is_call(eqn: jex_core.JaxprEqn, name: str) -> bool:
    return eqn.primitive.name in _compat.CALLS and eqn.params.get("name") == name


def has_counts(jaxpr: Any) -> bool:
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return any(is_call(eqn, COUNT) or contains_count(eqn) for eqn in eqns)


def contains_count(eqn: jex_core.JaxprEqn) -> bool:
    return any(map(has_counts, jex_core.jaxprs_in_params(eqn.params)))


# Of one operand, or of several that may each be linear.
KEEP = frozenset(
    {
        "add",
        "sub",
        "neg",
        "convert_element_type",
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "reduce_sum",
        "stop_gradient",
        "copy",
        "psum",
        "psum_invariant",
        "pvary",
        "pcast",
        "add_any",
        "concatenate",
        "stack",
        "transpose",
        "slice",
        "expand_dims",
        "optimization_barrier",
        "cumsum",
        "rev",
    }
)


NOT_LINEAR = 2  # a degree: 0 does not depend, 1 depends linearly


def degrees(
    eqns: Sequence[jex_core.JaxprEqn], known: Mapping[Any, int], outvars: Sequence[Any]
) -> list[int]:
    """For each of `outvars`, its degree in the variables that `known` gives degree 1."""
    found = dict(known)

    def degree(atom: Any) -> int:
        return found.get(atom, 0) if is_var(atom) else 0

    for eqn in eqns:
        inputs = [degree(v) for v in eqn.invars]
        if not any(inputs):
            continue
        name = eqn.primitive.name
        if name in _compat.CALLS:
            jaxpr, _ = _compat.inner_jaxpr(eqn)
            inside = dict(zip(jaxpr.invars, inputs, strict=True))
            outputs = degrees(jaxpr.eqns, inside, jaxpr.outvars)
        else:
            outputs = [_output_degree(name, inputs)] * len(eqn.outvars)
        # Where an output was given a degree, that is what its equation is known to do.
        found.update({v: known.get(v, d) for v, d in zip(eqn.outvars, outputs, strict=True)})
    return [degree(v) for v in outvars]


def _output_degree(name: str, inputs: list[int]) -> int:
    if name in KEEP:
        return max(inputs)
    if name in ("dynamic_slice", "gather") and not any(inputs[1:]):
        return inputs[0]
    if name in ("mul", "dot_general"):
        return min(sum(inputs), NOT_LINEAR)
    if name == "div" and not inputs[1]:
        return inputs[0]
    if name == "select_n" and not inputs[0]:
        return max(inputs)
    return NOT_LINEAR
