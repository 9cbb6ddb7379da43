"""An optimizer's update in parts that can run one after another.

What reads the same state in host memory is one part: of Adam a parameter with its two moments, of
an optimizer that sums over all parameters (Prodigy) everything. Such a part may run layer by layer
where the note in `rules.py` proves that; what it needs that comes from gradients and
parameters alone, such as their global norm, is computed before.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._kernel.jaxprs import Atom, Inliner, alive, is_var, reads, type_of
from zerojax._types import PyTree
from zerojax._update import rules as _rules
from zerojax._update.rules import MIXED, SAME, Label

OTHER_PROGRAM = "the optimizer's update of one layer is not the update of a stack"
EXPANDED = _compat.CALLS | _compat.REMAT | {"custom_jvp_call", "custom_vjp_call"}


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr with its calls expanded; `constants` are arrays that it closes over."""

    invars: list[Var]
    eqns: list[JaxprEqn]
    outvars: list[Atom]
    constants: dict[Var, ArrayLike]


def flat(jaxpr: Jaxpr, consts: Sequence[ArrayLike] = ()) -> Flat:
    inliner = Inliner()
    eqns = list(inliner.flat(jaxpr.eqns, lambda eqn: eqn.primitive.name in EXPANDED))
    constants = dict(zip(jaxpr.constvars, consts, strict=True)) | inliner.constants
    return Flat(list(jaxpr.invars), eqns, list(map(inliner.named, jaxpr.outvars)), constants)


@dataclasses.dataclass(frozen=True)
class Part:
    """Results that read the same state in host memory, by their positions and that state's.

    It can run layer by layer, over `length` layers, or at once (0); `why` says what keeps stacks
    from the first.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    length: int = 0
    why: str = ""

    @property
    def by_layer(self) -> bool:
        return self.length > 0

    @property
    def way(self) -> str:
        """How it is updated, for tables."""
        if self.by_layer:
            return "updated layer by layer"
        return f"updated at once: {self.why}" if self.why else "updated at once"


class Update:
    """An update, traced for whole stacks and for one layer of each.

    Arguments:
        function: from a list of arrays to a list of arrays.
        shapes: of its arguments.
        streamed: which of them rest in host memory.
        stacked: which are stacks of layers.
    """

    def __init__(
        self,
        function: Callable[[list], list],
        shapes: Sequence[jax.ShapeDtypeStruct],
        streamed: Sequence[bool],
        stacked: Sequence[bool],
    ) -> None:
        layers = [
            jax.ShapeDtypeStruct((1, *s.shape[1:]), s.dtype) if is_stack else s
            for s, is_stack in zip(shapes, stacked, strict=True)
        ]
        self.function, self.layers = function, layers
        self.streamed, self.stacked = list(streamed), list(stacked)
        self.full = traced(function, shapes)
        self.reads = origins(self.full, streamed)
        try:
            self.one = traced(function, layers)
        except Exception:  # an update may be for its own shapes alone
            self.one = dataclasses.replace(self.full, eqns=[])
        self.alike = same_equations(self.full.eqns, self.one.eqns)
        self.labels, self.before, self.mixers = self._labelled() if self.alike else ({}, [], {})
        self.parts = [self._part(*found) for found in self._joined()]

    @property
    def free(self) -> list[int]:
        """The results that read no state in host memory."""
        return [k for k, v in enumerate(self.full.outvars) if not self._read_by(v)]

    def ways(self, first: int) -> dict[int, str]:
        """Returns, for each input in host memory, how its part is updated; inputs are counted from
        `first` on."""
        return {i - first: part.way for part in self.parts for i in part.inputs}

    def _read_by(self, atom: Atom) -> frozenset[int]:
        return self.reads.get(atom, frozenset()) if is_var(atom) else frozenset()

    def _joined(self) -> Iterator[tuple[frozenset[int], list[int]]]:
        """Yields the streamed inputs of each part, and its results."""
        groups: list[tuple[frozenset[int], list[int]]] = []
        for k, v in enumerate(self.full.outvars):
            mine, outputs = self._read_by(v), [k]
            if not mine:
                continue
            apart = []
            for inputs, others in groups:
                if inputs & mine:
                    mine, outputs = mine | inputs, others + outputs
                else:
                    apart.append((inputs, others))
            groups = [*apart, (mine, outputs)]
        yield from groups

    def _part(self, inputs: frozenset[int], outputs: list[int]) -> Part:
        part = Part(tuple(sorted(inputs)), tuple(sorted(outputs)))
        if not any(self.stacked[i] for i in inputs):
            return part
        if not self.alike:
            return dataclasses.replace(part, why=OTHER_PROGRAM)
        stacks = [self.full.invars[i] for i in part.inputs if self.stacked[i]]
        lengths = {type_of(v).shape[0] for v in stacks}
        mixed = [self.full.outvars[k] for k in part.outputs if self.mixes(k)]
        if not mixed and len(lengths) == 1 and len(stacks) == len(part.inputs):
            return dataclasses.replace(part, length=lengths.pop())
        by = ", ".join(dict.fromkeys(self.mixers[v] for v in mixed if v in self.mixers))
        alone = len(stacks) == len(part.inputs)
        if not by:
            return dataclasses.replace(part, why="the update reads it with other leaves")
        return dataclasses.replace(part, why=f"{by} mixes {'layers' if alone else 'leaves'}")

    def mixes(self, k: int) -> bool:
        """Whether a result is not proved to be computed layer by layer."""
        pair = self.full.outvars[k], self.one.outvars[k]
        return not self.alike or _rules.label(*pair, self.labels) != 0

    def _labelled(self) -> tuple[dict[Any, Label], list[tuple[Var, Var]], dict[Var, str]]:
        """Returns the label of each variable; what must be computed before, with its partner in the
        trace of one layer; and the operations that mix layers."""
        labels: dict[Any, Label] = {
            v: 0 if is_stack else SAME
            for v, is_stack in zip(self.full.invars, self.stacked, strict=True)
        }
        pairs = zip(self.full.constants.items(), self.one.constants.values(), strict=True)
        labels |= {v: SAME if a is b else MIXED for (v, a), b in pairs}
        before: list[tuple[Var, Var]] = []
        mixers: dict[Var, str] = {}
        for full, one in zip(self.full.eqns, self.one.eqns, strict=True):
            found = through(full, one, labels)
            mixed = [mixers[v] for v in reads(full) if v in mixers]
            for v, w, label in zip(full.outvars, one.outvars, found, strict=True):
                if label == MIXED and not self._read_by(v) and _rules.agrees(SAME, v, w):
                    before.append((v, w))
                    label = SAME
                elif label == MIXED:
                    mixers[v] = mixed[0] if mixed else full.primitive.name
                labels[v] = label
        return labels, before, mixers

    # -- the programs

    def beforehand(self, free: Sequence[int]) -> Flat:
        """Returns what is computed once: these of the free results, then what the parts need that
        is not theirs."""
        outvars = [self.full.outvars[k] for k in free]
        return needed(self.full, [*outvars, *(v for v, _ in self.before)])

    def whole(self, part: Part) -> Flat:
        """Returns what computes the results of a part."""
        return needed(self.full, [self.full.outvars[k] for k in part.outputs])

    def of_layer(self, parts: Sequence[Part]) -> Flat:
        """Returns what computes one layer of the results of parts.

        Its inputs are followed by what `beforehand` returned for it.
        """
        given = [w for _, w in self.before]
        eqns = [e for e in self.one.eqns if not any(v in given for v in e.outvars)]
        outvars = [self.one.outvars[k] for part in parts for k in part.outputs]
        cut = Flat([*self.one.invars, *given], eqns, outvars, self.one.constants)
        return needed(cut, outvars)


def needed(program: Flat, outvars: list[Atom]) -> Flat:
    return dataclasses.replace(program, eqns=alive(program.eqns, outvars, reads), outvars=outvars)


def run(program: Flat, inputs: Sequence[ArrayLike | None]) -> list[Any]:
    """Runs a program. Inputs that it does not read may be None."""
    env: dict[Any, Any] = dict(zip(program.invars, inputs, strict=True)) | program.constants
    for eqn in program.eqns:
        values = [env[v] if is_var(v) else v.val for v in eqn.invars]
        env.update(zip(eqn.outvars, _compat.bind(eqn, values), strict=True))
    return [env[v] if is_var(v) else v.val for v in program.outvars]


def inputs_of(program: Flat) -> set[int]:
    """Returns the positions of the inputs that a program reads."""
    read = {v for eqn in program.eqns for v in reads(eqn)} | {
        v for v in program.outvars if is_var(v)
    }
    return {i for i, v in enumerate(program.invars) if v in read}


def traced(function: Callable[[list], list], shapes: Sequence[PyTree]) -> Flat:
    """Returns a function of a list of arrays as a flat jaxpr without what nothing reads."""
    closed = jax.make_jaxpr(function)(list(shapes))
    program = flat(closed.jaxpr, closed.consts)
    return needed(program, program.outvars)


def same_equations(full: Sequence[JaxprEqn], one: Sequence[JaxprEqn]) -> bool:
    return [e.primitive for e in full] == [e.primitive for e in one]


def origins(program: Flat, among: Sequence[bool]) -> dict[Any, frozenset[int]]:
    """Returns which of some inputs each variable comes from."""
    found = {v: frozenset([i]) for i, v in enumerate(program.invars) if among[i]}
    nothing: frozenset[int] = frozenset()
    for eqn in program.eqns:
        read = nothing.union(*(found.get(v, nothing) for v in reads(eqn)))
        found.update(dict.fromkeys(eqn.outvars, read) if read else {})
    return found


# -- loops and branches


def through(full: JaxprEqn, one: JaxprEqn, labels: dict[Any, Label]) -> list[Label]:
    """Returns the labels of an equation's results."""
    operands = [_rules.label(a, b, labels) for a, b in zip(full.invars, one.invars, strict=True)]
    match full.primitive.name:
        case "scan":
            found = _through_scan(full, one, operands)
        case "while":
            found = _through_while(full, one, operands)
        case "cond":
            found = _through_cond(full, one, operands)
        case _:
            return _rules.through(full, one, operands)
    pairs = zip(found, full.outvars, one.outvars, strict=True)
    return [found if _rules.agrees(found, v, w) else MIXED for found, v, w in pairs]


def _of_body(pair: Sequence[tuple], operands: Sequence[Label]) -> list[Label]:
    """Returns the labels of the results of an inner jaxpr, given as both traces have it; all MIXED
    where they differ."""
    body, other = (flat(jaxpr, consts) for jaxpr, consts in pair)
    if not same_equations(body.eqns, other.eqns) or MIXED in operands:
        return [MIXED] * len(body.outvars)
    labels: dict[Any, Label] = dict(zip(body.invars, operands, strict=True))
    pairs = zip(body.constants.items(), other.constants.values(), strict=True)
    labels |= {v: SAME if a is b else MIXED for (v, a), b in pairs}
    for x, y in zip(body.eqns, other.eqns, strict=True):
        labels.update(zip(x.outvars, through(x, y, labels), strict=True))
    return [_rules.label(v, w, labels) for v, w in zip(body.outvars, other.outvars, strict=True)]


def _settled(
    body: Callable[[list[Label]], list[Label]], carry: list[Label]
) -> tuple[list[Label], list[Label]]:
    """Returns the labels of what a loop carries once they change no more, and of all results."""
    while True:
        outs = body(carry)
        pairs = zip(carry, outs[: len(carry)], strict=True)
        joined: list[Label] = [a if a == b else MIXED for a, b in pairs]
        if joined == carry or MIXED in joined:
            return joined, outs
        carry = joined


def _through_scan(full: JaxprEqn, one: JaxprEqn, operands: list[Label]) -> list[Label]:
    nothing: list[Label] = [MIXED] * len(full.outvars)
    if full.params["length"] != one.params["length"]:
        return nothing
    num_consts, num_carry = _compat.scan_counts(full.params)
    consts = operands[:num_consts]
    carry, xs = operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    if 0 in xs or MIXED in operands:  # 0: it walks over the layers
        return nothing
    slices: list[Label] = [x - 1 if isinstance(x, int) else x for x in xs]
    body = _compat.inner_jaxpr(full), _compat.inner_jaxpr(one)
    carry, outs = _settled(lambda carry: _of_body(body, [*consts, *carry, *slices]), carry)
    ys: list[Label] = [y + 1 if isinstance(y, int) else y for y in outs[num_carry:]]
    return nothing if MIXED in carry else [*carry, *ys]


def _through_while(full: JaxprEqn, one: JaxprEqn, operands: list[Label]) -> list[Label]:
    num_cond, num_body = full.params["cond_nconsts"], full.params["body_nconsts"]
    cond_consts, body_consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
    start = operands[num_cond + num_body :]
    cond, body = (
        [_compat.opened(eqn.params[name]) for eqn in (full, one)]
        for name in ("cond_jaxpr", "body_jaxpr")
    )
    carry, _ = _settled(lambda carry: _of_body(body, [*body_consts, *carry]), start)
    goes_on = _of_body(cond, [*cond_consts, *carry])
    return carry if goes_on == [SAME] and MIXED not in carry else [MIXED] * len(full.outvars)


def _through_cond(full: JaxprEqn, one: JaxprEqn, operands: list[Label]) -> list[Label]:
    branches = zip(full.params["branches"], one.params["branches"], strict=True)
    if operands[0] != SAME:
        return [MIXED] * len(full.outvars)
    found = [_of_body(list(map(_compat.opened, pair)), operands[1:]) for pair in branches]
    return [outs[0] if len(set(outs)) == 1 else MIXED for outs in zip(*found, strict=True)]
