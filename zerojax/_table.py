"""Tables, as text, as HTML for notebooks and as JSON; what they show: bytes and times as text,
sums, groups.

Tables are drawn here and not with `rich`: a table that is redirected to a log is drawn in full, one
on a terminal drops and repeats columns until it fits, and both must be the same text, without
colours or boxes. With all of its own features off, `rich` did no more than wrap lines.
"""

import contextlib
import contextvars
import dataclasses
import functools
import html
import itertools
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from zerojax._types import Number

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
TEXT = str | bool  # what is aligned at the left
Cell = TEXT | float | None  # numbers have a format; None is printed as "-"
# An attribute of an item or a function of it, the format of numbers, and a sentence about it.
Column = tuple[str | Callable[[Any], Cell], Callable[[Any], str], str]
GAP = 2  # spaces between columns
LEAST_WIDTH = 18  # characters that a flexible column keeps, if it has as many
NUMBER = re.compile(r"\d+(?=/|$)")  # at the end of a part of a path

_FITS = contextvars.ContextVar("fits", default=False)
# Whole words, so that a command can be copied.
_wrap = functools.partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def total(*parts: Number) -> Number:
    """Adds up; None if a part is unknown."""
    return None if None in parts else sum(parts)


def summed(pairs: Iterable[tuple[K, float]]) -> Counter[K]:
    """Adds up numbers by their keys."""
    sums: Counter[K] = Counter()
    for key, number in pairs:
        sums[key] += number  # type: ignore
    return sums


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Returns the items by their keys, both in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def human_bytes(count: Number) -> str:
    """Formats 1536 as '1.5 KiB', what is unknown as '-'."""
    if count is None:
        return "-"
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(count) >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.{int(units[0] != 'B')}f} {units[0]}"


def human_time(seconds: Number) -> str:
    """Formats 0.0123 as '12.3 ms', what is unknown as '-'."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{1 if seconds / size < 1000 else 0}f} {unit}"
    return f"{seconds * 1e6:.1f} µs" if seconds else "0 µs"


def in_runs(paths: Iterable[str]) -> list[str]:
    """Writes paths that differ in their first number, which counts layers, as one: h/{0..3}/up."""
    numbers: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        if number := NUMBER.search(path):
            ends = path[: number.start()], path[number.end() :]
            numbers.setdefault(ends, set()).add(number[0])
        else:
            numbers.setdefault((path,), set())
    joined = []
    for ends, texts in numbers.items():
        each = sorted(texts, key=int)
        if 1 < len(each) == int(each[-1]) - int(each[0]) + 1:
            each = [f"{{{each[0]}..{each[-1]}}}"]
        joined += [number.join(ends) for number in each or [""]]
    return joined


def few(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Joins the first names, and counts the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def shortened(words: Sequence[str], width: int) -> list[str]:
    """Takes the middle out of long words; the end of a path tells more than its beginning.

    All keep as much of their beginnings: enough for as many as possible to stay different.
    """

    def shorten(word: str, head: int) -> str:
        tail = len(word) - (width - 1 - head)
        return word if len(word) <= width else f"{word[:head]}…{word[tail:]}"

    tried = ([shorten(word, head) for word in words] for head in range((width - 1) // 4, width))
    return max(tried, key=lambda short: len(set(short)))  # the first of the best


@contextlib.contextmanager
def fitted() -> Iterator[None]:
    """Fits text to COLUMNS, or to 80 columns, where there is no terminal to fit it to."""
    token = _FITS.set(True)
    try:
        yield
    finally:
        _FITS.reset(token)


def _room() -> int:
    """Returns the columns that text has: those of a terminal, and without one as many as it likes,
    unless it is `fitted`."""
    fits = (sys.stdout is not None and sys.stdout.isatty()) or _FITS.get()
    return shutil.get_terminal_size().columns if fits else sys.maxsize


def paragraphs(lines: Sequence[str]) -> str:
    """Joins lines of text; where it has to fit, long ones wrap between words, beside their label
    if they begin with one and spaces after it."""
    room, texts = _room(), []
    for line in lines:
        label = re.match(r"(?:\S+ )+ +", line)
        indent = len(label[0]) if label and len(label[0]) < room // 2 else 2
        texts += [line] if len(line) <= room else _wrap(line, room, subsequent_indent=" " * indent)
    return "\n".join(texts)


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """Rows below a header: prints on a terminal, in a log and in a notebook; `to_dict` is for JSON.

    Columns are named by their titles. Those of numbers are aligned at their right, as are those of
    `right`.

    - `title`: lines of text above, `notes`: paragraphs below. A note of several lines is code: it
      does not wrap, so that it can be copied.
    - `formats`: turns the numbers of a column into text, by `human_bytes` for example. `human_time`
      gives all of a column one unit.
    - `flexible`, the first by default: columns that may become narrow. Their text wraps, and long
      words lose their middle.
    - `optional`: columns that a narrow table leaves out, in this order.
    - `keys`: the first columns, repeated where a table is still too wide and continues below.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: Sequence[str] = ()
    notes: Sequence[str] = ()
    totals: Sequence[Sequence[Cell]] = ()
    formats: Mapping[str, Callable[[Any], str]] = dataclasses.field(default_factory=dict)
    right: Collection[str] = ()
    flexible: Collection[str] | None = None
    optional: Sequence[str] = ()
    keys: int = 1

    @classmethod
    def of(cls, columns: Mapping[str, Column], items: Iterable[T], **options: Any) -> "Table":
        """Makes a table with a row for each item."""
        formats = {title: form for title, (_, form, _) in columns.items()}
        values = [attrgetter(of) if isinstance(of, str) else of for of, _, _ in columns.values()]
        rows = [[value(item) for value in values] for item in items]
        return cls(list(columns), rows, formats=formats, **options)

    def __str__(self) -> str:
        above = [paragraphs(self.title)] if self.title else []
        notes = [note if "\n" in note else paragraphs([note]) for note in self.notes]
        return "\n".join([*above, *self._drawn(_room()), *notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str = "td") -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        def text(lines: Sequence[str]) -> str:
            parts = [html.escape(line) for line in lines if line]
            parts = [f"<pre>{part.strip()}</pre>" if "\n" in part else part for part in parts]
            return f"<p>{'<br>'.join(parts)}</p>" if parts else ""

        texts = list(zip(*self._texts().values(), strict=True))
        body = "".join(map(row, texts[: len(self.rows)]))
        foot = "".join(row(cells, "th") for cells in texts[len(self.rows) :])
        table = f"<thead>{row(self.header, 'th')}</thead><tbody>{body}</tbody>"
        table += f"<tfoot>{foot}</tfoot>" if foot else ""
        return f"{text(self.title)}<table>{table}</table>{text(self.notes)}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows as dicts by column, with numbers as they are."""
        named = [dict(zip(self.header, row, strict=True)) for row in (*self.rows, *self.totals)]
        count = len(self.rows)
        parts = {"title": self.title, "rows": named[:count], "totals": named[count:]}
        return {name: list(part) for name, part in (parts | {"notes": self.notes}).items() if part}

    def _columns(self) -> dict[str, list[Cell]]:
        every = (*self.rows, *self.totals)
        return {name: [row[at] for row in every] for at, name in enumerate(self.header)}

    def _texts(self) -> dict[str, list[str]]:
        columns = self._columns().items()
        return {name: _formatted(cells, self.formats.get(name, str)) for name, cells in columns}

    def _drawn(self, room: int) -> Iterator[str]:
        """Draws the rows; where they are wider than `room`, as tables with a blank line between."""
        texts = self._texts()
        if room < sys.maxsize:
            texts = {name: column for name, column in texts.items() if any(column) or not column}
        numbers = (k for k, v in self._columns().items() if not all(isinstance(c, TEXT) for c in v))
        right = {*numbers, *self.right}
        flexible = self.header[:1] if self.flexible is None else self.flexible
        natural = {name: max(map(len, (name, *column))) for name, column in texts.items()}
        least = {k: min(LEAST_WIDTH, v) if k in flexible else v for k, v in natural.items()}
        for count, block in enumerate(_blocks(least, room, self.optional, self.keys)):
            rows = range(len(self.rows) + len(self.totals))
            if count:
                yield ""
                rows = [at for at in rows if any(texts[name][at] for name in block[self.keys :])]
            spare, columns, formats = max(0, room - _width(least, block)), [], []
            for name in block:
                width = min(natural[name], least[name] + spare)
                spare -= width - least[name]
                cells = [name, "-" * width, *(texts[name][at] for at in rows)]
                columns.append(_wrapped(cells, width))
                formats.append(f"{{:{'>' if name in right else '<'}{width}}}")
            line = (" " * GAP).join(formats)
            for row in zip(*columns, strict=True):
                for texts_of_line in itertools.zip_longest(*row, fillvalue=""):
                    yield line.format(*texts_of_line).rstrip()


def _formatted(column: Sequence[Cell], form: Callable[[Any], str]) -> list[str]:
    numbers = [cell for cell in column if not isinstance(cell, str | None)]
    if form is human_time and len({human_time(seconds).split()[-1] for seconds in numbers}) > 1:
        form = "{:,.1f} ms".format
        column = [cell if isinstance(cell, str | None) else cell * 1e3 for cell in column]
    words = {True: "yes", False: "no", None: "-"}
    fixed = [words[cell] if isinstance(cell, bool | None) else cell for cell in column]
    return [cell if isinstance(cell, str) else form(cell) for cell in fixed]


class Printed:
    """A result that prints, also in a notebook, as its `table()`."""

    def table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _width(widths: Mapping[str, int], columns: Sequence[str]) -> int:
    return sum(widths[name] + GAP for name in columns) - GAP


def _blocks(
    widths: Mapping[str, int], room: int, optional: Sequence[str], keys: int
) -> list[list[str]]:
    """Splits columns into tables no wider than `room`; each begins with the same key columns."""
    columns = list(widths)
    for name in optional:
        if _width(widths, columns) > room and name in columns:
            columns.remove(name)
    blocks = [columns[:keys]]
    for name in columns[keys:]:
        if len(blocks[-1]) > keys and _width(widths, [*blocks[-1], name]) > room:
            blocks.append(columns[:keys])
        blocks[-1].append(name)
    return blocks


def _wrapped(cells: Sequence[str], width: int) -> list[list[str]]:
    """Returns the lines of each cell of a column, none of them longer than `width`."""
    words = list({word for cell in cells for word in cell.split() if len(word) > width})
    short = dict(zip(words, shortened(words, width), strict=True))

    def lines(cell: str) -> list[str]:
        if len(cell) <= width:
            return [cell]
        return _wrap(" ".join(short.get(word, word) for word in cell.split()), width)

    return [lines(cell) for cell in cells]
