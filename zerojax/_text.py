"""Plain-text and HTML views of a plan."""

import html
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_time(seconds: float) -> str:
    """0.0123 -> '12.3 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{1 if seconds / size < 1000 else 0}f} {unit}"
    return f"{seconds * 1e6:.1f} µs" if seconds else "0 µs"


def text_table(rows: list[tuple[str, ...]], right: frozenset[int] = frozenset()) -> str:
    """Columns padded to their widest cell, a rule under the first row."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]

    def line(row: tuple[str, ...]) -> str:
        cells = (
            c.rjust(w) if i in right else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * w for w in widths), *map(line, rows[1:])])


def html_table(
    lines: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    totals: Sequence[tuple[str, ...]] = (),
    below: Sequence[str] = (),
) -> str:
    """For notebooks: lines of text, then a table whose first row is its head."""

    def row(cells: tuple[str, ...], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    def text(lines: Sequence[str]) -> str:
        return f"<p>{'<br>'.join(map(html.escape, lines))}</p>" if lines else ""

    body = "".join(map(row, rows[1:]))
    foot = f"<tfoot>{''.join(row(cells, 'th') for cells in totals)}</tfoot>" if totals else ""
    table = f"<table><thead>{row(rows[0], 'th')}</thead><tbody>{body}</tbody>{foot}</table>"
    return f"{text(lines)}{table}{text(below)}"
