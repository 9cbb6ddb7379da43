"""The matmuls of a jaxpr: their FLOPs and dtypes."""

import math

from jax.extend.core import Jaxpr, JaxprEqn

from zerojax import _compat
from zerojax._kernel.jaxprs import type_of


def jaxpr_flops(jaxpr: Jaxpr) -> float:
    """Counts the FLOPs of matmuls: a `while` once, and a `cond`'s most expensive branch."""
    return sum(_flops(eqn) for eqn in jaxpr.eqns)


def matmul_dtypes(jaxpr: Jaxpr) -> set[str]:
    """Returns the dtypes of the operands of matmuls, at any depth."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        if inner := _compat.inner_jaxprs(eqn):
            found.update(*map(matmul_dtypes, inner))
        elif _flops(eqn):
            found.add(type_of(eqn.invars[0]).dtype.name)
    return found


def _flops(eqn: JaxprEqn) -> float:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        left, output = type_of(eqn.invars[0]), type_of(eqn.outvars[0])
        return 2.0 * output.size * math.prod(left.shape[d] for d in contracting)
    if name == "conv_general_dilated":
        kernel, output = type_of(eqn.invars[1]), type_of(eqn.outvars[0])
        features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * output.size * (kernel.size / features)
    if name.startswith(_compat.ATTENTION):  # as without a kernel: masked entries count, too
        query, key = type_of(eqn.invars[0]), type_of(eqn.invars[1])
        keys = key.shape[_compat.sequence_dim(eqn)]
        return 4.0 * query.size * keys
    inner = [jaxpr_flops(jaxpr) for jaxpr in _compat.inner_jaxprs(eqn)]
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner) * (eqn.params["length"] if name == "scan" else 1)
