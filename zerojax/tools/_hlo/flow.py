"""Follows values through a module: which parameter they come from, which output they go into, which
memory they are stored in; and finds the sums that a value is made of."""

import collections
import itertools
import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

from zerojax._table import grouped
from zerojax.tools._hlo.cost import MATMUL_CALL
from zerojax.tools._hlo.module import Instruction, Module

ARGUMENT, JOINED = "argument", "joined"
ARITHMETIC = ("reduce-scatter", "all-reduce")  # their labels go through arithmetic
LABELLED = (*ARITHMETIC, "all-gather")
MOVED_ON = re.compile(  # these move their first operand
    "copy|convert|reshape|transpose|slice|dynamic-slice|copy-start|pad|bitcast-convert|reverse"
)
SPREADS = ("all-gather", "broadcast", "custom-call")  # these repeat what they move
SUMMANDS = {"add": 2, "concatenate": None, "dynamic-update-slice": 2}  # how many operands count
NO_BUFFER = {"constant", "partition-id", "replica-id", "after-all"}
IN_LOSS = "jvp("  # in the scope of what JAX differentiates
MOST_PASSES = 8  # over one loop body; its labels settle in fewer

Slot: TypeAlias = tuple[Instruction, int]  # one of an instruction's arrays
# ARGUMENT, "" and the number of the argument; or a kind of collective, its name and the number of
# the array; or JOINED, the name of the concatenate, and 0.
Origin: TypeAlias = tuple[str, str, int]
# For each array of an instruction its origins; or its buffers, named by the values that allocate
# them.
Sets: TypeAlias = list[frozenset]
Of: TypeAlias = Callable[[Instruction, list[Sets]], Sets]


def walk(
    module: Module, name: str, arguments: list[Sets], of: Of, values: dict[Instruction, Sets]
) -> Sets:
    """Walks over the instructions of a computation in the order in which they run.

    `of` maps the sets of an instruction's operands to its own, where it does more than pass them
    on. `values` receives the sets of each instruction; the function returns those of the result.
    """
    for instruction in module.computations[name].values():
        operands = [values[operand] for operand in instruction.operands]
        new = instruction.passed_on(operands, arguments)
        values[instruction] = of(instruction, operands) if new is None else new
    return values[module.roots[name]]


def _union(sets: Iterable[Iterable[Hashable]]) -> frozenset:
    return frozenset().union(*sets)


# -- origins


class Lineage:
    """The origins of a module's values: arguments, and arrays that collectives make.

    An argument keeps its label while it is only moved (sliced, cast, gathered), and in the scope
    `through`; so does the result of an all-gather. The result of a reduction, a gradient, also
    keeps its label through arithmetic between arrays of one size: so optimizers use it.

    XLA:GPU joins the operands of several all-reduces into one flat array, and slices its sum. A
    slice keeps the labels of what was joined there: `joined` has start, end and labels of each.
    """

    def __init__(self, module: Module, through: str) -> None:
        self.module, self.through = module, through
        self.values: dict[Instruction, Sets] = {}
        self.joined: dict[str, list[tuple[int, int, frozenset[Origin]]]] = {}
        arguments: list[Sets] = [
            [frozenset([(ARGUMENT, "", number)])] * len(parameter.arrays)
            for number, parameter in enumerate(module.parameters)
        ]
        self.outputs = self.run(module.entry, arguments)

    def run(self, name: str, arguments: list[Sets]) -> Sets:
        return walk(self.module, name, arguments, self.of, self.values)

    def of(self, instruction: Instruction, operands: list[Sets]) -> Sets:
        opcode, count = instruction.opcode, len(instruction.arrays)
        moved = [*itertools.chain(*operands)]
        if opcode == "while":
            return self.loop(instruction, operands[0])
        if calls := instruction.calls(operands):
            runs = [self.run(*call) for call in calls]
            labels = [_union(sets) for sets in zip(*runs, strict=True)]
            labels = [*moved[: instruction.first_result], *labels]
        elif instruction.base in ARITHMETIC and not opcode.endswith("-done"):
            # A gradient is reduced several times with HSDP: inside a node, then between nodes. XLA
            # joins these all-reduces into one, whose results are those of its operands in order.
            kept = [frozenset(x for x in sets if x[0] in (*ARITHMETIC, JOINED)) for sets in moved]
            labels = [frozenset()] * instruction.first_result + kept
        elif opcode == "all-gather-start":
            labels = moved * 2
        elif opcode in ("slice-start", "dynamic-slice-start", "dynamic-update-slice-start"):
            into = 2 if opcode.startswith("dynamic-update") else 1
            labels = [*moved, _union(itertools.chain(*operands[:into]))]
        elif opcode.endswith("-start") and opcode != "copy-start":
            labels = []
        elif opcode == "dynamic-update-slice":
            labels = [_union([*operands[0], *operands[1]])]
        elif opcode == "concatenate":
            labels = [self.join(instruction, moved)]
        elif opcode == "slice":
            labels = [self.cut(instruction, moved[0])]
        elif not _multiplies(instruction) and (MOVED_ON.fullmatch(opcode) or opcode in SPREADS):
            # XLA joins several all-gathers into one, with an operand for each.
            labels = moved if opcode == "all-gather" or not operands else operands[0]
            labels = labels if len(labels) == count else [_union(labels)] * count
        else:
            labels = [self.computed(instruction, operands)] * count
        labels = (labels + [frozenset()] * count)[:count]
        if instruction.base in LABELLED and not opcode.endswith("-done"):
            first = count - len(instruction.operands)  # results come last
            for at in range(len(instruction.operands)):
                labels[first + at] |= {(instruction.base, instruction.name, at)}
        return labels

    def join(self, instruction: Instruction, parts: Sets) -> frozenset[Origin]:
        """Joins labels, and notes where each operand is in an array of one dimension."""
        labels = _union(parts)
        if len(instruction.arrays[0].dims) != 1:
            return labels
        ends = [*itertools.accumulate(one.arrays[0].size for one in instruction.operands)]
        self.joined[instruction.name] = [*zip([0, *ends], ends, parts, strict=False)]
        return labels | {(JOINED, instruction.name, 0)}

    def cut(self, instruction: Instruction, labels: frozenset[Origin]) -> frozenset[Origin]:
        """Leaves out the labels of what was joined elsewhere than in this slice."""
        bounds = re.search(r"slice=\{\[(\d+):(\d+)", instruction.attributes)
        everywhere, here = frozenset[Origin](), frozenset[Origin]()
        for origin in [one for one in labels if one[0] == JOINED]:
            parts, labels = self.joined[origin[1]], labels - {origin}
            if bounds and instruction.operands[0].arrays[0].dims == (parts[-1][1],):
                first, last = map(int, bounds.groups())
                everywhere |= _union(x for _, _, x in parts)
                here |= _union(x for start, end, x in parts if start < last and first < end)
        return labels - (everywhere - here)

    def computed(self, instruction: Instruction, operands: list[Sets]) -> frozenset[Origin]:
        """Joins the labels of the operands that have the result's size; scalars have none."""
        kinds = {*ARITHMETIC, JOINED, *([ARGUMENT] if self.through in instruction.op_name else [])}
        size = instruction.arrays[0].size if instruction.arrays else 0
        if IN_LOSS in instruction.op_name and _multiplies(instruction):
            # What has been reduced, by whatever axis, is an activation: gradients do not return to
            # the loss. Those of rows are added to a gradient.
            operands = operands[: instruction.opcode == "scatter"]
        pairs = zip(instruction.operands, operands, strict=False)
        each = (pair for one, sets in pairs for pair in zip(one.arrays, sets, strict=False))
        same_size = _union(labels for array, labels in each if array.size == size > 1)
        kept = {label for label in same_size if label[0] in kinds}
        if instruction.opcode == "select":
            kept |= {x for x in _union(operands[1] + operands[2]) if x[0] not in kinds}
        return frozenset(kept)

    def loop(self, instruction: Instruction, labels: Sets) -> Sets:
        """Runs a body until its labels settle: an iteration may move them between the carried
        arrays, and each pass finds where the next iteration takes them. Loops into which XLA
        expands a scatter carry a counter, its operand, and then what it adds."""
        if instruction.op_name.rpartition("/")[2].startswith("scatter"):
            labels = [*labels[:2], *[frozenset()] * len(labels[2:])]
        for _ in range(MOST_PASSES):
            new = self.run(instruction.body, [labels])
            after = [old | now for old, now in zip(labels, new, strict=True)]
            if after == labels:
                break
            labels = after
        return labels


def _multiplies(instruction: Instruction) -> bool:
    """Whether an instruction is a matmul, or has rows of its operands in other places."""
    is_call = instruction.opcode == "custom-call" and MATMUL_CALL.search(instruction.attributes)
    return bool(is_call) or instruction.opcode in ("dot", "convolution", "gather", "scatter")


def summed_in(module: Module, values: Iterable[Slot]) -> set[Slot]:
    """Finds the values that end up in one of `values` by being moved or added: backward, into
    fusions, and around loops, whose iterations add to the arrays they carry."""
    passed: dict[tuple[str, int], list[list[Slot]]] = collections.defaultdict(list)
    for instruction in itertools.chain(*(x.values() for x in module.computations.values())):
        # A loop passes its own value to its body, which carries it.
        passes = [instruction] if instruction.opcode == "while" else instruction.operands
        for inside, arguments in instruction.calls([_values(x) for x in passes]):
            for number, argument in enumerate(arguments):
                passed[inside, number].append(argument)
    summed: set[Slot] = set()
    left = list(values)
    while left:
        if (value := left.pop()) not in summed:
            summed.add(value)
            left += _summands(module, value, passed)
    return summed


def _values(instruction: Instruction) -> list[Slot]:
    return [(instruction, at) for at in range(len(instruction.arrays))]


def _summands(
    module: Module, value: Slot, passed: dict[tuple[str, int], list[list[Slot]]]
) -> list[Slot]:
    """Returns the values that a value is moved from, or added up from, one step before."""
    instruction, at = value
    opcode = instruction.opcode
    if opcode == "parameter":
        arguments = passed[instruction.computation, int(instruction.inside)]
        return [argument[at] for argument in arguments]
    operands = [_values(operand) for operand in instruction.operands]
    passed_on = instruction.passed_on(operands, [])
    if passed_on is not None:
        return passed_on[at : at + 1]
    if calls := instruction.calls(operands):
        at -= instruction.first_result
        before = operands[0][at : at + 1] if opcode == "while" else []
        return before + [(module.roots[name], at) for name, _ in calls if at >= 0]
    count = 1 if MOVED_ON.fullmatch(opcode) else SUMMANDS.get(opcode, 0)
    return [one for operand in operands[:count] for one in operand[:1]]


def stands_for(module: Module, reduce: Instruction, at: int, group: int) -> str:
    """Returns the kind of collective that an all-reduce of so many devices stands for, for one of
    its operands.

    XLA:TPU writes small gathers as all-reduces of zeros with a shard in them, and small
    reduce-scatters as all-reduces of which a slice is read: over two or three dimensions of chips,
    it does so with large ones too.
    """
    made, of = reduce.operands[at], 0
    while made.fuses or made.base in ("get-tuple-element", "bitcast", "copy"):
        if made.fuses:
            made = module.results(made.called[0])[of]
        else:
            made, of = made.operands[0], max(made.index, 0)
    sizes = [one.arrays[0].size for one in made.operands[:2]]
    if made.opcode == "dynamic-update-slice" and sizes[0] == sizes[1] * group:
        return "all-gather"
    results = [reduce]
    if len(reduce.operands) > 1:
        every = module.computations[reduce.computation].values()
        results = [x for x in every if reduce in x.operands and x.index == at]
    sliced = all(_is_only_sliced(module, one) for one in results)
    return "reduce-scatter" if sliced else reduce.collective


def _is_only_sliced(module: Module, value: Instruction) -> bool:
    """Whether all that reads a value slices it, be it after a move or in a fusion."""
    every = module.computations[value.computation].values()
    users = [(one, one.operands.index(value)) for one in every if value in one.operands]
    if not users or value is module.roots[value.computation]:
        return False
    for one, at in users:
        if one.fuses:
            sliced = _is_only_sliced(module, module.argument(one.called[0], at))
        elif one.base in ("bitcast", "copy", "convert", "reshape"):
            sliced = _is_only_sliced(module, one)
        else:
            sliced = one.opcode == "dynamic-slice" and at == 0
        if not sliced:
            return False
    return True


def waiting(module: Module, readers: Iterable[Instruction]) -> list[Slot]:
    """Finds the operands of some instructions that exist at once: (reader, number of the operand).

    Of each computation, those with most bytes at one time.
    """
    fullest: list[Slot] = []
    for name, inside in grouped(readers, lambda reader: reader.computation).items():
        order = {one: at for at, one in enumerate(module.computations[name].values())}
        slots = [(reader, at) for reader in inside for at in range(len(reader.operands))]
        lives = [(order[_maker(one.operands[at])], order[one], (one, at)) for one, at in slots]
        times = {read for _, read, _ in lives}
        alive = ([slot for made, read, slot in lives if made < now <= read] for now in times)
        sums = ((sum(one.operands[at].nbytes for one, at in slots), slots) for slots in alive)
        fullest += max(sums, key=lambda each: each[0], default=(0, []))[1]
    return fullest


def _maker(value: Instruction) -> Instruction:
    """Returns what computes a value that may have been moved since."""
    others = ("bitcast", "get-tuple-element")
    while value.operands and (MOVED_ON.fullmatch(value.opcode) or value.opcode in others):
        value = value.operands[0]
    return value


# -- memory


def peak(module: Module) -> dict[Slot, list[Slot]]:
    """Finds the temporary buffers alive at the peak, each with the values that were stored in it.

    A compiler for GPUs reports how many bytes a program needs, but not what for. A buffer lives
    from the instruction that makes it to the last one that reads it, through the tuples, loops and
    updates in place that pass it on. Inputs and outputs do not count.
    """
    storage = _Storage(module)
    arguments: list[Sets] = [[frozenset()] * len(p.arrays) for p in module.parameters]
    _, live = storage.fullest(module.entry, arguments)
    holders: dict[Slot, list[Slot]] = {buffer: [] for buffer in live}
    for instruction, buffers in storage.values.items():
        for at, one in enumerate(buffers):
            for buffer in one & holders.keys():
                holders[buffer].append((instruction, at))
    return holders


def device_bytes(buffers: Iterable[Slot]) -> float:
    return sum(instruction.arrays[at].device_bytes for instruction, at in buffers)


class _Storage:
    """The buffers in which values are stored; `inside` has those alive at the peak of a call."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.values: dict[Instruction, Sets] = {}
        self.inside: dict[Instruction, list[Slot]] = {}

    def fullest(self, name: str, arguments: list[Sets]) -> tuple[Sets, list[Slot]]:
        """Returns the buffers of a computation's result, and those alive at its peak.

        The arguments' do not count; nor do those of the program's results, which are stored in
        memory of their own, or in an argument's. The sum is kept up to date from instruction to
        instruction: adding it up each time would take quadratic time in long schedules.
        """
        result = walk(self.module, name, arguments, self.of, self.values)
        outer = _union(itertools.chain(*arguments))
        outer = outer.union(*result) if name == self.module.entry else outer
        order = list(self.module.computations[name].values())
        last: dict[Slot, int] = {}
        for at, instruction in enumerate(order):
            for one in (*instruction.operands, instruction):
                last |= dict.fromkeys(_union(self.values[one]), at)
        last |= dict.fromkeys(_union(result), len(order))
        ends = grouped(last, last.__getitem__)
        live: dict[Slot, None] = {}
        now = most = 0.0
        best: list[Slot] = []
        for at, instruction in enumerate(order):
            new = _union(self.values[instruction]) - outer - live.keys()
            live |= dict.fromkeys(new)
            now += device_bytes(new)
            inside = self.inside.get(instruction, [])
            if (with_it := now + device_bytes(inside)) > most:
                most, best = with_it, [*live, *inside]
            ended = [buffer for buffer in ends.get(at, ()) if buffer in live]
            now -= device_bytes(ended)
            for buffer in ended:
                del live[buffer]
        return result, best

    def of(self, instruction: Instruction, operands: list[Sets]) -> Sets:
        opcode, calls = instruction.opcode, instruction.calls(operands)
        if opcode in NO_BUFFER:
            return [frozenset()] * len(instruction.arrays)
        if calls and not instruction.fuses:
            runs = [self.fullest(*call) for call in calls]
            result, inside = max(runs, key=lambda run: device_bytes(run[1]))
            self.inside[instruction] = inside
            # A loop's result is stored where its initial value was.
            return operands[0] if opcode == "while" and len(operands[0]) == len(result) else result
        new: Sets = [frozenset([value]) for value in _values(instruction)]
        moved = [*itertools.chain(*operands)]
        if opcode == "copy-start":
            return [new[0], *moved, *new[2:]]
        first = instruction.first_result
        new[:first] = moved[:first]
        for at, into in enumerate(self.in_place(instruction), start=first):
            if into is not None and operands[into]:
                new[at] = operands[into][0]
        return new

    def in_place(self, instruction: Instruction) -> list[int | None]:
        """Finds, for each array of the result, the operand that it updates in place."""
        if instruction.base == "dynamic-update-slice":
            return [0]
        into = []
        for output in self.module.results(instruction.called[0]) if instruction.fuses else ():
            while output.opcode in ("bitcast", "copy") and output.operands:
                output = output.operands[0]
            updates = output.opcode == "dynamic-update-slice"
            updated = output.operands[0] if updates else output
            while updates and updated.opcode == "bitcast":
                updated = updated.operands[0]
            into.append(int(updated.inside) if updates and updated.opcode == "parameter" else None)
        return into
