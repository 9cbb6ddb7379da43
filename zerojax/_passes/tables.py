"""Sums in float32 the gradients of the rows that a loss reads of a narrow table.

With `Precision(compute="bfloat16")`, a loss looks up tokens in a bfloat16 table. A frequent token
has many addends, and their sum in bfloat16 stops early: at 256 of 4096 equal ones. So each row is
summed in float32, and rounded once. Costs 45 lines of code, and a float32 array of the table's
shape while the device sums.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import itertools
import operator
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Var

from zerojax import _compat
from zerojax._jaxprs import is_call, is_var, running, type_of
from zerojax._passes.loss import Loss

# What keeps the numbers of a table: Flax constrains one that it has partitioned.
LAID_OUT = {"sharding_constraint", "reshape", "transpose", "slice", "squeeze", "copy"}


def narrow_inputs(loss: Loss) -> set[Var]:
    dtypes = ((v, type_of(v).dtype) for v in loss.jaxpr.invars)
    return {v for v, dtype in dtypes if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4}


def summed_wide(loss: Loss, tables: Collection[Var]) -> Loss:
    """Returns a loss that sums so the gradients of these inputs, where it reads them by index
    outside of loops and `jax.checkpoint`."""
    return dataclasses.replace(loss, jaxpr=_summed_wide(loss.jaxpr, tables))


def _summed_wide(jaxpr: Jaxpr, tables: Collection[Var]) -> Jaxpr:
    """Returns the jaxpr, and the same object where it reads no table by index."""
    tables = set(tables)

    def rewritten(eqn: JaxprEqn) -> JaxprEqn:
        reads = [is_var(v) and v in tables for v in eqn.invars]
        if eqn.primitive.name in LAID_OUT and reads[0]:
            tables.update(eqn.outvars)
        if eqn.primitive.name == "gather" and reads[0]:
            return _rows_summed_wide(eqn)
        if not (any(reads) and is_call(eqn)):
            return eqn
        inner, _ = _compat.inner_jaxpr(eqn)
        new = _summed_wide(inner, {*itertools.compress(inner.invars, reads)})
        return eqn if new is inner else running(eqn, new)

    eqns = list(map(rewritten, jaxpr.eqns))
    is_same = all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


def _rows_summed_wide(eqn: JaxprEqn) -> JaxprEqn:
    table, indices = map(type_of, eqn.invars)

    def read(table: Array, indices: Array) -> Array:
        return _compat.bind(eqn, [table, indices])[0]

    def backward(indices: Array, grad: Array) -> tuple[Array, None]:
        wide = jax.ShapeDtypeStruct(table.shape, jnp.float32)
        transposed = jax.linear_transpose(lambda table: read(table, indices), wide)
        return transposed(grad.astype(wide.dtype))[0].astype(table.dtype), None

    rows = jax.custom_vjp(read)
    rows.defvjp(lambda table, indices: (read(table, indices), indices), backward)
    (new,) = jax.make_jaxpr(rows)(table, indices).eqns
    return new.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
