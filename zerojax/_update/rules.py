"""Programs without calls, and how layers pass through their equations.

[Note: one layer at a time] An update is traced twice, with whole stacks of L layers and with stacks
of one layer. If both traces have the same equations, each value of the first has a partner in the
second, and a label says how the two are related, whichever layer the second one gets:

- SAME: they are equal.
- a dimension: the second is one layer of the first, along it.
- MIXED: neither is known to hold. An equation without a rule here gives that.

So a result with the label 0 may be computed layer by layer. Numbers that a trace took from a shape
(the divisor of a mean over a stack) are literals that differ, and mix.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._jaxprs import (
    ELEMENTWISE,
    Atom,
    Eqn,
    Inliner,
    alive,
    evaluate,
    is_function,
    is_var,
    params_of,
    primitives,
    read,
    reads,
    type_of,
)
from zerojax._parallel import parallel

SAME, MIXED = "same", "mixed"
Label = int | str
MOVED = ELEMENTWISE | primitives(
    "broadcast_in_dim concatenate dot_general pad slice squeeze transpose"
)
SUMS = {"reduce_sum": jnp.floating, "reduce_or": jnp.bool_}


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr with its calls expanded; `constants` are the arrays that it closes over."""

    invars: list[Var]
    eqns: list[JaxprEqn]
    outvars: list[Atom]
    constants: dict[Var, Any]

    def __call__(self, inputs: Sequence[ArrayLike | None]) -> list[Any]:
        """Runs the program. Inputs that it never reads may be None."""
        env: dict[Var, Any] = dict(zip(self.invars, inputs, strict=True)) | self.constants
        evaluate(self.eqns, env)
        return read(env, self.outvars)

    def cut(self, outvars: list[Atom]) -> "Flat":
        """Returns the part of the program that computes some of its variables."""
        eqns = alive(self.eqns, outvars, reads)
        return dataclasses.replace(self, eqns=eqns, outvars=outvars)

    def knowing(self, known: Mapping[Var, Any]) -> "Flat":
        """Returns the program with values of some variables; None for those that a caller adds."""
        eqns = [eqn for eqn in self.eqns if known.keys().isdisjoint(eqn.outvars)]
        return dataclasses.replace(self, eqns=eqns, constants={**self.constants, **known})

    def divided(self, sums: Sequence[int]) -> "Flat":
        """Returns the program at both sides of some sums, equations by their positions: it also
        returns what they add up, and a caller adds the results."""
        eqns = [self.eqns[k] for k in sums]
        assert all(map(is_sum, eqns))
        outvars = [*self.outvars, *(eqn.invars[0] for eqn in eqns)]
        known = self.knowing({eqn.outvars[0]: None for eqn in eqns})
        return dataclasses.replace(known, outvars=outvars)

    @property
    def used(self) -> set[Var]:
        """The variables that its equations read, and its results."""
        return {v for eqn in self.eqns for v in reads(eqn)} | set(filter(is_var, self.outvars))

    def read(self) -> set[int]:
        """Returns the positions of the inputs that the program reads."""
        used = self.used
        return {i for i, v in enumerate(self.invars) if v in used}

    @property
    def variables(self) -> list[Var]:
        """All variables, in an order that is the same for programs that are alike."""
        return [*self.constants, *self.invars, *(v for eqn in self.eqns for v in eqn.outvars)]

    def origins(self, first: Mapping[int, Var]) -> dict[Atom, frozenset[int]]:
        """Returns, for each variable, which of some variables it depends on."""
        origins: dict[Atom, frozenset[int]] = {v: frozenset([i]) for i, v in first.items()}
        for eqn in self.eqns:
            sources = frozenset[int]().union(*(origins.get(v, ()) for v in reads(eqn)))
            origins.update(dict.fromkeys(eqn.outvars, sources) if sources else {})
        return origins

    def is_like(self, other: "Flat") -> bool:
        """Whether two programs run the same operations in the same order."""
        return [e.primitive for e in self.eqns] == [e.primitive for e in other.eqns]


def is_sum(eqn: JaxprEqn) -> bool:
    """Whether an equation adds up all of an array, or asks whether anything there is true."""
    if eqn.primitive.name not in SUMS or not is_var(eqn.invars[0]):
        return False
    out = type_of(eqn.outvars[0])
    return out.shape == () and jnp.issubdtype(out.dtype, SUMS[eqn.primitive.name])


def sums_of(program: Flat, grads: int, leaves: int) -> list[int]:
    """Returns the sums at which an update divides: equations, by their positions.

    A sum adds up what follows from gradients, which are the first inputs, from the state, which
    ends at `leaves`, and from other sums. Layers add up their parts while they are updated, and
    other leaves may read the result: the norm of all gradients, say, where a state keeps it.
    """
    sums = [k for k, eqn in enumerate(program.eqns) if is_sum(eqn)]
    origins = program.divided(sums).origins(dict(enumerate(program.invars)))
    inputs = {k: origins.get(program.eqns[k].invars[0], (leaves,)) for k in sums}
    return [k for k in sums if min(inputs[k]) < grads and max(inputs[k]) < leaves]


def flat(jaxpr: Jaxpr, consts: Sequence[ArrayLike] = ()) -> Flat:
    inliner = Inliner()
    eqns = list(inliner.flat(jaxpr.eqns, is_function))
    constants = dict(zip(jaxpr.constvars, consts, strict=True)) | inliner.constants
    return Flat(list(jaxpr.invars), eqns, list(map(inliner.named, jaxpr.outvars)), constants)


_ADDS = frozenset({"add", "add_any"})
_PASSING = _ADDS | {"convert_element_type", "copy", "select_n"}


def same_values(program: Flat) -> dict[Var, Var]:
    """Returns, by variable, the input that it is. Adding zeros, as optax does to what is frozen,
    leaves it what it was."""
    same: dict[Var, Var] = {v: v for v in program.invars}
    zeros: set[Var] = set()

    def is_zero(atom: Atom) -> bool:
        return atom in zeros if is_var(atom) else not np.any(atom.val)

    for eqn in program.eqns:
        name, out = eqn.primitive.name, eqn.outvars[0]
        values = [v for v in eqn.invars if not (name in _ADDS and is_zero(v))]
        if name in ("broadcast_in_dim", "convert_element_type") and is_zero(eqn.invars[0]):
            zeros.add(out)
        cases = values[1:] if name == "select_n" else values
        found = {same.get(v) if is_var(v) else None for v in cases}
        source = found.pop() if len(found) == 1 and name in _PASSING else None
        if source is not None and _is_of(source, out):
            same[out] = source
    return same


def _is_of(one: Var, other: Var) -> bool:
    return type_of(one).shape == type_of(other).shape and type_of(one).dtype == type_of(other).dtype


def labelled(
    full: Flat,
    one: Flat,
    inputs: Sequence[Label],
    is_known: Callable[[Var, Var], bool] = lambda v, w: False,
) -> tuple[dict[Var, Label], dict[Atom, str]]:
    """Returns the label of each variable of `full`, and the operation that mixes each MIXED one.

    Both programs get the values for which `is_known` holds, so those are the same.
    """
    labels: dict[Var, Label] = dict(zip(full.invars, inputs, strict=True))
    constants = zip(full.constants.items(), one.constants.values(), strict=True)
    labels |= {v: SAME if a is b else MIXED for (v, a), b in constants}
    mixers: dict[Atom, str] = {}
    for a, b in zip(full.eqns, one.eqns, strict=True):
        first = next((mixers[v] for v in reads(a) if v in mixers), a.primitive.name)
        for v, w, label in zip(a.outvars, b.outvars, through(a, b, labels), strict=True):
            labels[v] = SAME if label == MIXED and is_known(v, w) else label
            if labels[v] == MIXED:
                mixers[v] = first
    return labels, mixers


def label(atom: Atom, one: Atom, known: dict[Var, Label]) -> Label:
    """Returns the label of an operand."""
    if is_var(atom) and is_var(one):
        return known[atom]
    if is_var(atom) or is_var(one):
        return MIXED
    a, b = np.asarray(atom.val), np.asarray(one.val)
    same = (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())  # NaN is NaN
    return SAME if same else MIXED


def through(full: JaxprEqn, one: JaxprEqn, known: dict[Var, Label]) -> list[Label]:
    """Returns the labels of an equation's results."""
    operands = [label(a, b, known) for a, b in zip(full.invars, one.invars, strict=True)]
    if MIXED in operands:
        return [MIXED] * len(full.outvars)
    match full.primitive.name:
        case "scan":
            labels = _through_scan(full, one, operands)
        case "cond":
            labels = _through_cond(full, one, operands)
        case "optimization_barrier":
            labels = operands
        case _ if all(operand == SAME for operand in operands):
            labels = [_made(full, one, k) for k in range(len(full.outvars))]
        case _:
            labels = [_moved(full, operands)] * len(full.outvars)
    results = zip(labels, full.outvars, one.outvars, strict=True)
    return [label if agrees(label, v, w) else MIXED for label, v, w in results]


def agrees(label: Label, full: Atom, one: Atom) -> bool:
    """Whether the shapes of two partners agree with their label."""
    a, b = type_of(full).shape, type_of(one).shape
    if isinstance(label, int):
        if not label < len(a) == len(b) or (a[label] <= b[label] != 1):
            return False
        return b == (*a[:label], b[label], *a[label + 1 :])
    return label == MIXED or a == b


def _made(full: JaxprEqn, one: JaxprEqn, k: int) -> Label:
    """Returns the label of a result whose operands are the same in both traces."""
    a, b = type_of(full.outvars[k]).shape, type_of(one.outvars[k]).shape
    name = full.primitive.name
    if a == b:
        return SAME if str(params_of(full)) == str(params_of(one)) else MIXED
    if len(a) != len(b) or name not in ("broadcast_in_dim", "iota"):
        return MIXED
    dim = next(d for d in range(len(a)) if a[d] != b[d])
    varying = [Eqn(full).dimension] if name == "iota" else parallel(full)[0].values()
    return MIXED if dim in varying else dim


def _moved(full: JaxprEqn, labels: Sequence[Label]) -> Label:
    """Returns the dimension of a result that counts the layers of its operands."""
    if full.primitive.name == "reshape" and isinstance(dim := labels[0], int):
        # The dimension of the same length with as many elements before it.
        shape, out = type_of(full.invars[0]).shape, type_of(full.outvars[0]).shape
        ends = (d for d in range(len(out)) if math.prod(out[:d]) == math.prod(shape[:dim]))
        return next((d for d in ends if out[d] == shape[dim]), MIXED)
    is_known = full.primitive.name in MOVED or Eqn(full).reduced
    pairs = zip(parallel(full) if is_known else (), labels, strict=False)
    dims = {moved.get(label, MIXED) for moved, label in pairs if isinstance(label, int)}
    return dims.pop() if len(dims) == 1 else MIXED


# -- loops and branches


def _of_body(pair: Sequence[tuple], operands: Sequence[Label]) -> list[Label]:
    """Returns the labels of the results of an inner jaxpr, a pair of both traces; all MIXED if they
    differ."""
    body, other = (flat(jaxpr, consts) for jaxpr, consts in pair)
    if not body.is_like(other):
        return [MIXED] * len(body.outvars)
    labels, _ = labelled(body, other, operands)
    return [label(v, w, labels) for v, w in zip(body.outvars, other.outvars, strict=True)]


def _through_scan(full: JaxprEqn, one: JaxprEqn, operands: list[Label]) -> list[Label]:
    consts, carry, xs = Eqn(full).parts(operands)
    if 0 in xs or Eqn(full).length != Eqn(one).length:  # 0: a scan over the layers
        return [MIXED] * len(full.outvars)
    slices: list[Label] = [x - 1 if isinstance(x, int) else x for x in xs]
    bodies = _compat.inner_jaxpr(full), _compat.inner_jaxpr(one)
    outs = _of_body(bodies, [*consts, *carry, *slices])
    if outs[: len(carry)] != carry:
        return [MIXED] * len(full.outvars)
    return [*carry, *(y + 1 if isinstance(y, int) else y for y in outs[len(carry) :])]


def _through_cond(full: JaxprEqn, one: JaxprEqn, operands: list[Label]) -> list[Label]:
    branches = zip(_compat.closed_jaxprs(full), _compat.closed_jaxprs(one), strict=True)
    if operands[0] != SAME:
        return [MIXED] * len(full.outvars)
    results = [_of_body(pair, operands[1:]) for pair in branches]
    return [outs[0] if len(set(outs)) == 1 else MIXED for outs in zip(*results, strict=True)]
