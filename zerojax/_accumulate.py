"""Several microbatches a step: gradients summed in a scan, counts known before it starts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from zerojax import _compat
from zerojax._inline import Inliner, alive, is_var
from zerojax._mean import COUNT


def microbatches(leaf: Any, count: int) -> Any:
    """Splits this device's part of the batch; nothing moves between devices."""
    return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])


def summed(step: Callable[..., tuple[Any, Any]], xs: Any, like: Any) -> tuple[Any, Any]:
    """Scans `step(x) -> (to sum, to stack)`; sums start from zeros of `like`'s shapes."""

    def body(total: Any, x: Any) -> tuple[Any, Any]:
        part, stack = step(x)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part), stack

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return lax.scan(body, zeros, xs)


class HoistedCounts(NamedTuple):
    """A loss whose counts over the batch come in as inputs.

    `counter` maps the loss's inputs and `constants` to the counts of one microbatch on one
    device; `loss` takes the same and, at the end, the counts to divide by.
    """

    counter: Any
    loss: Any
    num_counts: int
    constants: list[Any]


def hoist_counts(jaxpr: Any, from_batch: Sequence[bool]) -> HoistedCounts:
    """Takes the calls of `zerojax.mean` that count over the devices out of a loss.

    `from_batch` says which inputs are known before any microbatch runs (not the parameters).
    """
    counts: list[jex_core.JaxprEqn] = []
    kept: list[jex_core.JaxprEqn] = []
    inliner = Inliner()

    def walk(eqn: jex_core.JaxprEqn) -> None:
        eqn = inliner.resolved(eqn)
        if is_count(eqn):
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
    outvars = [inliner.named(v) for v in jaxpr.outvars]
    loss = _compat.make_jaxpr(kept, [*jaxpr.invars, *consts, *made], outvars)
    return HoistedCounts(counter, loss, len(counts), values)


def reads(eqn: jex_core.JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if is_var(v)]


def is_count(eqn: jex_core.JaxprEqn) -> bool:
    return eqn.primitive.name in _compat.CALLS and eqn.params.get("name") == COUNT


def contains_count(eqn: jex_core.JaxprEqn) -> bool:
    inner = jex_core.jaxprs_in_params(eqn.params)
    return any(is_count(e) or contains_count(e) for jaxpr in inner for e in _eqns(jaxpr))


def _eqns(jaxpr: Any) -> Sequence[jex_core.JaxprEqn]:
    return getattr(jaxpr, "jaxpr", jaxpr).eqns
