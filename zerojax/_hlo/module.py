"""A parser for the text of XLA's modules: as much of it as an audit reads, and no more."""

import functools
import math
import re

from zerojax._hlo.instruction import (
    Array as Array,
    Instruction as Instruction,
    arrays_of as arrays_of,
    parse_instruction,
    top_level_types as top_level_types,
)

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*)$")


class Module:
    """`computations[name][instruction name]`, in the order in which they are scheduled."""

    def __init__(self, text: str) -> None:
        if not text.lstrip().startswith("HloModule"):
            raise ValueError(
                f"this is not the text of an HLO module: it starts with {text[:40]!r} and not "
                "with 'HloModule'. Pass compiled.as_text(), or a file it was written to."
            )
        self.text = text
        self.header = text.lstrip().split("\n", 1)[0]
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        self._parse(text)
        if not self.entry:
            raise ValueError("the HLO text has no ENTRY computation: was it cut off?")
        for name, instructions in self.computations.items():
            self._check(name, instructions)

    def _parse(self, text: str) -> None:
        current: dict[str, Instruction] | None = None
        for number, line in enumerate(text.splitlines(), start=1):
            if line.startswith("}"):
                current = None
            elif current is not None:
                found = _INSTRUCTION.match(line)
                if found:
                    try:
                        made = parse_instruction(found[2], found[3], bool(found[1]))
                    except ValueError as error:
                        raise _damaged(f"line {number}, {line.strip()[:60]!r}: {error}") from None
                    current[found[2]] = made
            elif found := _COMPUTATION.match(line):
                current = self.computations.setdefault(found[2], {})
                if found[1]:
                    self.entry = found[2]

    def _check(self, name: str, instructions: dict[str, Instruction]) -> None:
        """What everything after relies on; text that lost lines does not have it."""
        if sum(i.is_root for i in instructions.values()) != 1:
            raise _damaged(f"computation {name} has no ROOT")
        for instruction in instructions.values():
            missing = [o for o in instruction.operands if o not in instructions]
            missing += [c for c in instruction.called if c not in self.computations]
            if not instruction.called and (instruction.fuses or instruction.opcode == "while"):
                raise _damaged(f"{instruction.name} in {name} does not say what it calls")
            if missing:
                raise _damaged(f"{instruction.name} in {name} uses {missing[0]}, which is nowhere")

    def root(self, computation: str) -> Instruction:
        return next(i for i in self.computations[computation].values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The entry computation's, in order."""
        entry = self.computations[self.entry].values()
        found = [i for i in entry if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.inside))

    @property
    def devices(self) -> int:
        counts = dict(re.findall(r"(num_partitions|replica_count)=(\d+)", self.header))
        return math.prod(map(int, counts.values()))

    @functools.cached_property
    def aliases(self) -> dict[int, int]:
        """Outputs that reuse the memory of a donated parameter: {output: parameter}."""
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{[\d,]*\}, (?:may|must)-alias\)", self.header)
        return {int(output or 0): int(parameter) for output, parameter in pairs}

    @functools.cached_property
    def _frames(self) -> dict[str, dict[int, str]]:
        """The tables of source positions that newer modules start with."""
        tables: dict[str, dict[int, str]] = {}
        names = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
        rows: dict[int, str] | None = None
        for line in self.text.splitlines():
            if line.strip() in names:
                rows = tables.setdefault(line.strip(), {})
            elif rows is not None and (found := re.match(r"(\d+) (.*)", line)):
                rows[int(found[1])] = found[2]
            else:
                rows = None
        return tables

    def source(self, instruction: Instruction, skip: tuple[str, ...] = ()) -> str | None:
        """'file.py:12', the innermost position whose file contains none of `skip`."""
        for file, line in self._positions(instruction):
            if not any(part in file for part in skip):
                return f"{file}:{line}"
        return None

    def _positions(self, instruction: Instruction) -> list[tuple[str, str]]:
        file = instruction.attribute(r'source_file="([^"]*)"')
        if file:
            return [(file, instruction.attribute(r"source_line=(\d+)") or "?")]
        frame = int(instruction.attribute(r"stack_frame_id=(\d+)") or 0)
        found = []
        while row := self._frames.get("StackFrames", {}).get(frame):
            ids = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
            place = self._frames["FileLocations"].get(ids.get("file_location_id", 0), "")
            where = dict(re.findall(r"(\w+)=(\d+)", place))
            name = self._frames["FileNames"].get(int(where.get("file_name_id", 0)), '""')
            found.append((name.strip('"'), where.get("line", "?")))
            parent = ids.get("parent_frame_id", 0)
            if parent == frame:
                break
            frame = parent
        return found


def _damaged(what: str) -> ValueError:
    return ValueError(f"the HLO text is damaged: {what}. Write it anew with compiled.as_text().")
