"""An optimizer's update: traced once for a plan and its steps, and divided into parts.

What reads the same state in host memory is one part: of Adam a parameter with its two moments, of
an optimizer that sums over all parameters (Prodigy) everything. Such a part may run layer by layer
where the note in `rules.py` proves that; what it needs that comes from gradients and
parameters alone, such as their global norm, is computed before.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Var
from jax.sharding import AbstractMesh

from zerojax._kernel.jaxprs import is_var, type_of
from zerojax._types import PyTree
from zerojax._update import rules as _rules
from zerojax._update.rules import SAME, Flat, Label

OTHER_PROGRAM = "the optimizer's update of one layer is not the update of a stack"
SETTINGS = """
jax_default_matmul_precision jax_default_prng_impl jax_enable_x64 jax_numpy_dtype_promotion
jax_threefry_partitionable
"""
TOGETHER = "the update reads it with other leaves"


class Update:
    """The next leaves of a state as a function of a list of arrays, first of them the gradients.

    It is traced once for the shapes that it is asked for, of which `shapes` are those that the plan
    knows. Updates that have the same `identity` are the same function, and may share their traces.
    """

    def __init__(
        self, function: Callable[[list], list], shapes: list[PyTree], identity: Hashable = None
    ) -> None:
        self.function, self.shapes, self.identity = function, shapes, identity
        self.traces: dict[Hashable, Flat] = {}

    def sharing(self, other: "Update | None") -> "Update":
        """Takes the traces of another update, if that is the same function."""
        if other is not None and other.identity == self.identity:
            self.traces = other.traces
        return self

    def traced(self, shapes: Sequence[PyTree]) -> Flat:
        """Returns the update as a program, without what nothing reads."""
        types = [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in shapes]
        # A user may have set these since; an update may name axes of the mesh.
        settings = [getattr(jax.config, name) for name in SETTINGS.split()]
        key = jax.sharding.get_abstract_mesh(), *settings, *types
        program = self.traces.get(key)
        if program is None:
            closed = jax.make_jaxpr(self.function)(list(shapes))
            program = _rules.flat(closed.jaxpr, closed.consts)
            program = program.cut(program.outvars)
            if not any(isinstance(value, Tracer) for value in program.constants.values()):
                self.traces[key] = program
        return program


def on_no_mesh() -> AbstractContextManager:
    """Has an update traced as on one device: a mesh of Explicit axes would refuse some."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


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


class InParts:
    """An update in parts, which is traced for whole stacks and for one layer of each.

    `streamed` has the positions of the inputs that rest in host memory, or are updated in backward;
    `stacked` those of the stacks of layers.
    """

    def __init__(
        self,
        update: Update,
        shapes: Sequence[PyTree],
        streamed: Set[int],
        stacked: Set[int],
    ) -> None:
        self.streamed, self.stacked = streamed, stacked
        self.full = update.traced(shapes)
        self.sources = self.full.origins(streamed)
        try:
            layers = [_of_layer(s) if i in stacked else s for i, s in enumerate(shapes)]
            self.one = update.traced(layers)
        except Exception:  # an update may be for its own shapes alone
            self.one = dataclasses.replace(self.full, eqns=[])
        self.before: list[tuple[Var, Var]] = []  # what is computed once, with its partner in `one`
        self.labels: dict[Any, Label] = {}
        self.mixers: dict[Var, str] = {}
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
        alone = len(stacks) == len(inputs)
        if not mixed and len(lengths) == 1 and alone:
            return Part(inputs, outputs, lengths.pop())
        by = ", ".join(dict.fromkeys(self.mixers[v] for v in mixed if v in self.mixers))
        why = f"{by} mixes {'layers' if alone else 'leaves'}"
        return Part(inputs, outputs, why=why if by else TOGETHER)

    def mixes(self, k: int) -> bool:
        """Whether a result is not proved to be computed layer by layer."""
        pair = self.full.outvars[k], self.one.outvars[k]
        return not self.alike or _rules.label(*pair, self.labels) != 0

    def beforehand(self, free: Sequence[int]) -> Flat:
        """Returns what is computed once: these of the free results, then what the parts need that
        is not theirs."""
        return self.full.cut([*(self.full.outvars[k] for k in free), *(v for v, _ in self.before)])

    def whole(self, part: Part) -> Flat:
        """Returns what computes the results of a part."""
        return self.full.cut([self.full.outvars[k] for k in part.outputs])

    def of_layer(self, outputs: Sequence[int]) -> Flat:
        """Returns what computes one layer of some results.

        Its inputs are followed by what `beforehand` returned for it.
        """
        given = [w for _, w in self.before]
        eqns = [e for e in self.one.eqns if not any(v in given for v in e.outvars)]
        cut = dataclasses.replace(self.one, invars=[*self.one.invars, *given], eqns=eqns)
        return cut.cut([self.one.outvars[k] for k in outputs])


def _of_layer(stack: PyTree) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *stack.shape[1:]), stack.dtype)
