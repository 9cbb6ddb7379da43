"""Readings of what is printed, titles and long lines: tests of tables and commands use them."""

import html
import re

import pytest

from zerojax import _table


def titles(text):
    """The titles of a table's columns, each over its rule."""
    heading, rule = re.search(r"^(.+)\n([- ]+)$", text, flags=re.MULTILINE).groups()
    return [heading[under.start() : under.end()].strip() for under in re.finditer("-+", rule)]


def memory(plan):
    """What the table of a plan says of memory, by the path of a leaf."""
    rows = re.findall(r"<tr>(.*?)</tr>", plan._repr_html_(), flags=re.DOTALL)
    heading, *cells = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL) for row in rows
    ]
    at = heading.index("memory")
    return {row[0]: html.unescape(row[at]) for row in cells}


def long_lines(text, columns=80):
    """Lines that are too long, but for words that cannot be split."""
    return [line for line in text.splitlines() if len(line) > columns and " " in line.strip()]


def fitted(result):
    """A result as the command line prints it on 80 columns."""
    with pytest.MonkeyPatch.context() as patch, _table.fitted():
        patch.setenv("COLUMNS", "80")
        text = str(result)
    assert not long_lines(text)
    return text
