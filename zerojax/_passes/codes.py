"""Lets a loss read weights that rest as codes: traced with the weights, it runs on the codes.

A loss is traced as if each `Packed` were its weight, so that no model sees a code. Then the jaxpr
is rewritten: its inputs become the codes, which go into loops, remats and calls in place of the
weight, and a weight is decoded before the first equation that computes with it. So only codes
travel: to the engine, the decoding of a layer is part of the prefix, which follows each gather.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var

from zerojax import _compat
from zerojax._jaxprs import Atom, Eqn, is_call, is_var, running, type_of, with_params, with_sizes
from zerojax._passes.loss import Loss
from zerojax._state.packed import Coding, Packed, is_packed
from zerojax._types import PyTree, Shape

# Equations that change no element of a weight. What they say of its sharding, its codes have too.
_UNCHANGED = frozenset({"copy", "copy_p", "sharding_constraint", "stop_gradient"})
_VIEWS = frozenset({"slice", "dynamic_slice", "reshape", "squeeze"})
NAN = 255  # in all bytes of a row: its scales are NaN
Codings = tuple[Coding | None, ...]


def as_weights(tree: PyTree) -> PyTree:
    """Returns a tree with the shapes of weights in place of the shapes of their codes."""

    def weight(node: PyTree) -> PyTree:
        if not is_packed(node):
            return node
        rows, coding = node.rows, node.coding
        return Packed(rows.update(shape=node.shape, dtype=coding.dtype), coding)

    return jax.tree.map(weight, tree, is_leaf=is_packed)


def without_nodes(tree: PyTree) -> PyTree:
    """Returns a tree as a model knows it, of one that has weights in place of codes."""
    return jax.tree.map(lambda x: x.rows if is_packed(x) else x, tree, is_leaf=is_packed)


def read_as_codes(loss: Loss, codings: Sequence[Coding | None]) -> Loss:
    """Returns a loss that takes codes in place of the weights among its first inputs."""

    @functools.cache  # always to the same object: equal layers share a jaxpr
    def on_codes(jaxpr: Jaxpr, codings: Codings) -> Jaxpr:
        return _Level(jaxpr, codings, on_codes, decoding).rewritten()

    @functools.cache
    def decoding(coding: Coding, shape: Shape) -> JaxprEqn:
        (eqn,) = jax.make_jaxpr(coding.weight_of)(jax.ShapeDtypeStruct(shape, jnp.uint8)).eqns
        return eqn

    others = [None] * (len(loss.jaxpr.invars) - len(codings))
    return dataclasses.replace(loss, jaxpr=on_codes(loss.jaxpr, (*codings, *others)))


class _Level:
    """One jaxpr on its way to another. `on_codes` rewrites those in it, and `decoding` returns the
    equation that decodes rows of a shape."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        codings: Codings,
        on_codes: Callable[[Jaxpr, Codings], Jaxpr],
        decoding: Callable[[Coding, Shape], JaxprEqn],
    ) -> None:
        self.on_codes, self.decoding = on_codes, decoding
        self.jaxpr, self.eqns = jaxpr, list[JaxprEqn]()
        # Of each weight, the variable of its codes.
        self.codes: dict[Var, tuple[Var, Coding]] = {}
        self.decoded: set[Var] = set()
        self.invars = list(jaxpr.invars)
        for at, (var, coding) in enumerate(zip(jaxpr.invars, codings, strict=True)):
            if coding:
                self.invars[at] = self.named(var, type_of(var).shape, coding)

    def named(self, weight: Var, shape: tuple[int, ...], coding: Coding) -> Var:
        aval: ShapedArray = type_of(weight)
        codes = aval.update(shape=(*shape[:-1], coding.row), dtype=jnp.dtype(jnp.uint8))
        self.codes[weight] = var = _compat.fresh(weight, codes), coding
        return var[0]

    def rewritten(self) -> Jaxpr:
        for eqn in self.jaxpr.eqns:
            if any(is_var(v) and v in self.codes for v in eqn.invars):
                self.visit(eqn)
            else:
                self.eqns.append(eqn)
        for var in self.jaxpr.outvars:
            self.decode(var, None)
        return self.jaxpr.replace(invars=self.invars, eqns=self.eqns)

    def visit(self, eqn: JaxprEqn) -> None:
        name, weight = eqn.primitive.name, eqn.invars[0]
        if is_var(weight) and weight in self.codes and self.viewed(eqn, *self.codes[weight]):
            return
        takes = [False] * len(eqn.invars)
        if name == "scan":
            consts, carry, xs = Eqn(eqn).parts(eqn.invars)
            takes = [True] * len(consts) + [False] * len(carry)
            takes += [type_of(v).ndim > 1 for v in xs]
        elif name in _compat.REMAT:
            takes = [True] * len(eqn.invars)
        elif is_call(eqn):
            takes = [is_var(v) and v not in self.decoded for v in eqn.invars]
        invars: list[Atom] = []
        codings: list[Coding | None] = []
        for atom, as_codes in zip(eqn.invars, takes, strict=True):
            found = self.codes.get(atom) if is_var(atom) else None
            if found is not None and not as_codes:
                self.decode(atom, eqn)
                found = None
            codes, coding = found or (atom, None)
            invars.append(codes)
            codings.append(coding)
        eqn = eqn.replace(invars=invars)
        if any(codings):
            eqn = running(eqn, self.on_codes(_compat.inner_jaxpr(eqn)[0], tuple(codings)))
        self.eqns.append(eqn)

    def decode(self, weight: Atom, reader: JaxprEqn | None) -> None:
        """Decodes a weight once, in the name scope of its reader: later equations read it too."""
        if is_var(weight) and weight in self.codes and weight not in self.decoded:
            codes, coding = self.codes[weight]
            self.decoded.add(weight)
            eqn = self.decoding(coding, type_of(codes).shape)
            eqn = eqn.replace(invars=[codes], outvars=[weight])
            self.eqns.append(eqn.replace(source_info=reader.source_info) if reader else eqn)

    def viewed(self, eqn: JaxprEqn, codes: Var, coding: Coding) -> bool:
        """Takes a slice, a reshape, a cast or rows of a weight as those of its codes, if it is."""
        name, result = eqn.primitive.name, eqn.outvars[0]
        before, after = type_of(eqn.invars[0]).shape, type_of(result).shape
        if name in _UNCHANGED:
            self.codes[result] = codes, coding
            return True
        if name == "convert_element_type" and coding.dtype == jnp.float32:
            self.codes[result] = codes, dataclasses.replace(coding, dtype=type_of(result).dtype)
            return True
        if not after or after[-1] != before[-1] or len(before) < 2:
            return False
        fill, changed = Eqn(eqn).fill_value, Eqn(eqn).dimensions
        if name == "gather" and _takes_rows(eqn):
            eqn = with_params(eqn, fill_value=NAN if fill else fill)
        elif name not in _VIEWS or len(before) - 1 in changed:
            return False
        eqn = with_sizes(eqn, lambda sizes: (*sizes[:-1], coding.row))
        new = self.named(result, after, coding)
        self.eqns.append(eqn.replace(invars=[codes, *eqn.invars[1:]], outvars=[new]))
        return True


def _takes_rows(eqn: JaxprEqn) -> bool:
    """Whether a gather takes whole rows, as from a table of embeddings.

    Those of indices that are out of bounds may be NaN or 0, which bytes can say.
    """
    params, rank = Eqn(eqn), type_of(eqn.invars[0]).ndim
    if params.fill_value and not np.isnan(params.fill_value):
        return False
    at = params.dimension_numbers
    last = rank - 1
    indexed = (*at.collapsed_slice_dims, *at.start_index_map, *at.operand_batching_dims)
    return last not in indexed and at.offset_dims[-1:] == (type_of(eqn.outvars[0]).ndim - 1,)
