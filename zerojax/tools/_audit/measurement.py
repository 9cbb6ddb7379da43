"""The cost of a compiled step: its traffic, its memory, its modelled schedule; and how it is read
off the module, by a plan.

Weights are known by the argument that they come from, gradients and updated parameters by the
output that they end up in.
"""

import collections
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jax.stages import Compiled

from zerojax._jaxprs import common_path
from zerojax._plan import show as _show
from zerojax._plan.plan import Plan
from zerojax._state import state as _state
from zerojax._step.step_options import Recipe
from zerojax._table import human_bytes, shortened, summed, total
from zerojax._types import Number
from zerojax._wire import codecs as _codecs
from zerojax.tools._hlo import flow as _flow
from zerojax.tools._hlo.flow import ARGUMENT, ARITHMETIC, Origin, Slot
from zerojax.tools._hlo.gpus import IN_FULL, Gpu
from zerojax.tools._hlo.module import Array, Instruction, Module
from zerojax.tools._hlo.timeline import LONGEST_NAME, Replay, Sent, place_of

FEW = 0.01  # of the FLOPs of a step
# Files that have no source lines of a user's, those that start a command among them.
OURS = re.compile(
    r"<frozen runpy>|/bin/zerojax|/zerojax/(_|tools/|nnx\.py|aot\.py)|/(jax|jaxlib|flax|optax)/"
)
BF16, FLOAT32 = "bfloat16", "float32"
IN_JAX = {"bf16": BF16, "f16": "float16", "f32": FLOAT32, IN_FULL: FLOAT32}  # XLA's, as JAX's
Flops = Counter[tuple[str, str]]  # of matmuls, by dtype and place in the user's code
# Names of collectives that a loss asks for. XLA names those that it adds after what needs them.
WRITTEN = re.compile(
    r"/(all_gather|reduce_scatter|\w*all_to_all|ppermute|p(sum|max|min))\w*\b(?!/)"
)
OPTIMIZER_SCOPE = "optimizer"  # full-matrix optimizers may send what they need
OF_OPTIMIZER = re.compile(rf"\b{OPTIMIZER_SCOPE}/")  # XLA may have joined it with other collectives
# The scopes of sequences that zerojax splits, and of rows that it sends to experts.
SENDERS = re.compile(r"\b(sequences|trips)/[^/()]+")
STATE_KINDS = (_state.PARAMS, _state.OPT_STATE, _state.OTHER)


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes of a device's memory. The state's are exact; of temporary memory, gathered weights and
    gradients are those alive at the schedule's peak, and activations are the rest.

    Of a program that zerojax could not read, the state is the plan's, the compiler's own counts
    (`compiled`) are the peak and temporary memory, and the rest is None."""

    parameters: Number = None
    optimizer: Number = None
    other_state: Number = None
    batch: Number = None
    gathered: Number = None
    gradients: Number = None
    activations: Number = None
    outputs: Number = None  # that reuse no argument's memory
    donated: Number = None  # arguments whose memory outputs reuse
    on_host: int = 0  # arguments in host memory, which are not counted above
    host_donated: int = 0  # of those, what outputs reuse
    host_temporary: int = 0
    compiled: tuple[int, int] | None = None

    @property
    def host_kept(self) -> int:
        """Bytes that wait for backward in host memory: temporary there, and no copy of the
        state."""
        return self.host_temporary if self.host_donated == self.on_host else 0

    @property
    def state(self) -> Number:
        return total(self.parameters, self.optimizer, self.other_state)

    @property
    def temporary(self) -> Number:
        parts = total(self.gathered, self.gradients, self.activations)
        return self.compiled[1] if self.compiled else parts

    @property
    def peak(self) -> Number:
        parts = total(self.state, self.batch, self.temporary, self.outputs)
        return self.compiled[0] if self.compiled else parts

    @property
    def on_device(self) -> str:
        """The peak and its uses, as text."""
        uses = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "gathered weights": self.gathered,
            "activations": self.activations,
            "batch": self.batch,
            "rest": total(self.other_state, self.outputs),
        }
        parts = ", ".join(f"{use} {human_bytes(nbytes)}" for use, nbytes in uses.items())
        donated = human_bytes(self.donated)
        return f"{human_bytes(self.peak)} at the peak: {parts}; donated and reused {donated}"

    def __str__(self) -> str:
        on_host = {"state": self.on_host, "kept for backward": self.host_kept}
        parts = ", ".join(f"{use} {human_bytes(size)}" for use, size in on_host.items() if size)
        return self.on_device + (f"; in host memory: {parts}" if parts else "")


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement:
    """The cost of a compiled step."""

    module: Module
    traffic: Sequence[Sent]
    memory: MemoryUse
    replay: Replay
    gpu: Gpu | None
    devices: int
    per_host: int  # of them, those of one host
    plan: Plan | None
    accumulate: int  # microbatches that gather their weights one after another
    trains: bool  # else the step has no gradients and returns no state
    not_donated: tuple[str, ...]
    placement: tuple[tuple[str, str], ...]  # leaves not sharded as planned: (path, how)
    kept: tuple[tuple[str, str], ...]  # stacks of gathered weights that a loop keeps: (path, array)
    warnings: tuple[str, ...]
    layers: tuple[str, ...]  # what became of layers in Python loops
    backend: str
    written: Flops  # before it was compiled, where the device has no bfloat16
    asked: str  # the dtype that it is to compute in, if that has fewer than 32 bits

    @property
    def unread(self) -> str:
        """The line of the program that zerojax could not read: newer XLA writes what it does not
        know. What depends on the program is unknown then, None or empty."""
        if not self.module.unread:
            return ""
        return (
            f"zerojax cannot read the compiled program: {self.module.unread}. Write the program "
            "again with compiled.as_text() if a file was cut off; else report this line to "
            "zerojax, with your version of JAX."
        )

    def counted(self, each: Iterable[float]) -> Number:
        return None if self.module.unread else sum(each)

    def modelled(self, seconds: float) -> Number:
        return seconds if self.gpu and not self.module.unread else None

    @property
    def step_seconds(self) -> float | None:
        return self.modelled(self.replay.step)

    @property
    def exposed_seconds(self) -> float | None:
        return self.modelled(self.replay.exposed)

    @property
    def caveat(self) -> str:
        """A reason not to trust the modelled times, if there is one."""
        on_cpu = self.gpu is not None and self.backend == "cpu"
        return "compiled for CPUs, where no collective runs beside compute" if on_cpu else ""

    @functools.cached_property
    def _flops(self) -> Flops:
        """The FLOPs of matmuls by dtype and place. XLA:CPU computes in float32 what is written in
        bfloat16, so there they are those of the program as it was written."""
        if self.backend != "gpu" and self.written:
            return self.written
        flops = Flops()
        for instruction, dtype, count in () if self.module.unread else self.replay.matmuls:
            place = self.module.source(instruction, OURS) or instruction.op_name
            flops[IN_JAX.get(dtype, dtype), place] += int(count)
        return flops

    @property
    def matmuls(self) -> tuple[str, ...]:
        """The dtypes of matmuls, without those of few FLOPs."""
        flops = summed((dtype, count) for (dtype, _), count in self._flops.items())
        return tuple(sorted(x for x in flops if flops[x] > FEW * max(flops.values())))

    @property
    def wide_matmuls(self) -> str:
        """The share of FLOPs in float32 beside narrower matmuls, or where narrower ones were asked
        for, and the line with most of them."""
        is_meant = len(self.matmuls) < 2 and not self.asked
        if FLOAT32 not in self.matmuls or is_meant or self.lacks:
            return ""
        places = Flops({at: count for at, count in self._flops.items() if at[0] == FLOAT32})
        share, (((_, place), _),) = places.total() / self._flops.total(), places.most_common(1)
        if re.search(r":\d+$", place):
            place = place_of(place, "").rsplit("/", 1)[-1]
        what = f"in float32, not the {self.asked} asked for," if self.asked else "in float32,"
        return f"{share:.0%} of FLOPs {what} most at {shortened([place], LONGEST_NAME)[0]}"

    @property
    def lacks(self) -> str:
        """What runs in the place of bfloat16 where the GPU has none, and what to ask for."""
        is_written = any(dtype == BF16 for dtype, _ in self.written)
        if not self.gpu or not is_written or BF16 in self.matmuls or not self.matmuls:
            return ""
        return (
            f"You ask for {BF16}, which a {self.gpu.name} does not have: your matmuls run in "
            f"{' and '.join(self.matmuls)}. Ask for float16 instead, with a dynamic_scale in the "
            "state, or a loss times a constant: docs/loss.md, Infinities."
        )

    @property
    def pinned(self) -> int:
        """The bytes of host memory that a process with all GPUs of a host keeps pinned."""
        return self.per_host * (self.memory.on_host + self.memory.host_kept)

    def host_bytes(self, way: str) -> Number:
        """The bytes that each device copies in a step, to the host or from there."""
        return self.counted(t.total_bytes for t in self.replay.transfers if t.kind == way)

    @property
    def overlap(self) -> float | None:
        """The share of compute in the step's time: 1 where all communication is hidden."""
        return self.replay.compute / self.replay.step if self.step_seconds else None

    @property
    def wire_bytes(self) -> Number:
        """The bytes that each device sends in a step."""
        return self.counted(t.total_bytes for t in self.traffic)

    @property
    def link_bytes(self) -> Number:
        """The bytes that each device sends inside its host in a step."""
        return self.counted((t.wire_bytes - t.network_bytes) * t.trips for t in self.traffic)

    @property
    def network_bytes(self) -> Number:
        """The bytes that each device sends to other hosts in a step."""
        return self.counted(t.network_bytes * t.trips for t in self.traffic)

    @functools.cached_property
    def totals(self) -> dict[str, float]:
        """The bytes that each device sends, by kind of collective; of what could be read."""
        return dict(summed((one.kind, one.total_bytes) for one in self.traffic).most_common())

    @property
    def loss_totals(self) -> dict[str, float]:
        """The bytes that the loss itself sends, of those."""
        each = ((one.total_bytes, one.sends.items()) for one in self.traffic)
        sent = ((what, share * nbytes) for nbytes, shares in each for what, share in shares)
        return dict(summed(sent).most_common())


# -- reading a module


class Reading:
    """A module whose arguments are known by their paths in the state, and by kind."""

    def __init__(
        self, module: Module, plan: Plan | None, collectives: list[Sent], recipe: Recipe | None
    ) -> None:
        self.module, self.plan, self.is_by_hand = module, plan, recipe is None
        self.trains = recipe is None or recipe.options.differentiates
        self.leaves = {leaf.path: leaf for leaf in plan.leaves} if plan else {}
        self.roots = {leaf.path.split("/")[0] + "/" for leaf in plan.params} if plan else ()
        self.paths = [parameter_path(parameter) for parameter in module.parameters]
        kinds = {path: leaf.kind for path, leaf in self.leaves.items()}
        if plan is None:
            firsts = {path: path.split("/")[0] for path in self.paths}
            kinds = {path: kind for path, kind in firsts.items() if kind in STATE_KINDS[:2]}
        self.kinds = [kinds.get(path, "batch") for path in self.paths]
        self.lineage = _flow.Lineage(module, through=_codecs.ENCODING)
        self.traffic = [self._known(one) for one in collectives]
        reducing = [one for one in self.traffic if one.kind in ARITHMETIC and is_ours(one, plan)]
        self.reducing = {(one.kind, one.name): one.instruction.operands for one in reducing}

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

    def _known(self, one: Sent) -> Sent:
        """Returns a collective with the parameters, mesh axes and line that it serves."""
        one.axes = _axes(one.members, self.plan) if self.plan else one.axes
        line, kinds = self.module.source(one.instruction, OURS), ()
        if one.kind == "all-reduce" and self.module.is_of_tpu:
            reduce, numbers = one.instruction, range(len(one.parts))
            kinds = tuple(_flow.stands_for(self.module, reduce, at, one.group) for at in numbers)
        parts = tuple(self._parts(one))
        return dataclasses.replace(one, parts=parts, stands_for=kinds, source=line)

    def _sends(self, one: Sent, size: int, paths: Sequence[str]) -> str:
        """Returns what the loss sends with an array of a collective, if it is the loss's.

        Over axes of the user's own alone, these are activations of an operation. In a step of
        zerojax, ZeRO's have parameters in their scope, alone and where XLA joins them with others.
        In a step by hand, a loss may gather its weights and reduce its gradients.
        """
        may_be_zeros = self.is_by_hand or any(root in one.scope for root in self.roots)
        what = SENDERS.search(one.scope)
        if is_written(one, self.trains) and (not may_be_zeros or (what and not paths)):
            return what[0] if what else "the loss"
        in_loss = _flow.IN_LOSS in one.scope or not self.trains
        first = one.scope.partition(":")[0]  # of several that XLA joins
        if size > 1 and in_loss and not paths and self._is_beside_zero(one):
            return f"activations/{first.rpartition('/')[2]}"
        return ""

    def _is_beside_zero(self, one: Sent) -> bool:
        """Whether a collective is over axes of the user's own alone."""
        return bool(self.plan and one.axes and {*one.axes}.isdisjoint(self.plan.batch_axes))

    def _parts(self, one: Sent) -> Iterator[Array]:
        """Yields the arrays of a collective, each with the parameters that it belongs to."""
        operands = one.instruction.operands
        origins = [labels for x in operands for labels in self.lineage.values.get(x, [])]
        for at, part in enumerate(one.parts):
            paths = self.served.get((one.name, at))
            if paths is None:
                arguments = _arguments(origins[at] if at < len(origins) else ())
                paths = [self.paths[number] for number in arguments if self.paths[number]]
            sends = self._sends(one, part.size, paths)
            yield dataclasses.replace(part, paths=tuple(paths), sends=sends)

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
        sharded = {leaf.path: leaf for leaf in self.plan.params if leaf.dim is not None}
        for instruction, labels in self.lineage.values.items():
            if instruction.opcode != "while":
                continue
            for array, of_array in zip(instruction.arrays, labels, strict=True):
                of_stack = [sharded.get(self.paths[number]) for number in _arguments(of_array)]
                leaves = [leaf for leaf in of_stack if leaf is not None]
                is_stack = len(leaves) > 1 or any(leaf.stacked for leaf in leaves)
                shapes = [(leaf.padded_shape, leaf.shape) for leaf in leaves]
                sizes = {sum(map(math.prod, each)) for each in zip(*shapes, strict=True)}
                if is_stack and array.size in sizes & self.module.read_by_layers:
                    yield common_path([leaf.path for leaf in leaves]), str(array)

    # -- memory

    def memory(self, compiled: Compiled | None) -> MemoryUse:
        """Counts arguments by kind from the module, temporary bytes from compiler and schedule."""
        if self.module.unread:
            return self._memory_by_compiler(compiled)
        parameters = self.module.parameters
        arguments = summed(zip(self.kinds, (int(x.device_bytes) for x in parameters), strict=True))
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
            wide = [(max(1, 4 // x.dtype.itemsize), x) for x in self.plan.params]
            sizes = (times * x.bytes_at(x.update.over(()), self.plan.mesh) for times, x in wide)
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

    def _memory_by_compiler(self, compiled: Compiled | None) -> MemoryUse:
        plan, told = self.plan, {}
        there = plan.bytes_per_device() if plan else {}
        if stats := compiled.memory_analysis() if compiled is not None else None:
            donated, temporary = stats.alias_size_in_bytes, stats.temp_size_in_bytes
            peak = stats.argument_size_in_bytes + stats.output_size_in_bytes - donated + temporary
            told = {"donated": donated, "host_temporary": stats.host_temp_size_in_bytes}
            told["compiled"] = peak, temporary
        return MemoryUse(
            parameters=there.get(_state.PARAMS),
            optimizer=there.get(_state.OPT_STATE),
            other_state=there.get(_state.OTHER),
            on_host=sum(plan.host_bytes_per_device().values()) if plan else 0,
            **told,
        )

    def _temporary(self) -> Counter[str]:
        """Counts the bytes of the buffers alive at the schedule's peak, by use."""
        operands = [(operand, 0) for each in self.reducing.values() for operand in each]
        # Microbatches sum their gradients before these are reduced: the sums and their summands are
        # gradients too.
        reduced = _flow.summed_in(self.module, operands)
        peak = _flow.peak(self.module).items()
        sizes = ((self._use(of, reduced), int(_flow.device_bytes([x]))) for x, of in peak)
        return summed(sizes)

    def _use(self, holders: list[Slot], reduced: set[Slot]) -> str:
        """Names a buffer after the values that are stored in it over its life."""
        labels: set[Origin] = set()
        for instruction, at in holders:
            labels.update(*self.lineage.values.get(instruction, [])[at : at + 1])
        if not reduced.isdisjoint(holders) or any(label[:2] in self.reducing for label in labels):
            return "gradients"
        kinds = {self.kinds[number] for number in _arguments(labels)}
        return "gathered" if _state.PARAMS in kinds else "activations"  # a batch is copied, too


def is_ours(one: Sent, plan: Plan | None) -> bool:
    """Whether a stage answers for a collective: it spans ZeRO's axes, and neither the loss nor the
    optimizer asks for it. Over other axes, a loss sums activations."""
    spans = plan is None or one.axes is None or bool({*one.axes} & {*plan.batch_axes})
    return spans and not one.is_of_loss and OPTIMIZER_SCOPE not in one.scope.split("/")


def is_written(one: Sent, trains: bool) -> bool:
    """Whether a collective is written in a loss: where a step trains, in what JAX differentiates;
    else the step sums no arrays itself."""
    in_loss = _flow.IN_LOSS in one.scope or (
        not trains and any(part.size > 1 for part in one.parts)
    )
    return in_loss and WRITTEN.search(one.scope) is not None


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
