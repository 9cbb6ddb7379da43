"""The FLOPs that a model needs, where a jaxpr shows that some of what it multiplies does not count.

A one-hot mask compares an index that was computed with `iota`: that is how a mixture of experts
seats tokens. A matmul of activations by such a mask moves rows, and needs no FLOPs. What a mask
selects of a result is all that is needed of it: of rooms for more tokens than there are, and of all
experts applied to all tokens, the share that the mask may read. Where rows are gathered into rooms,
nothing shows which are empty: all count.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Var

from zerojax import _compat
from zerojax._jaxprs import (
    ELEMENTWISE,
    MOVING,
    Atom,
    Eqn,
    Inliner,
    is_function,
    is_var,
    type_of,
)
from zerojax.tools import _flops

OF_WEIGHTS, CONSTANT = "weight", "constant"
KEPT = {
    "convert_element_type",
    "copy",
    "div",
    "neg",
    "sharding_constraint",
    "stop_gradient",
} | MOVING
PASSED = ELEMENTWISE | {"reshape", "transpose", "squeeze", "expand_dims", "reduce_sum"}


@dataclasses.dataclass(frozen=True)
class Mask:
    """An array with zeros: the masks that it is a product of, by name, with their shares of other
    elements, and the number of elements that were summed into one."""

    shares: frozenset[tuple[Var, float]]
    summed: float = 1.0

    @property
    def share(self) -> float:
        return min(1.0, self.summed * math.prod(share for _, share in self.shares))


Fact: TypeAlias = Mask | int | str | None  # an int: numbers along a dimension of so many elements


def needed(jaxpr: Jaxpr, inputs: Sequence[Fact]) -> float:
    """Counts the FLOPs of a jaxpr's matmuls, with a fact about each input."""
    inliner = Inliner()
    eqns = list(inliner.flat(jaxpr.eqns, is_function))
    facts: dict[Var, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))
    facts |= dict.fromkeys([*jaxpr.constvars, *inliner.constants], CONSTANT)
    for eqn in eqns:
        known = _fact(eqn, _of(facts, eqn.invars))
        facts |= dict.fromkeys(eqn.outvars, known)
    # Backwards: the share of each value that is needed.
    shares: dict[Var, float] = {v: 1.0 for v in map(inliner.named, jaxpr.outvars) if is_var(v)}
    total = 0.0
    for eqn in reversed(eqns):
        share = max((shares.get(v, 0.0) for v in eqn.outvars), default=0.0)
        operands = _of(facts, eqn.invars)
        selected = [_selected(eqn, at, operands) for at in range(len(operands))]
        if share and (flops := _flops.of(eqn)):
            dense = [fact.share for fact in operands if isinstance(fact, Mask)]
            total += 0 if dense and OF_WEIGHTS not in operands else flops * min([share, *dense])
        elif share:
            total += _inside(eqn, operands) * (share if eqn.primitive.name == "shard_map" else 1)
        for at, operand in enumerate(eqn.invars if share else ()):
            if is_var(operand):
                passes = _passes(eqn, operand) or selected[at] < 1
                of = selected[at] * (share if passes else 1.0)
                shares[operand] = max(shares.get(operand, 0.0), of)
    return total


def _of(facts: dict[Var, Fact], atoms: Sequence[Atom]) -> list[Fact]:
    return [facts.get(atom) if is_var(atom) else CONSTANT for atom in atoms]


def _fact(eqn: JaxprEqn, operands: list[Fact]) -> Fact:
    """Returns what is known of an equation's results."""
    name, shapes = eqn.primitive.name, [type_of(v) for v in (*eqn.outvars, *eqn.invars)]
    masks = [fact for fact in operands if isinstance(fact, Mask)]
    indices = [fact for fact in operands if isinstance(fact, int)]
    if name == "iota":
        return shapes[0].shape[Eqn(eqn).dimension]
    if operands and {*operands} <= {OF_WEIGHTS, CONSTANT}:
        return OF_WEIGHTS if OF_WEIGHTS in operands else CONSTANT
    if name == "eq" and len(indices) == 1 and CONSTANT not in operands:
        return Mask(frozenset([(eqn.outvars[0], 1 / indices[0])]))
    if indices and name in ELEMENTWISE | MOVING:
        return indices[0] if {*operands} <= {*indices, CONSTANT} else None
    result: Mask | None = None
    if name == "mul" and masks:
        summed = max(mask.summed for mask in masks)
        result = Mask(frozenset().union(*(mask.shares for mask in masks)), summed)
    elif name in ("add", "add_any") and len(masks) == 2:
        result = Mask(frozenset([(eqn.outvars[0], sum(mask.share for mask in masks))]))
    elif name in KEPT and masks and operands[0] is masks[0] and len({*operands} - {CONSTANT}) < 3:
        result = masks[0]
    elif name == "reduce_sum" and masks:
        summed = masks[0].summed * shapes[1].size / max(shapes[0].size, 1)
        result = dataclasses.replace(masks[0], summed=summed)
    return result if result and result.share < 1 else None


def _selected(eqn: JaxprEqn, at: int, operands: list[Fact]) -> float:
    """Returns the share of an operand that a mask beside it may read."""
    pairs = zip(eqn.invars, operands, strict=True)
    masks = [(v, fact) for v, fact in pairs if isinstance(fact, Mask)]
    if not masks or isinstance(operands[at], Mask) or operands[at] in (OF_WEIGHTS, CONSTANT):
        return 1.0
    (mask, fact), operand = masks[0], eqn.invars[at]
    if eqn.primitive.name == "mul":
        return fact.share
    if eqn.primitive.name != "dot_general":
        return 1.0
    contracting, batch = Eqn(eqn).factors
    shape, inner = type_of(operand).shape, {*contracting[at], *batch[at]}
    rows = math.prod(shape[dim] for dim in inner)
    return min(1.0, fact.share * type_of(mask).size / max(rows, 1))


def _passes(eqn: JaxprEqn, operand: Var) -> bool:
    """Whether no more is needed of an operand than of the result."""
    same = eqn.primitive.name in ("broadcast_in_dim", "gather")  # in another order, perhaps
    same = same and type_of(operand).size == type_of(eqn.outvars[0]).size
    return same or eqn.primitive.name in PASSED or _flops.of(eqn) > 0


def _inside(eqn: JaxprEqn, operands: list[Fact]) -> float:
    """Counts the FLOPs of the jaxprs in an equation: those of a `while` once, of a `cond`'s most
    expensive branch, of a `shard_map` on all devices."""
    name, params = eqn.primitive.name, Eqn(eqn)
    counts = []
    for jaxpr in _compat.inner_jaxprs(eqn):
        given = operands[len(operands) - len(jaxpr.invars) :]
        if name == "scan":
            consts, carry, rows = params.parts(given)
            given = [*consts, *[None] * len(carry), *rows]
        fits = len(given) == len(jaxpr.invars) and name in ("scan", "cond", "shard_map")
        counts.append(needed(jaxpr, given if fits else [None] * len(jaxpr.invars)))
    times = params.length
    if name == "shard_map":
        times = math.prod(params.mesh.shape[axis] for axis in params.newly_manual_axes)
    return times * (max(counts) if name == "cond" else sum(counts))
