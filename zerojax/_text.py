"""Bytes, times and tables as text; tables as HTML for notebooks."""

import contextlib
import contextvars
import html
import io
import itertools
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence

Row = tuple[str, ...]
GAP = 2  # spaces between columns
NARROW = 18  # characters that a flexible column keeps, if it has as many
MOST_ROWS = 2000  # rich takes about a millisecond for each

_FITS = contextvars.ContextVar("fits", default=False)


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


@contextlib.contextmanager
def fitted() -> Iterator[None]:
    """Fits tables to COLUMNS, or to 80 columns, where there is no terminal to fit them to."""
    token = _FITS.set(True)
    try:
        yield
    finally:
        _FITS.reset(token)


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def paragraphs(lines: Sequence[str]) -> str:
    """Joins lines of text; on a terminal, long ones wrap between words."""
    if _on_terminal():
        wrapper = textwrap.TextWrapper(
            width=shutil.get_terminal_size().columns,
            subsequent_indent="  ",
            break_long_words=False,  # a command, say, is to be copied
            break_on_hyphens=False,
        )
        lines = list(map(wrapper.fill, lines))
    return "\n".join(lines)


def text_table(
    rows: Sequence[Row],
    right: Collection[int] = (),
    *,
    flexible: Collection[int] = (0,),
    optional: Sequence[int] = (),
    keys: int = 1,
) -> str:
    """Draws a table whose first row is its heading; on a terminal, one that fits it.

    What is printed elsewhere, to a log say, is drawn in full.

    Arguments:
        right: columns to align at their right.
        flexible: columns that may become narrow: text wraps, and long words lose their middle.
        optional: columns that a narrow table leaves out, in this order.
        keys: the first columns, repeated where a table is still too wide and continues below.
    """
    if not (_on_terminal() or _FITS.get()) or len(rows) > MOST_ROWS:
        return _plain(rows, right)
    head, *body = rows
    columns = [at for at in range(len(head)) if not body or any(row[at] for row in body)]
    natural = {at: max(len(row[at]) for row in rows) for at in columns}
    least = {at: min(NARROW, size) if at in flexible else size for at, size in natural.items()}
    tables = []
    for block in _blocks(least, shutil.get_terminal_size().columns, optional, keys):
        widths, spare = {}, shutil.get_terminal_size().columns - _room(least, block)
        for at in block:
            widths[at] = least[at] + max(0, min(natural[at] - least[at], spare))
            spare -= widths[at] - least[at]
        shown = [row for row in body if any(row[at] for at in block[keys:] or block)]
        tables.append(_drawn([head, *shown], widths, right))
    return "\n\n".join(tables)


def _plain(rows: Sequence[Row], right: Collection[int]) -> str:
    """Draws columns padded to their widest cell, and a rule under the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = tuple("-" * width for width in widths)

    def line(row: Row) -> str:
        cells = (
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return (" " * GAP).join(cells).rstrip()

    return "\n".join(map(line, (rows[0], rule, *rows[1:])))


def _room(widths: Mapping[int, int], columns: Sequence[int]) -> int:
    return sum(widths[at] + GAP for at in columns) - GAP


def _blocks(
    widths: Mapping[int, int], width: int, optional: Sequence[int], keys: int
) -> list[list[int]]:
    """Splits columns into tables of at most `width`; each begins with the same key columns."""
    columns = list(widths)
    for at in optional:
        if _room(widths, columns) > width and at in columns:
            columns.remove(at)
    blocks = [columns[:keys]]
    for at in columns[keys:]:
        if len(blocks[-1]) > keys and _room(widths, [*blocks[-1], at]) > width:
            blocks.append(columns[:keys])
        blocks[-1].append(at)
    return blocks


def _drawn(rows: Sequence[Row], widths: Mapping[int, int], right: Collection[int]) -> str:
    """Draws columns of these widths with rich, which wraps text within them."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, GAP, 0, 0))
    for at, width in widths.items():
        table.add_column(width=width, justify="right" if at in right else "left")
    columns = []
    for at, width in widths.items():
        cells = [row[at].split(" ") for row in rows]
        words = iter(shortened([word for cell in cells for word in cell], width))
        head, *body = (" ".join(itertools.islice(words, len(cell))) for cell in cells)
        columns.append([head, "-" * width, *body])
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    file = io.StringIO()
    console = Console(
        file=file,
        width=_room(widths, list(widths)),
        force_terminal=False,  # no escape codes, whatever the environment says
        force_jupyter=False,
        legacy_windows=False,
        markup=False,  # a cell may be "[64, 32]"
        emoji=False,
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


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
        return f"<p>{'<br>'.join(map(html.escape, lines))}</p>" if lines else ""

    body = "".join(map(row, rows[1:]))
    foot = f"<tfoot>{''.join(row(cells, 'th') for cells in totals)}</tfoot>" if totals else ""
    table = f"<table><thead>{row(rows[0], 'th')}</thead><tbody>{body}</tbody>{foot}</table>"
    return f"{text(lines)}{table}{text(below)}"
