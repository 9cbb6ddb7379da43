"""A parser for the text of XLA's modules: as much of it as an audit reads, and no more."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")
_COLLECTIVE = re.compile(
    "(all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast))"
    "(?:-start|-done)?"
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_STATEMENT = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\](\{[^{}]*\})?")
_HOST_LAYOUT = "S(5)"  # in a layout: XLA's number for the memory of the host
# On TPUs, whose layouts have tiles: numbers of vector memory and of flags, on the chip.
_ON_CHIP = re.compile(r"T\(.*S\([124]\)|^\{:S\(2\)\}")
_TILES = re.compile(r"\{[\d,]*:T\(\d")
_ASYNC_START = 'custom_call_target="AsyncCollectiveStart"'
_RARE_LOOP = re.compile(r"\bleft_over/while$")  # in a scope of `_passes/rooms.py`
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
_TABLE = re.compile(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", re.MULTILINE)
_NO_CODE = re.compile(r"HloModule|\}|\w+$|\d+ ")  # headers, ends, and tables of positions
_KNOWN_TYPE = re.compile(r"pred|token|opaque|(?:bf|[fsuc])\d+\w*")
_GROUPS = re.compile(r"replica_groups=(?:\{[\d,{}]*\}|\[[\d,]+\]<=\[|mesh\[)")
# Those of XLA; any may be the start or the end of an asynchronous pair.
_OPCODE = re.compile(
    "(?:abs|acos|acosh|add|add-dependency|after-all|all-gather|all-reduce|all-to-all|and|asin|asinh|"
    "async|atan2|atanh|batch-norm-grad|batch-norm-inference|batch-norm-training|bitcast|"
    "bitcast-convert|broadcast|call|cbrt|ceil|cholesky|clamp|collective-broadcast|"
    "collective-permute|compare|complex|concatenate|conditional|constant|convert|convolution|"
    "copy|cosine|cosh|count-leading-zeros|custom-call|divide|domain|dot|dynamic-reshape|"
    "dynamic-slice|dynamic-update-slice|erf|exponential|exponential-minus-one|fft|floor|fusion|"
    "gather|get-dimension-size|get-tuple-element|imag|infeed|iota|is-finite|log|log-plus-one|"
    "logistic|map|maximum|minimum|multiply|negate|not|opt-barrier|or|outfeed|pad|parameter|"
    "partition-id|popcnt|power|ragged-all-to-all|real|recv|reduce|reduce-precision|"
    "reduce-scatter|reduce-window|remainder|replica-id|reshape|reverse|rng|rng-bit-generator|"
    "rng-get-and-update-state|round-nearest-afz|round-nearest-even|rsqrt|scatter|select|"
    "select-and-scatter|send|set-dimension-size|shift-left|shift-right-arithmetic|"
    "shift-right-logical|sign|sine|sinh|slice|sort|sqrt|subtract|tan|tanh|topk|transpose|"
    "triangular-solve|tuple|while|xor)(?:-start|-update|-done)?"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """An array: its dtype as XLA writes it, its dimensions, whether it is in host memory or in the
    memory on a TPU's chip, and the parameters that it belongs to, where they are known; of a
    collective's, what the loss sends with it, where that is not ZeRO's."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False
    paths: tuple[str, ...] = ()
    on_chip: bool = False
    sends: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> float:
        return self.size * dtype_bytes(self.dtype)

    @property
    def device_bytes(self) -> float:
        """The bytes that it takes of the device's own memory."""
        return 0 if self.on_host or self.on_chip else self.nbytes

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def dtype_bytes(dtype: str) -> float:
    """Returns the bytes of one element: bf16 -> 2, f8e4m3fn -> 1, c64 -> 8, token -> 0."""
    if dtype == "pred":
        return 1
    bits = re.match(r"(?:bf|[fsuc])(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 0


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a computation: `name = type opcode(inside), attributes`."""

    computation: str
    name: str
    type: str
    opcode: str
    inside: str
    attributes: str
    operands: list["Instruction"] = dataclasses.field(repr=False)
    trip_count: int | None = None  # of a `while`, where it is known

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of its type, with tuples flattened."""
        return arrays_of(self.type)

    @property
    def nbytes(self) -> float:
        return sum(array.nbytes for array in self.arrays)

    @property
    def device_bytes(self) -> float:
        return sum(array.device_bytes for array in self.arrays)

    @functools.cached_property
    def called(self) -> list[str]:
        """The names of the computations that it runs."""
        return [name for one in _CALLED.findall(self.attributes) for name in _NAME.findall(one)]

    def calls(self, operands: list[T]) -> list[tuple[str, list[T]]]:
        """Returns the computations that it runs, each with those of its operands that it gets."""
        if self.opcode == "while":
            return [(self.body, operands[:1])]
        if self.opcode == "conditional":
            pairs = zip(self.called, operands[1:], strict=True)
            return [(name, [operand]) for name, operand in pairs]
        runs = self.called and (self.fuses or self.opcode == "call")
        return [(self.called[0], operands)] if runs else []

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of `pattern` in the attributes; None where it does not match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def fuses(self) -> bool:
        """Whether it runs a fused computation; newer XLA slices stacks in a `fusion-start`."""
        return self.opcode in ("fusion", "fusion-start")

    @functools.cached_property
    def base(self) -> str:
        """The opcode without the `-start` or `-done` of an asynchronous pair."""
        return re.sub(r"-(start|done)$", "", self.opcode)

    @property
    def collective(self) -> str:
        """Its kind, such as 'all-gather', for asynchronous halves too; '' for no collective."""
        match = _COLLECTIVE.fullmatch(self.opcode)
        return match[1] if match else ""

    @property
    def body(self) -> str:
        """The computation that a `while` repeats."""
        return self.attribute(r"body=%?([\w.\-]+)") or ""

    @property
    def index(self) -> int:
        """Which member of a tuple a `get-tuple-element` is; -1 for other instructions."""
        return int(self.attribute(r"\bindex=(\d+)") or -1)

    @property
    def op_name(self) -> str:
        """The name scopes under which JAX traced it, as a path."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    def passed_on(self, operands: list[list[T]], arguments: list[list[T]]) -> list[T] | None:
        """Returns the arrays of its operands that it passes on; None if it makes an array itself.

        There is one T for each array: of its operands, and of the arguments that its computation
        was called with.
        """
        opcode, count = self.opcode, len(self.arrays)
        if opcode == "parameter":
            return arguments[int(self.inside)]
        if opcode == "tuple":
            return [one for operand in operands for one in operand]
        if opcode in ("bitcast", "opt-barrier"):
            return operands[0]
        if opcode != "get-tuple-element" and not opcode.endswith("-done"):
            return None
        source = self.operands[0]
        first = source.first_result
        if opcode == "get-tuple-element":
            first = arrays_before(self.index, source.type)
        return operands[0][first : first + count]

    @property
    def first_result(self) -> int:
        """Which of its arrays is its first result.

        The type of a start is either only its result (all-reduce) or the tuple (operands, results,
        contexts). Only a copy has its result first.
        """
        inputs = sum(len(operand.arrays) for operand in self.operands)
        starts = self.opcode.endswith("-start") and self.opcode != "copy-start"
        return inputs if starts and len(self.arrays) > inputs else 0


@functools.cache  # layers that are alike repeat their types
def arrays_of(type_text: str) -> tuple[Array, ...]:
    """Returns all arrays of a type, with tuples flattened."""
    arrays = []
    for dtype, numbers, layout in _ARRAY.findall(type_text):
        dims = tuple(map(int, re.findall(r"\d+", numbers)))
        on_host, on_chip = _HOST_LAYOUT in layout, bool(_ON_CHIP.search(layout))
        arrays.append(Array(dtype, dims, on_host, on_chip=on_chip))
    return tuple(arrays)


def arrays_before(index: int, type_text: str) -> int:
    """Counts the arrays in those members of a tuple type that stand before the one at `index`."""
    depth = members = 0
    for at, char in enumerate(type_text):
        if members == index:
            return len(arrays_of(type_text[:at]))
        depth += (char in "([{") - (char in ")]}")
        members += char == "," and depth == 1
    raise ValueError(f"{type_text!r} has no member {index}")


def _closing(text: str) -> int:
    """Returns the index at which the parenthesis with which `text` begins closes."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError("its parentheses do not close")


class Module:
    """A parsed module: `computations[name][instruction name]`, in scheduled order.

    Newer XLA may write what this does not know. `unread` says which line, and why; if that leaves a
    hole in the program, the module has no instructions.
    """

    def __init__(self, text: str) -> None:
        if not text.lstrip().startswith("HloModule"):
            raise ValueError(
                f"this is not the text of an HLO module: it starts with {text[:40]!r} and not "
                "with 'HloModule'. Pass compiled.as_text(), or a file it was written to."
            )
        self.text = text
        self.header = text.lstrip().split("\n", 1)[0]
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, Instruction] = {}
        self.entry = self.unread = ""
        try:
            self._parse()
            self._check()
        except ValueError as error:
            self.unread = self.unread or str(error)
            nothing = Instruction("", "", "()", "tuple", "", "", [])
            self.entry, self.computations, self.roots = "", {"": {"": nothing}}, {"": nothing}

    def _check(self) -> None:
        if not self.entry:
            raise ValueError("it has no ENTRY computation, as if it were cut off")
        if rootless := self.computations.keys() - self.roots.keys():
            raise ValueError(f"computation {min(rootless)} has no ROOT")
        every = [one for part in self.computations.values() for one in part.values()]
        calls = [(one.name, called) for one in every for called in one.called]
        if lost := [call for call in calls if call[1] not in self.computations]:
            raise ValueError("{} calls {}, which is nowhere".format(*lost[0]))
        for loop in (one for one in every if one.opcode == "while"):
            loop.trip_count = self._trip_count(loop)

    def _parse(self) -> None:
        name = ""
        for number, line in enumerate(self.text.splitlines(), start=1):
            if line.startswith("}"):
                name = ""
            elif match := _COMPUTATION.match(line):
                name = match[2]
                self.computations[name] = {}
                self.entry = name if match[1] else self.entry
            elif line.strip() and (name or not _NO_CODE.match(line)):
                where = f"line {number}, {line.strip()[:60]!r}"
                try:
                    why = self._add(name, line)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
                self.unread = self.unread or (why and f"{where}: {why}")

    def _add(self, computation: str, line: str) -> str:
        """Parses an instruction, and returns what of it is not known; raises `ValueError` where a
        line is none."""
        if not computation or not (match := _STATEMENT.match(line)):
            raise ValueError("it is no instruction")
        root, name, text = match.groups()
        type_end = _closing(text) + 1 if text.startswith("(") else text.find(" ")
        opcode, _, rest = text[type_end:].lstrip().partition("(")
        end = _closing("(" + rest) - 1
        if not opcode:
            raise ValueError("it has no opcode")
        if root and computation in self.roots:
            raise ValueError("it is a second ROOT")
        inside, instructions = rest[:end], self.computations[computation]
        names = [] if opcode in ("parameter", "constant") else _NAME.findall(inside)
        if missing := [operand for operand in names if operand not in instructions]:
            raise ValueError(f"it uses {missing[0]}, which is nowhere before it")
        operands = [instructions[operand] for operand in names]
        parts = text[:type_end], opcode, inside, rest[end + 1 :], operands
        one = Instruction(computation, name, *parts)
        if not (one.body if opcode == "while" else one.called or not one.fuses):
            raise ValueError("it does not say what it calls")
        instructions[name] = one
        if root:
            self.roots[computation] = one
        return _unknown(one)

    def _trip_count(self, loop: Instruction) -> int | None:
        """Returns the iterations of a `while`, if they are known.

        XLA:TPU does not write them down: its loops count from a constant to another one.
        """
        if _RARE_LOOP.search(loop.op_name):  # as a rule, rooms suffice
            return 0
        if count := loop.attribute(r'known_trip_count":\{"n":"(\d+)"'):
            return int(count)
        test = self.roots[loop.attribute(r"condition=%?([\w.\-]+)") or loop.body]
        carried, last = loop.operands[0], self.roots[loop.body]
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        counter, end = test.operands[0], _constant(test.operands[1])
        at = counter.index
        if at < 0 or carried.opcode != "tuple" or last.opcode != "tuple" or end is None:
            return None
        start, step = _constant(carried.operands[at]), last.operands[at]
        by = [number for x in step.operands if (number := _constant(x))]
        if start is None or step.opcode != "add" or len(by) != 1:
            return None
        return max(0, -((start - end) // by[0]))

    @functools.cached_property
    def read_by_layers(self) -> set[int]:
        """The sizes of the arrays of which a loop of JAX reads a slice along the first dimension in
        each turn. XLA:GPU may make two turns one, and runs the first and the last outside; XLA:CPU
        makes a loop of a scatter."""
        sizes, parts = set(), self.computations
        for loop in (one for part in parts.values() for one in part.values()):
            turns = loop.trip_count
            if turns is None or not re.search("(^|/while)$", loop.op_name):
                continue
            inside = parts[loop.body].values()
            fused = (parts[one.called[0]].values() for one in inside if one.fuses)
            for one in itertools.chain(inside, *fused):
                dims = one.operands[0].arrays[0].dims if one.base == "dynamic-slice" else ()
                slices = ",".join(map(str, (1, *dims[1:])))
                by_turn = dims and any(dims[0] - 2 <= n <= dims[0] for n in (turns, 2 * turns))
                if by_turn and one.attribute(r"dynamic_slice_sizes=\{([\d,]*)\}") == slices:
                    sizes.add(math.prod(dims))
        return sizes

    def results(self, computation: str) -> list[Instruction]:
        """Returns the instructions that make the root's value: a tuple's members, or the root."""
        root = self.roots[computation]
        return root.operands if root.opcode == "tuple" else [root]

    @functools.cached_property
    def is_of_tpu(self) -> bool:
        """Whether it was compiled for TPUs, which alone have tiles in their layouts."""
        return bool(_TILES.search(self.header) or _TILES.search(self.text))

    def fused_collective(self, fusion: Instruction) -> Instruction | None:
        """Returns the collective that XLA:TPU starts, or runs, in a fusion.

        Fusions that compute while it runs, and the one that ends it, have copies of it.
        """
        inside = self.computations[fusion.called[0]].values()
        one = next((one for one in inside if one.collective), None)
        if one is None or (_channel(one) in self._started and not self.starts(fusion)):
            return None
        return one

    def argument(self, computation: str, number: int) -> Instruction:
        """Returns a computation's parameter of this number."""
        every = self.computations[computation].values()
        return next(x for x in every if x.opcode == "parameter" and int(x.inside) == number)

    def starts(self, fusion: Instruction) -> bool:
        """Whether a fusion starts a collective that others end."""
        inside = self.computations[fusion.called[0]].values()
        return any(_ASYNC_START in one.attributes for one in inside)

    @functools.cached_property
    def _started(self) -> set[str | None]:
        parts = [part.values() for part in self.computations.values()]
        starting = [part for part in parts if any(_ASYNC_START in one.attributes for one in part)]
        return {_channel(one) for part in starting for one in part if one.collective}

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters of the entry computation, in order."""
        entry = self.computations[self.entry].values()
        return sorted((i for i in entry if i.opcode == "parameter"), key=lambda i: int(i.inside))

    @functools.cached_property
    def uses_host(self) -> bool:
        """Whether some array is in the memory of the host."""
        return _HOST_LAYOUT in self.text

    @property
    def devices(self) -> int:
        counts = dict(re.findall(r"(num_partitions|replica_count)=(\d+)", self.header))
        return math.prod(map(int, counts.values()))

    @functools.cached_property
    def aliases(self) -> dict[int, int]:
        """The outputs that reuse the memory of a donated parameter: {output: parameter}."""
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{[\d,]*\}, (?:may|must)-alias\)", self.header)
        pairs = pairs if self.entry else []
        return {int(output or 0): int(parameter) for output, parameter in pairs}

    def source(self, instruction: Instruction, skip: re.Pattern) -> str | None:
        """Returns 'file.py:12': the innermost position in a file without `skip` in its path."""
        positions = self._positions(instruction)
        return next((f"{file}:{line}" for file, line in positions if not skip.search(file)), None)

    def _positions(self, instruction: Instruction) -> Iterator[tuple[str, str]]:
        """Yields (file, line) of the instruction's stack frames, innermost first."""
        frame = instruction.attribute(r"stack_frame_id=(\d+)") or ""
        while row := self._tables.get("StackFrames", {}).get(frame):
            ids = _numbers(row)
            place = _numbers(self._tables["FileLocations"].get(ids.get("file_location_id", ""), ""))
            file = self._tables["FileNames"].get(place.get("file_name_id", ""), "")
            yield file.strip('"'), place.get("line", "?")
            # XLA writes one more than the number of the parent's row, and 1 where there is none.
            frame = str(int(ids.get("parent_frame_id", 1)) - 1)

    @functools.cached_property
    def _tables(self) -> dict[str, dict[str, str]]:
        """The tables of source positions at the start of newer modules: rows by their numbers."""
        tables = _TABLE.findall(self.text)
        return {name: dict(row.split(" ", 1) for row in rows.splitlines()) for name, rows in tables}


def _constant(value: Instruction) -> int | None:
    """Returns the number that an integer constant has, under copies."""
    while value.opcode in ("copy", "bitcast"):
        value = value.operands[0]
    is_number = value.opcode == "constant" and value.inside.lstrip("-").isdecimal()
    return int(value.inside) if is_number else None


def _channel(collective: Instruction) -> str | None:
    return collective.attribute(r"channel_id=(\d+)")


def _numbers(row: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\d+)", row))


def _unknown(one: Instruction) -> str:
    """Returns what zerojax does not know of an instruction, without which no figure is right."""
    dtypes = [array.dtype for array in one.arrays if not _KNOWN_TYPE.fullmatch(array.dtype)]
    if not _OPCODE.fullmatch(one.opcode):
        return f"its opcode, {one.opcode}, is not known"
    if dtypes or (not one.arrays and one.type != "()"):
        return f"its type, {(dtypes or [one.type])[0][:30]}, is not known"
    groups = "replica_groups=" in one.attributes and not _GROUPS.search(one.attributes)
    return "its replica_groups are not known" if groups else ""
