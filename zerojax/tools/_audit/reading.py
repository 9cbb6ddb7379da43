"""A compiled module read against a plan: its arguments by path, and what its collectives serve.

Weights are known by the argument they come from, gradients and updated parameters by the output
they end up in.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from zerojax._features import rows as _rows
from zerojax._plan import show as _show
from zerojax._plan.plan import LeafPlan, Plan
from zerojax._state import state as _state
from zerojax._wire import codecs as _codecs
from zerojax.tools._audit.measured import OURS, Part, Traffic
from zerojax.tools._hlo.groups import Group
from zerojax.tools._hlo.lineage import NONE, Lineage
from zerojax.tools._hlo.module import Instruction, Module
from zerojax.tools._hlo.schedule import REDUCING, Collective

STATE = (_state.PARAMS, _state.OPT_STATE, _state.OTHER)
Made = tuple[str, int]  # an array that a collective makes: its name, and which of its results


class Reading:
    """A module whose arguments are known by their paths in the state, and by kind.

    `weights` follows every argument, by its number, through the module; `gradients` follows what
    collectives reduce, and `updated` what they gather, to the outputs.
    """

    def __init__(self, module: Module, plan: Plan | None) -> None:
        self.module, self.plan = module, plan
        self.leaves = {leaf.path: leaf for leaf in plan.leaves} if plan else {}
        self.paths = [parameter_path(parameter) for parameter in module.parameters]
        self.kinds = [self._kind(path) for path in self.paths]
        bare: list[frozenset[Made]] = [NONE] * len(self.paths)
        numbers = [frozenset([i]) for i in range(len(self.paths))]
        self.weights = Lineage(module, numbers, through=_codecs.ENCODING)
        self.gradients = Lineage(module, bare, _made_by(*REDUCING), arithmetic=True)
        # Stages 1 and 2 gather the updated parameters.
        self.updated = Lineage(module, bare, _made_by("all-gather"))

    def _kind(self, path: str) -> str:
        if self.plan is not None:
            return self.leaves[path].kind if path in self.leaves else "batch"
        first = path.split("/")[0]
        return first if first in (_state.PARAMS, _state.OPT_STATE) else "batch"

    @functools.cached_property
    def of_weights(self) -> set[int]:
        """The arguments that are parameters: a batch is copied, too."""
        return {n for n, kind in enumerate(self.kinds) if kind == _state.PARAMS}

    @functools.cached_property
    def served(self) -> dict[Made, list[str]]:
        """The leaves of the state that each array of a collective updates.

        These are parameters where there are any: the same gradient updates their moments.
        """
        found: dict[Made, list[int]] = collections.defaultdict(list)
        for made in (self.gradients, self.updated):
            for output, labels in enumerate(made.outputs):
                for label in labels if output in self.module.aliases else ():
                    found[label].append(self.module.aliases[output])
        served = {}
        for label, numbers in found.items():
            parameters = [n for n in numbers if self.kinds[n] == _state.PARAMS]
            served[label] = [self.paths[n] for n in parameters or numbers]
        return served

    def traffic(self, collective: Collective, per_host: int) -> Traffic:
        """Describes a collective: what it moves, for which parameters, over which devices."""
        instruction, group = collective.instruction, collective.group
        return Traffic(
            name=instruction.name,
            kind=collective.kind,
            parts=tuple(self._parts(collective)),
            wire_bytes=collective.wire,
            network_bytes=collective.network,
            trips=collective.trips,
            loops=collective.loops,
            group=len(group.members),
            on_host=group.on_host(per_host),
            axes=group.axes if self.plan is None else _axes(group, self.plan),
            asynchronous=collective.asynchronous,
            seconds=collective.seconds,
            between=collective.between,
            exposed=collective.exposed,
            scope=instruction.op_name,
            source=self.module.source(instruction, OURS),
        )

    def _parts(self, collective: Collective) -> Iterator[Part]:
        """Yields the arrays of a collective, each with the parameters it belongs to."""
        instruction = collective.instruction
        origins = [
            labels
            for operand in instruction.operands
            for labels in self.weights.values.get((collective.computation, operand), [])
        ]
        rows_of = _rows.parameter(instruction.op_name) if collective.kind == "all-to-all" else None
        for at, array in enumerate(collective.arrays):
            known = [rows_of] if rows_of else self.served.get((instruction.name, at))
            if known is None:
                numbers = sorted(origins[at]) if at < len(origins) else []
                known = [self.paths[number] for number in numbers if self.paths[number]]
            yield Part(str(array), array.dtype, array.size, array.nbytes, tuple(known))

    def not_donated(self) -> Iterator[str]:
        """Yields the leaves of the state whose memory no output reuses."""
        donated = set(self.module.aliases.values())
        for number, (path, kind) in enumerate(zip(self.paths, self.kinds, strict=True)):
            if kind in STATE and number not in donated:
                yield path

    def misplaced(self) -> Iterator[tuple[str, str]]:
        """Yields the leaves that arrive in shards of another size than the plan's, and how."""
        for parameter, path in zip(self.module.parameters, self.paths, strict=True):
            leaf = self.leaves.get(path)
            if leaf is None or self.plan is None or not parameter.arrays:
                continue
            if leaf.bytes_per_device(self.plan.mesh) != parameter.nbytes:
                yield path, f"{parameter.arrays[0]} per device of {_show.shape_text(leaf)}"

    def kept(self) -> Iterator[tuple[str, str]]:
        """Yields stacks of full weights, all layers of them, that a loop passes on."""
        if self.plan is None or not self.plan.groups.params:
            return
        stacked = {leaf.path: leaf for leaf in self.plan.params if leaf.stacked}
        for (computation, name), labels in self.weights.values.items():
            instruction = self.module.computations[computation][name]
            if instruction.opcode == "while":
                for array, numbers in zip(instruction.arrays, labels, strict=True):
                    for number in numbers:
                        leaf = stacked.get(self.paths[number])
                        if leaf and leaf.dim is not None and array.size in _full_sizes(leaf):
                            yield leaf.path, str(array)


def _full_sizes(leaf: LeafPlan) -> set[int]:
    """Returns the elements of a leaf that was gathered, before its padding is dropped and after."""
    return {math.prod(leaf.padded_shape), math.prod(leaf.shape)}


def parameter_path(parameter: Instruction) -> str:
    """Returns 'params/blocks/w' for an argument that JAX named state.params['blocks']['w']."""
    name = parameter.op_name.replace("\\", "")
    parts = re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]", name)
    first = re.match(r"\w*", name)
    return "/".join("".join(part) for part in parts) or (first[0] if first else "")


def _axes(group: Group, plan: Plan) -> tuple[str, ...] | None:
    """Returns the mesh axes that a group spans, by the plan's names; XLA may use others."""
    if plan.mesh.devices.size <= max(group.members):
        return None
    places = np.unravel_index(group.members, plan.mesh.devices.shape)  # an array for each axis
    pairs = zip(plan.mesh.axis_names, places, strict=True)
    return tuple(name for name, at in pairs if len(set(at)) > 1)


def _made_by(*kinds: str) -> Callable[[Instruction], list[frozenset[Made]]]:
    """Returns a function that labels each array that collectives of these kinds make."""

    def made(instruction: Instruction) -> list[frozenset[Made]]:
        if instruction.base not in kinds or instruction.opcode.endswith("-done"):
            return []
        return [frozenset([(instruction.name, i)]) for i in range(len(instruction.operands))]

    return made
