"""Whether results depend linearly on given variables: what averaging over microbatches needs."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jex_core

from zerojax import _compat
from zerojax._jaxpr import is_var

# Of one operand, or of several that may each be linear.
KEEP = frozenset({
    "add", "sub", "neg", "convert_element_type", "reshape", "broadcast_in_dim", "squeeze",
    "reduce_sum", "stop_gradient", "copy", "psum", "psum_invariant", "pvary", "pcast", "add_any",
    "concatenate", "stack", "transpose", "slice", "expand_dims", "optimization_barrier", "cumsum",
    "rev",
})  # fmt: skip
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
