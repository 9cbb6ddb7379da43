"""Tables, as text, as HTML for notebooks and as JSON; bytes and times as text.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

Row = tuple[str, ...]
TEXT = str | bool  # what is aligned at the left
Cell = TEXT | float | None  # numbers have a format; None is printed as "-"
GAP = 2  # spaces between columns
NARROW = 18  # characters that a flexible column keeps, if it has as many

_FITS = contextvars.ContextVar("fits", default=False)
# Whole words, so that a command can be copied.
_wrap = functools.partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def human_bytes(count: float) -> str:
    """Formats 1536 as '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_time(seconds: float) -> str:
    """Formats 0.0123 as '12.3 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{1 if seconds / size < 1000 else 0}f} {unit}"
    return f"{seconds * 1e6:.1f} µs" if seconds else "0 µs"


def shortened(words: Sequence[str], width: int) -> list[str]:
    """Takes the middle out of long words; the end of a path tells more than its beginning.

    All keep as much of their beginnings: enough for as many as possible to stay different.
    """

    def shorten(word: str, head: int) -> str:
        tail = len(word) - (width - 1 - head)
        return word if len(word) <= width else f"{word[:head]}…{word[tail:]}"

    heads = range((width - 1) // 4, width)
    tried = ([shorten(word, head) for word in words] for head in heads)
    return max(tried, key=lambda short: len(set(short)))  # the first of the best


def told_apart(words: Sequence[str], width: int) -> list[str]:
    """Shortens words to `width`, or to as much more as it takes for all to stay different."""
    tried = (shortened(words, wide) for wide in itertools.count(width))
    return next(short for short in tried if len(set(short)) == len(set(words)))


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
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    fits = on_terminal or _FITS.get()
    return shutil.get_terminal_size().columns if fits else sys.maxsize


def paragraphs(lines: Sequence[str]) -> str:
    """Joins lines of text; where it has to fit, long ones wrap between words, beside their label
    if they begin with one and spaces after it."""
    room = _room()
    return "\n".join(_hanging(line, room) if len(line) > room else line for line in lines)


def _hanging(line: str, room: int) -> str:
    label = re.match(r"(?:\S+ )+ +", line)
    indent = len(label[0]) if label and len(label[0]) < room // 2 else 2
    return "\n".join(_wrap(line, room, subsequent_indent=" " * indent))


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """Rows below a header: prints on a terminal, in a log and in a notebook; `to_dict` is for JSON.

    Columns are named by their titles. Those of numbers are aligned at their right, as are those of
    `right`.

    - `title`: lines of text above, `notes`: paragraphs below. A note of several lines is code: it
      does not wrap, so that it can be copied.
    - `formats`: makes text of the numbers of a column, `human_bytes` for example. `human_time` has
      all of a column in one unit.
    - `flexible`, the first by default: columns that may become narrow. Text wraps, and long words
      lose their middle, unless the column is `whole`.
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
    whole: Collection[str] = ()
    optional: Sequence[str] = ()
    keys: int = 1

    def __str__(self) -> str:
        at = {title: column for column, title in enumerate(self.header)}
        named = zip(self.header, self._columns(), strict=True)
        numbers = {name for name, column in named if not all(isinstance(c, TEXT) for c in column)}
        flexible = self.header[:1] if self.flexible is None else self.flexible
        text = text_table(
            [tuple(self.header), *self._texts()],
            right=[at[name] for name in (*numbers, *self.right) if name in at],
            flexible=[at[name] for name in flexible if name in at],
            whole=[at[name] for name in self.whole],
            optional=[at[name] for name in self.optional if name in at],
            keys=self.keys,
        )
        notes = [note if "\n" in note else paragraphs([note]) for note in self.notes]
        return "\n".join([*([paragraphs(self.title)] if self.title else []), text, *notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        texts = [tuple(self.header), *self._texts()]
        end = len(texts) - len(self.totals)
        return html_table(self.title, texts[:end], texts[end:], self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows as dicts by column, with numbers as they are."""
        named = [dict(zip(self.header, row, strict=True)) for row in (*self.rows, *self.totals)]
        count = len(self.rows)
        parts = {"title": self.title, "rows": named[:count], "totals": named[count:]}
        return {name: list(part) for name, part in (parts | {"notes": self.notes}).items() if part}

    def _columns(self) -> list[list[Cell]]:
        every = (*self.rows, *self.totals)
        return [[row[at] for row in every] for at in range(len(self.header))]

    def _texts(self) -> list[Row]:
        """Returns the rows, with the total rows below, as text."""
        texts = (
            _formatted(cells, self.formats.get(name, _plain))
            for name, cells in zip(self.header, self._columns(), strict=True)
        )
        return list(zip(*texts, strict=True))


def _formatted(column: Sequence[Cell], form: Callable[[Any], str]) -> list[str]:
    numbers = [cell for cell in column if not isinstance(cell, str | None)]
    if form is human_time and len({human_time(seconds).split()[-1] for seconds in numbers}) > 1:
        form = "{:,.1f} ms".format
        column = [cell if isinstance(cell, str | None) else cell * 1e3 for cell in column]
    return ["-" if c is None else c if isinstance(c, str) else form(c) for c in column]


def _plain(cell: Cell) -> str:
    return ("no", "yes")[cell] if isinstance(cell, bool) else str(cell)


class Printed:
    """A result that prints, also in a notebook, as its `table()`."""

    def table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def explained(columns: Mapping[str, str]) -> Table:
    """Lists the columns of a table, with a sentence about each."""
    header = "column", "what it says"
    return Table(header, list(columns.items()), flexible=header[1:])


def text_table(
    rows: Sequence[Row],
    right: Collection[int] = (),
    *,
    flexible: Collection[int] = (0,),
    whole: Collection[int] = (),
    optional: Sequence[int] = (),
    keys: int = 1,
) -> str:
    """Draws a table whose first row is its heading; on a terminal, one that fits it.

    What is printed elsewhere, to a log say, is drawn in full.

    Arguments:
        right: columns to align at their right.
        flexible: columns that may become narrow: text wraps, and long words lose their middle.
        whole: of these, those whose long words stick out instead: they are to be copied.
        optional: columns that a narrow table leaves out, in this order.
        keys: the first columns, repeated where a table is still too wide and continues below.
    """
    head, *body = rows
    room = _room()
    fits = room < sys.maxsize
    empty = [at for at in range(len(head)) if fits and body and not any(row[at] for row in body)]
    natural = {at: max(len(row[at]) for row in rows) for at in range(len(head)) if at not in empty}
    least = {at: min(NARROW, size) if at in flexible else size for at, size in natural.items()}
    tables = []
    for block in _blocks(least, room, optional, keys):
        shown = [row for row in body if not tables or any(row[at] for at in block[keys:])]
        spare = max(0, room - _width(least, block))
        widths = {}
        for at in block:
            widths[at] = min(natural[at], least[at] + spare)
            spare -= widths[at] - least[at]
        tables.append(_drawn([head, *shown], widths, right, whole))
    return "\n\n".join(tables)


def _width(widths: Mapping[int, int], columns: Sequence[int]) -> int:
    return sum(widths[at] + GAP for at in columns) - GAP


def _blocks(
    widths: Mapping[int, int], room: int, optional: Sequence[int], keys: int
) -> list[list[int]]:
    """Splits columns into tables no wider than `room`; each begins with the same key columns."""
    columns = list(widths)
    for at in optional:
        if _width(widths, columns) > room and at in columns:
            columns.remove(at)
    blocks = [columns[:keys]]
    for at in columns[keys:]:
        if len(blocks[-1]) > keys and _width(widths, [*blocks[-1], at]) > room:
            blocks.append(columns[:keys])
        blocks[-1].append(at)
    return blocks


def _drawn(
    rows: Sequence[Row],
    widths: Mapping[int, int],
    right: Collection[int],
    whole: Collection[int],
) -> str:
    """Draws columns of these widths, in which text wraps, and a rule under the heading."""
    head, *body = rows
    columns = [
        _wrapped([head[at], "-" * width, *(row[at] for row in body)], width, at in whole)
        for at, width in widths.items()
    ]
    aligned = [f"{{:{'>' if at in right else '<'}{width}}}" for at, width in widths.items()]
    line = (" " * GAP).join(aligned)
    cells = (itertools.zip_longest(*row, fillvalue="") for row in zip(*columns, strict=True))
    return "\n".join(line.format(*texts).rstrip() for row in cells for texts in row)


def _wrapped(cells: Sequence[str], width: int, whole: bool) -> list[list[str]]:
    """Returns the lines of each cell of a column, none of them longer than `width`, but for words
    that stay whole."""
    words = list({word for cell in cells for word in cell.split() if len(word) > width})
    short = {} if whole else dict(zip(words, shortened(words, width), strict=True))

    def lines(cell: str) -> list[str]:
        if len(cell) <= width:
            return [cell]
        return _wrap(" ".join(short.get(word, word) for word in cell.split()), width)

    return [lines(cell) for cell in cells]


def html_table(
    lines: Sequence[str],
    rows: Sequence[Row],
    totals: Sequence[Row] = (),
    below: Sequence[str] = (),
) -> str:
    """Makes HTML for notebooks: lines of text, then a table whose first row is its heading."""

    def row(cells: Row, tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    def text(lines: Sequence[str]) -> str:
        parts = [html.escape(line) for line in lines if line]
        parts = [f"<pre>{part.strip()}</pre>" if "\n" in part else part for part in parts]
        return f"<p>{'<br>'.join(parts)}</p>" if parts else ""

    body = "".join(map(row, rows[1:]))
    foot = f"<tfoot>{''.join(row(cells, 'th') for cells in totals)}</tfoot>" if totals else ""
    table = f"<table><thead>{row(rows[0], 'th')}</thead><tbody>{body}</tbody>{foot}</table>"
    return f"{text(lines)}{table}{text(below)}"
