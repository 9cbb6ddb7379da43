"""A traced loss in float32 where it computes in 16 bits or fewer.

Gain: rounding no longer hides a loss that means something else on a part of the batch. Costs 50
lines of code.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, Primitive, Var
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._jaxprs import LINEAR, Atom, is_function, mapped_params
from zerojax._types import PyTree

BITS = "bitcast_convert_type"
# The operations of JAX that take floats of any width, all but the one that reads their bits. A
# kernel, or a callback, may take those alone that it was written for.
OF_ANY_WIDTH = {p.name for p in vars(lax).values() if isinstance(p, Primitive)} - {BITS}
OF_ANY_WIDTH |= LINEAR | {"name"}


def is_narrow(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def widened(value: PyTree) -> PyTree:
    """Returns an array or a type with float32 in place of a narrower float."""
    if not is_narrow(getattr(value, "dtype", jnp.int32)):
        return value
    change = value.update if isinstance(value, ShapedArray) else value.astype
    return change(dtype=jnp.float32)


def can_widen(jaxpr: Jaxpr) -> bool:
    """Whether only operations that take floats of any width make narrow ones, or take them."""
    others = (e for e in _compat.every_eqn(jaxpr) if e.primitive.name not in OF_ANY_WIDTH)
    avals = (v.aval for e in others if not is_function(e) for v in (*e.invars, *e.outvars))
    return not any(is_narrow(getattr(aval, "dtype", jnp.int32)) for aval in avals)


def in_float32(loss: Jaxpr) -> Jaxpr:
    @functools.cache  # as JAX does, by identity
    def rewritten(jaxpr: Any) -> Any:
        inner, consts = _compat.opened(jaxpr)
        names: dict[Var, Var] = {}

        def named(atom: Atom) -> Any:
            aval = widened(atom.aval)
            if isinstance(atom, Literal):
                is_wide = aval is atom.aval
                return atom if is_wide else Literal(np.asarray(atom.val, np.float32), aval)
            if isinstance(atom, DropVar):
                return atom
            return names.setdefault(atom, _compat.fresh(atom, aval))

        def typed(code: Any, *places: str) -> Any:
            return code.replace(**{name: [*map(named, getattr(code, name))] for name in places})

        eqns = [typed(mapped_params(eqn, param), "invars", "outvars") for eqn in inner.eqns]
        new = typed(inner.replace(eqns=eqns), "constvars", "invars", "outvars")
        return new if inner is jaxpr and not consts else ClosedJaxpr(new, [*map(widened, consts)])

    def param(name: str, value: PyTree) -> PyTree:
        if name in _compat.THUNKS:
            return _compat.Thunk(value, traced_later)
        if isinstance(value, tuple | list):
            make = getattr(value, "_make", type(value))
            return make(param("", v) for v in value)
        if isinstance(value, np.dtype):
            return jnp.dtype(jnp.float32) if is_narrow(value) else value
        return rewritten(value) if hasattr(value, "eqns") else value

    def traced_later(trace: Any) -> tuple[Any, ...]:
        """Traces a derivative that a user defined."""
        jaxpr, consts, *others = trace()
        return rewritten(jaxpr), [*map(widened, consts)], *others

    return rewritten(loss)
