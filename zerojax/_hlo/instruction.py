"""One line of an HLO computation: its name, type, operands and attributes."""

import dataclasses
import functools
import math
import re

_WIDTHS = {"pred": 1, "token": 0, "opaque": 0, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array type: its dtype as XLA writes it, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> float:
        return self.size * dtype_bytes(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def dtype_bytes(dtype: str) -> float:
    """bf16 -> 2, f8e4m3fn -> 1, c64 -> 8."""
    if dtype in _WIDTHS:
        return _WIDTHS[dtype]
    bits = re.match(r"(?:bf|[fsuc])(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    opcode: str
    inside: str  # what stands in its parentheses
    attributes: str  # what follows them
    is_root: bool = False

    @functools.cached_property
    def operands(self) -> list[str]:
        return [] if self.opcode in ("parameter", "constant") else _NAME.findall(self.inside)

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """Every array of its type, tuples flattened."""
        return arrays_of(self.type)

    @property
    def nbytes(self) -> float:
        return sum(array.nbytes for array in self.arrays)

    @functools.cached_property
    def called(self) -> list[str]:
        """Names of the computations it runs."""
        return [name for found in _CALLED.findall(self.attributes) for name in _NAME.findall(found)]

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression found among its attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def fuses(self) -> bool:
        """Runs a fused computation; newer XLA starts slices of stacks as `fusion-start`."""
        return self.opcode in ("fusion", "fusion-start")

    def result_of(self, start: "Instruction", operands: int) -> slice:
        """Of a `-done`: where its arrays stand among those of its `-start`.

        A start is what it makes (all-reduce), or (operands, result, contexts); `operands` counts
        their arrays. Only copies have their result first.
        """
        count = len(self.arrays)
        first = start.opcode == "copy-start" or len(start.arrays) == count
        return slice(0, count) if first else slice(operands, operands + count)

    @property
    def base(self) -> str:
        """The opcode, without what makes it one half of an asynchronous pair."""
        return re.sub(r"-(start|done)$", "", self.opcode)

    @property
    def trip_count(self) -> int | None:
        """Of a `while`, where XLA knows it."""
        count = self.attribute(r'known_trip_count":\{"n":"(\d+)"')
        return None if count is None else int(count)

    @property
    def op_name(self) -> str:
        """The path of name scopes under which JAX traced it."""
        return self.attribute(r'op_name="([^"]*)"') or ""


def arrays_of(type_text: str) -> list[Array]:
    return [
        Array(dtype, tuple(int(d.lstrip("<=")) for d in re.split(r"[,\s]+", dims) if d.strip()))
        for dtype, dims in _ARRAY.findall(type_text)
    ]


def top_level_types(type_text: str) -> list[str]:
    """The members of a tuple type; of any other, itself."""
    if not type_text.startswith("("):
        return [type_text]
    members, depth, start = [], 0, 1
    for at, char in enumerate(type_text):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            members.append(re.sub(r"/\*.*?\*/", "", type_text[start:at]).strip())
            start = at + 1
    return [member for member in members if member]


def parse_instruction(name: str, text: str, is_root: bool) -> Instruction:
    type_end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    type_text, rest = text[:type_end], text[type_end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest, 0) - 1
    if not opcode or end >= len(rest):
        raise ValueError("its parentheses do not close")
    return Instruction(name, type_text, opcode, rest[:end], rest[end + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.start()
    return len(text)
