"""The matmuls of a jaxpr: their FLOPs and dtypes."""

import itertools
import math

from jax.extend.core import Jaxpr, JaxprEqn

from zerojax import _compat
from zerojax._jaxprs import type_of


def matmuls(jaxpr: Jaxpr, times: float = 1.0) -> list[tuple[JaxprEqn, float]]:
    """Returns the matmuls at any depth, with their FLOPs: those of a `while` once, and those of a
    `cond`'s most expensive branch."""
    every = []
    for eqn in jaxpr.eqns:
        if flops := of(eqn):
            every.append((eqn, times * flops))
            continue
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = [matmuls(each, times * turns) for each in _compat.inner_jaxprs(eqn)]
        if eqn.primitive.name == "cond":
            inner = [max(inner, key=lambda branch: sum(flops for _, flops in branch))]
        every += itertools.chain(*inner)
    return every


def of(eqn: JaxprEqn) -> float:
    """Counts the FLOPs of a matmul; 0 for all else."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        left, output = type_of(eqn.invars[0]), type_of(eqn.outvars[0])
        return 2.0 * output.size * math.prod(left.shape[d] for d in contracting)
    if name.startswith("ragged_dot"):  # each row by the matrix of its group
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contracting, _), _ = numbers.dot_dimension_numbers
        left, output = type_of(eqn.invars[0]), type_of(eqn.outvars[0])
        groups = type_of(eqn.invars[2]).shape[-1]
        in_groups = groups if {*numbers.lhs_ragged_dimensions} <= {*contracting} else 1
        return 2.0 * output.size * math.prod(left.shape[d] for d in contracting) / in_groups
    if name == "conv_general_dilated":
        kernel, output = type_of(eqn.invars[1]), type_of(eqn.outvars[0])
        features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * output.size * (kernel.size / features)
    if name.startswith(_compat.ATTENTION):  # as without a kernel: masked entries count, too
        query, key = type_of(eqn.invars[0]), type_of(eqn.invars[1])
        return 4.0 * query.size * key.shape[_compat.sequence_dim(eqn)]
    return 0.0
