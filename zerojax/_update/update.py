"""An optimizer's update as a program, and the parts that it divides into.

Results that read the same state in host memory are one part: with Adam a parameter and its two
moments, with an optimizer that sums over all parameters (Prodigy) everything. A part may run layer
by layer where the note in `rules.py` proves that. What it needs that depends only on gradients and
on state on the devices, such as a global norm, is computed before.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Var
from jax.sharding import AbstractMesh

from zerojax._jaxprs import Atom, is_var, type_of
from zerojax._types import PyTree
from zerojax._update import rules as _rules
from zerojax._update.rules import SAME, Flat, Label

OTHER_PROGRAM = "the optimizer's update of one layer is not the update of a stack"
TOGETHER = "the update reads it with other leaves"


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The next leaves of a state as a function of a list of arrays, first of them the gradients.

    `shapes` are the types that the plan knows. JAX keeps its traces by function and types. So
    updates of the same `identity`, which would compute the same, share one `function`. `known` are
    the results of some equations of its program, by their positions.
    """

    function: Callable[[list], list]
    shapes: Sequence[PyTree]
    identity: Hashable = None
    known: Mapping[int, Array] = dataclasses.field(default_factory=dict)

    def traced(self, shapes: Sequence[PyTree]) -> Flat:
        """Returns the update as a program, without operations whose results nothing reads."""
        closed = jax.make_jaxpr(self.function)(list(shapes))
        program = _rules.flat(closed.jaxpr, closed.consts)
        program = program.cut(program.outvars)
        known = {program.eqns[k].outvars[0]: value for k, value in self.known.items()}
        known = {v: jnp.asarray(value, type_of(v).dtype) for v, value in known.items()}
        return program.knowing(known).cut(program.outvars)


def on_no_mesh() -> AbstractContextManager:
    """Traces an update as on one device, because a mesh of Explicit axes would refuse some."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


@dataclasses.dataclass(frozen=True)
class Part:
    """The positions of results that read the same state in host memory, and those of that state.

    A part runs layer by layer, over `length` layers, or at once (0). If it has stacks, `why` says
    what prevents the former.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    length: int = 0
    why: str = ""


class InParts:
    """An update in parts, traced for whole stacks and for one layer of each.

    `streamed` has the positions of the inputs that rest in host memory or that backward updates,
    `stacked` those of the stacks of layers. The programs are divided at `sums`.
    """

    def __init__(
        self,
        update: Update,
        shapes: Sequence[PyTree],
        streamed: Set[int],
        stacked: Set[int],
        sums: Sequence[int] = (),
    ) -> None:
        self.streamed, self.stacked, self.sums = streamed, stacked, sums
        self.full = update.traced(shapes).divided(sums)
        self.sources = self.full.origins({i: self.full.invars[i] for i in streamed})
        layers = [
            jax.ShapeDtypeStruct((1, *s.shape[1:]), s.dtype) if i in stacked else s
            for i, s in enumerate(shapes)
        ]
        try:
            self.one = update.traced(layers).divided(sums)
        # A user's update that takes only its own shapes may raise anything; it then runs at once.
        except Exception:
            self.one = dataclasses.replace(self.full, eqns=[])
        self.before: list[tuple[Var, Var]] = []  # values computed once, with partners in `one`
        self.labels: dict[Var, Label] = {}
        self.mixers: dict[Atom, str] = {}
        self.alike = self.full.is_like(self.one)
        if self.alike:
            inputs: list[Label] = [0 if i in stacked else SAME for i in range(len(shapes))]
            programs = self.full, self.one
            self.labels, self.mixers = _rules.labelled(*programs, inputs, self._is_known)

    def _is_known(self, v: Var, w: Var) -> bool:
        is_known = v not in self.sources and _rules.agrees(SAME, v, w)
        self.before += [(v, w)] * is_known
        return is_known

    @functools.cached_property
    def parts(self) -> list[Part]:
        groups: list[tuple[frozenset[int], list[int]]] = []
        for k, v in enumerate(self.full.outvars):
            inputs, outputs = self.sources.get(v) if is_var(v) else None, [k]
            if inputs is None:
                continue
            for group in [group for group in groups if group[0] & inputs]:
                inputs, outputs = inputs | group[0], group[1] + outputs
                groups.remove(group)
            groups.append((inputs, outputs))
        return [self._part(tuple(sorted(i)), tuple(sorted(o))) for i, o in groups]

    def _part(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Part:
        stacks = [self.full.invars[i] for i in inputs if i in self.stacked]
        if not stacks or not self.alike:
            return Part(inputs, outputs, why=OTHER_PROGRAM if stacks else "")
        lengths = {type_of(v).shape[0] for v in stacks}
        mixed = [self.full.outvars[k] for k in outputs if self.mixes(k)]
        only_stacks = len(stacks) == len(inputs)
        if not mixed and len(lengths) == 1 and only_stacks:
            return Part(inputs, outputs, lengths.pop())
        by = ", ".join(dict.fromkeys(self.mixers[v] for v in mixed if v in self.mixers))
        why = f"{by} mixes {'layers' if only_stacks else 'leaves'}"
        return Part(inputs, outputs, why=why if by else TOGETHER)

    def mixes(self, k: int) -> bool:
        """Whether the rules do not prove that a result is computed layer by layer."""
        pair = self.full.outvars[k], self.one.outvars[k]
        return not self.alike or _rules.label(*pair, self.labels) != 0

    def beforehand(self, free: Sequence[int]) -> Flat:
        """Returns the program of what is computed once: these of the free results, then the values
        that parts need from outside."""
        return self.full.cut([*(self.full.outvars[k] for k in free), *(v for v, _ in self.before)])

    def whole(self, part: Part) -> Flat:
        """Returns the program for the results of a part."""
        return self.full.cut([self.full.outvars[k] for k in part.outputs])

    def of_layer(self, outputs: Sequence[int], before: Sequence[Array]) -> Flat:
        """Returns the program for one layer of some results, with what `beforehand` computes."""
        known = dict(zip((w for _, w in self.before), before, strict=True))
        return self.one.knowing(known).cut([self.one.outvars[k] for k in outputs])
