"""The mutants: defects that a maintainer might make, written as pieces of diffs.

    # name: what the defect breaks
    @ zerojax/_kernel/travel.py
     a line that stays, where the next one stands in the file more than once
    -    a line that goes
    +    a line that comes

There are no line numbers: the lines that stay and go are to be in the file exactly once.
"""

import dataclasses
import pathlib
import re

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


class NotThereError(Exception):
    """The lines that a mutant changes are not in its file, or are there more than once."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One defect: the lines `old` of a file become `new`."""

    name: str
    breaks: str
    file: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        """Returns the text of the file with the defect."""
        count = len(re.findall(f"^{re.escape(self.old)}", text, re.MULTILINE))
        if count != 1:
            raise NotThereError(
                f"{self.name}: {self.file} has these lines {count} times. Find what has become of "
                f"them, and change the mutant.\n{self.old}"
            )
        return text.replace(f"\n{self.old}", f"\n{self.new}")


def read() -> dict[str, Mutant]:
    """Returns all mutants by name, in the order of the files that list them."""
    text = "\n".join(path.read_text() for path in sorted(HERE.glob("*.diff")))
    mutants = [parsed(block) for block in re.split(r"^(?=# )", text, flags=re.M)[1:]]
    assert len({mutant.name for mutant in mutants}) == len(mutants), "two mutants have one name"
    return {mutant.name: mutant for mutant in mutants}


def parsed(block: str) -> Mutant:
    title, file, *lines = block.splitlines()
    name, _, breaks = title.removeprefix("# ").partition(": ")
    old, new = ("".join(f"{x[1:]}\n" for x in lines if x[:1] in (" ", sign)) for sign in "-+")
    return Mutant(name, breaks, file.removeprefix("@ "), old, new)
