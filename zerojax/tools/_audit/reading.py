"""A compiled module read against a plan: its arguments by path, what its collectives serve, and
what its memory holds.

Weights are known by the argument that they come from, gradients and updated parameters by the
output that they end up in.
"""

import collections
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from jax.stages import Compiled

from zerojax._features import rows as _rows
from zerojax._plan import show as _show
from zerojax._plan.plan import Plan
from zerojax._state import state as _state
from zerojax._wire import codecs as _codecs
from zerojax.tools._audit.measurement import OURS, MemoryUse
from zerojax.tools._hlo import flow as _flow
from zerojax.tools._hlo.flow import ARGUMENT, ARITHMETIC, Origin, Value
from zerojax.tools._hlo.module import Array, Instruction, Module
from zerojax.tools._hlo.schedule import Collective

STATE_KINDS = (_state.PARAMS, _state.OPT_STATE, _state.OTHER)


class Reading:
    """A module whose arguments are known by their paths in the state, and by kind."""

    def __init__(self, module: Module, plan: Plan | None, collectives: list[Collective]) -> None:
        self.module, self.plan = module, plan
        self.collectives = collectives
        self.leaves = {leaf.path: leaf for leaf in plan.leaves} if plan else {}
        self.paths = [parameter_path(parameter) for parameter in module.parameters]
        kinds = {path: leaf.kind for path, leaf in self.leaves.items()}
        if plan is None:
            firsts = {path: path.split("/")[0] for path in self.paths}
            kinds = {path: kind for path, kind in firsts.items() if kind in STATE_KINDS[:2]}
        self.kinds = [kinds.get(path, "batch") for path in self.paths]
        self.lineage = _flow.Lineage(module, through=_codecs.ENCODING)

    @functools.cached_property
    def served(self) -> dict[tuple[str, int], list[str]]:
        """The leaves of the state that each array of a collective updates: gradients, and at stages
        1 and 2 the updated parameters that are gathered.

        These are parameters where there are any: the same gradient updates their moments.
        """
        numbers: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
        for output, number in self.module.aliases.items():
            for kind, name, at in self.lineage.outputs[output]:
                if kind != ARGUMENT:
                    numbers[name, at].append(number)
        params = {n for n, kind in enumerate(self.kinds) if kind == _state.PARAMS}
        return {
            array: [self.paths[n] for n in [n for n in of if n in params] or of]
            for array, of in numbers.items()
        }

    def traffic(self) -> list[Collective]:
        """Returns the collectives with the parameters, mesh axes and lines that they serve."""
        return [
            dataclasses.replace(
                one,
                parts=tuple(self._parts(one)),
                axes=one.axes if self.plan is None else _axes(one.members, self.plan),
                source=self.module.source(one.instruction, OURS),
            )
            for one in self.collectives
        ]

    def _parts(self, one: Collective) -> Iterator[Array]:
        """Yields the arrays of a collective, each with the parameters that it belongs to."""
        operands = one.instruction.operands
        origins = [labels for x in operands for labels in self.lineage.values.get(x, [])]
        rows_of = _rows.parameter(one.scope) if one.kind == "all-to-all" else None
        for at, part in enumerate(one.parts):
            paths = [rows_of] if rows_of else self.served.get((one.name, at))
            if paths is None:
                arguments = _arguments(origins[at] if at < len(origins) else ())
                paths = [self.paths[number] for number in arguments if self.paths[number]]
            yield dataclasses.replace(part, paths=tuple(paths))

    def not_donated(self) -> Iterator[str]:
        """Yields the leaves of the state whose memory no output reuses."""
        donated = set(self.module.aliases.values())
        for number, (path, kind) in enumerate(zip(self.paths, self.kinds, strict=True)):
            if kind in STATE_KINDS and number not in donated:
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
        sharded = (leaf for leaf in self.plan.params if leaf.dim is not None)
        stacked = {leaf.path: leaf for leaf in sharded if leaf.stacked}
        for instruction, labels in self.lineage.values.items():
            if instruction.opcode != "while":
                continue
            for array, of_array in zip(instruction.arrays, labels, strict=True):
                for number in _arguments(of_array):
                    leaf = stacked.get(self.paths[number])
                    shapes = (leaf.padded_shape, leaf.shape) if leaf else ()
                    if leaf and array.size in map(math.prod, shapes):
                        yield leaf.path, str(array)

    # -- memory

    def memory(self, compiled: Compiled | None) -> MemoryUse:
        """Counts arguments by kind from the module, temporary bytes from compiler and schedule."""
        parameters = self.module.parameters
        arguments: Counter[str] = Counter()
        for parameter, kind in zip(parameters, self.kinds, strict=True):
            arguments[kind] += int(parameter.device_bytes)
        kept = self._temporary()
        stats = compiled.memory_analysis() if compiled is not None else None
        temporary = stats.temp_size_in_bytes if stats else sum(kept.values())
        reused = [parameters[number] for number in self.module.aliases.values()]
        donated = sum(parameter.device_bytes for parameter in reused)
        # Where the compiler packs tighter than this reads the schedule, activations are fewer.
        gathered = min(kept["gathered"], temporary)
        gradients = min(kept["gradients"], temporary - gathered)
        if self.plan is not None:
            # All gradients whole, before and after they are reduced. What depends on reduced
            # statistics, as of a batch norm, is followed like a gradient, and may be far larger.
            sizes = (math.prod(x.shape) * max(x.dtype.itemsize, 4) for x in self.plan.params)
            gradients = min(gradients, 2 * sum(sizes))
        return MemoryUse(
            parameters=arguments[_state.PARAMS],
            optimizer=arguments[_state.OPT_STATE],
            other_state=arguments[_state.OTHER],
            batch=arguments["batch"],
            gathered=gathered,
            gradients=gradients,
            activations=temporary - gathered - gradients,
            outputs=int(self.module.roots[self.module.entry].device_bytes - donated),
            donated=int(donated),
            on_host=int(sum(one.nbytes - one.device_bytes for one in parameters)),
            host_donated=int(sum(one.nbytes - one.device_bytes for one in reused)),
            host_temporary=stats.host_temp_size_in_bytes if stats else 0,
        )

    def _temporary(self) -> Counter[str]:
        """Counts the bytes of the buffers alive at the schedule's peak, by use."""
        reducing = [one.instruction for one in self.collectives if one.kind in ARITHMETIC]
        operands = [(operand, 0) for one in reducing for operand in one.operands]
        # Gradients of microbatches are summed before they are reduced: so are the sums and what is
        # added to them.
        reduced = _flow.summed_in(self.module, operands)
        sizes: Counter[str] = Counter()
        for buffer, holders in _flow.peak(self.module).items():
            sizes[self._use(holders, reduced)] += int(_flow.device_bytes([buffer]))
        return sizes

    def _use(self, holders: list[Value], reduced: set[Value]) -> str:
        """Names a buffer after the values that are stored in it over its life."""
        labels: set[Origin] = set()
        for instruction, at in holders:
            labels.update(*self.lineage.values.get(instruction, [])[at : at + 1])
        if not reduced.isdisjoint(holders) or any(kind in ARITHMETIC for kind, _, _ in labels):
            return "gradients"
        kinds = {self.kinds[number] for number in _arguments(labels)}
        return "gathered" if _state.PARAMS in kinds else "activations"  # a batch is copied, too


def _arguments(labels: Iterable[Origin]) -> list[int]:
    """Returns the numbers of the arguments among some origins."""
    return sorted(number for kind, _, number in labels if kind == ARGUMENT)


def parameter_path(parameter: Instruction) -> str:
    """Returns 'params/blocks/w' for an argument that JAX named state.params['blocks']['w']."""
    name = parameter.op_name.replace("\\", "")
    parts = re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]", name)
    first = re.match(r"\w*", name)
    return "/".join("".join(part) for part in parts) or (first[0] if first else "")


def _axes(members: tuple[int, ...], plan: Plan) -> tuple[str, ...] | None:
    """Returns the mesh axes that a group spans, by the plan's names; XLA may use others."""
    if plan.mesh.devices.size <= max(members):
        return None
    places = np.unravel_index(members, plan.mesh.devices.shape)  # an array for each axis
    pairs = zip(plan.mesh.axis_names, places, strict=True)
    return tuple(name for name, at in pairs if len(set(at)) > 1)
