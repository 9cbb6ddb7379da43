"""The parameters of a step, with its precision and its microbatches."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax._kernel.device import Param, param_of
from zerojax._kernel.places import LeafPlan
from zerojax._kernel.travel import Codec
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision
from zerojax._wire.codecs import codec_of, sum_codec_of, way_of


def codecs_of(leaf: LeafPlan, precision: Precision, plan: Plan) -> tuple[Codec, Codec]:
    """Returns the codecs in which a weight is gathered, and its gradient reduced."""
    summed = sum_codec_of(leaf, precision.reduce, plan.mesh, plan.batch_axes)
    return codec_of(leaf, precision.gather, plan.mesh), summed


def as_of(path: str, precision: Precision) -> Precision:
    """Returns the precision with the rules for this path, for parameters at any path."""
    gather, reduce = (way_of(path, ways) for ways in (precision.gather, precision.reduce))
    return dataclasses.replace(precision, gather=gather, reduce=reduce)


def grad_dtype_of(leaf: LeafPlan, precision: Precision, accumulates: bool) -> DTypeLike:
    """Returns the dtype of a gradient: the parameter's, as in JAX, or a wider one for wider master
    copies."""
    dtype = leaf.dtype
    if precision.master is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    wider = precision.master_dtype if accumulates else precision.sums
    return jnp.promote_types(dtype, wider or dtype)


def step_param(
    leaf: LeafPlan, plan: Plan, precision: Precision, accumulates: bool, **others: Any
) -> Param:
    """Makes a parameter of a step that runs in this precision; the others are as in `param_of`."""
    gather, reduce = codecs_of(leaf, precision, plan)
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return param_of(
        leaf,
        plan.mesh,
        plan.batch_axes,
        plan.groups,
        accumulates=accumulates,
        compute_dtype=(is_float and precision.compute) or leaf.dtype,
        grad_dtype=grad_dtype_of(leaf, precision, accumulates),
        gather=gather,
        reduce=reduce,
        **others,
    )
