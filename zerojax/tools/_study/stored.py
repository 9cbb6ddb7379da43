"""A study's cells in a JSON file, written as each is done."""

import json
import os
import pathlib
from typing import Any

from zerojax.tools._study.cell import Cell

MARK, FORMAT = "zerojax_study", 1


class Stored:
    """The cells of a file, or of none. Those that others asked for stay in it."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else pathlib.Path(path)
        self.cells: list[Cell] = [] if self.path is None else _read(self.path)

    def done(self, asked: Cell) -> Cell | None:
        """Returns the cell that was asked for, if the file has its figures and nothing that they
        depend on has changed since."""
        known = (one for one in self.cells if (one.place, one.key) == (asked.place, asked.key))
        return next((one for one in known if one.figures), None)

    def found(self, asked: Cell) -> Cell:
        """Returns the cell that was asked for, which has been put."""
        return next(one for one in self.cells if (one.place, one.key) == (asked.place, asked.key))

    def put(self, cell: Cell) -> None:
        """Writes a cell, in place of an older one."""
        self.cells = [one for one in self.cells if one.place != cell.place] + [cell]
        if self.path is not None:
            data = {MARK: FORMAT, "cells": [one.to_dict() for one in self.cells]}
            _replace(self.path, json.dumps(data, indent=1) + "\n")


def _read(path: pathlib.Path) -> list[Cell]:
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        raise ValueError(
            f"out={str(path)!r} cannot be written: name a file in a folder that exists."
        )
    if not path.exists():
        return []
    try:
        data: Any = json.loads(path.read_text())
        if data[MARK] != FORMAT:
            raise _foreign(path, f"its format is {data[MARK]!r}, not {FORMAT}")
        return [Cell.of_dict(cell) for cell in data["cells"]]
    except OSError as error:
        raise ValueError(f"out={str(path)!r} cannot be read: {error.strerror}.") from None
    except (KeyError, TypeError) as error:
        raise _foreign(path, f"{error} is missing or wrong") from None
    except UnicodeDecodeError:
        raise _foreign(path, "it is no text") from None
    except json.JSONDecodeError as error:
        raise _foreign(path, f"it is no JSON: {error}") from None


def _foreign(path: pathlib.Path, why: str) -> ValueError:
    return ValueError(
        f"out={str(path)!r} is no file of a study, or a damaged one ({why}). Name another file, or "
        "remove this one."
    )


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes all of a file or nothing."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
