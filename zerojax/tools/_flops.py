"""The matmuls of a jaxpr: their FLOPs and dtypes."""

import itertools
import math

from jax.extend.core import Jaxpr, JaxprEqn

from zerojax import _compat
from zerojax._jaxprs import RAGGED, Eqn, type_of


def matmuls(jaxpr: Jaxpr, times: float = 1.0) -> list[tuple[JaxprEqn, float]]:
    """Returns the matmuls at any depth, with their FLOPs: those of a `while` once, and those of a
    `cond`'s most expensive branch."""
    every = []
    for eqn in jaxpr.eqns:
        if flops := of(eqn):
            every.append((eqn, times * flops))
            continue
        inner = [matmuls(each, times * Eqn(eqn).length) for each in _compat.inner_jaxprs(eqn)]
        if eqn.primitive.name == "cond":
            inner = [max(inner, key=lambda branch: sum(flops for _, flops in branch))]
        every += itertools.chain(*inner)
    return every


def of(eqn: JaxprEqn) -> float:
    """Counts the FLOPs of a matmul; 0 for all else."""
    name, params = eqn.primitive.name, Eqn(eqn)
    if name in ("dot_general", RAGGED):
        (contracting, _), _ = params.factors
        left, output, *groups = map(type_of, (eqn.invars[0], eqn.outvars[0], *eqn.invars[2:3]))
        flops = 2.0 * output.size * math.prod(left.shape[d] for d in contracting)
        if name == RAGGED:  # each row by the matrix of its group
            ragged = {*params.ragged_dot_dimension_numbers.lhs_ragged_dimensions}
            flops /= groups[0].shape[-1] if ragged <= {*contracting} else 1
        return flops
    if name == "conv_general_dilated":
        kernel, output = type_of(eqn.invars[1]), type_of(eqn.outvars[0])
        features = kernel.shape[params.dimension_numbers.rhs_spec[0]]
        return 2.0 * output.size * (kernel.size / features)
    if name.startswith(_compat.ATTENTION):  # as without a kernel: masked entries count, too
        query, key = type_of(eqn.invars[0]), type_of(eqn.invars[1])
        return 4.0 * query.size * key.shape[1 + params.layout]
    return 0.0
