"""Matmul FLOPs of a function, counted before anything is compiled: what a step must compute."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zerojax import _compat


def matmul_flops(
    function: Callable[..., Any], *args: Any, axis_env: Sequence[tuple[str, int]] = ()
) -> float:
    """Of one call; a `while` counts once, of a `cond` the most expensive branch counts.

    `axis_env` names mesh axes, and their sizes, that the function's own collectives use.
    """
    return _count(jax.make_jaxpr(function, axis_env=list(axis_env))(*args).jaxpr)


def _count(jaxpr: Any) -> float:
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: Any) -> float:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2.0 * eqn.outvars[0].aval.size * math.prod(left[d] for d in contracting)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
        return 2.0 * eqn.outvars[0].aval.size * kernel.size / kernel.shape[numbers.rhs_spec[0]]
    inner = [_count(jaxpr) for jaxpr in _compat.inner_jaxprs(eqn)]
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner) * (eqn.params["length"] if name == "scan" else 1)
