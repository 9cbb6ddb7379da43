"""Stores results in a JSON file: dated rows, under the versions that made them."""

import argparse
import datetime
import hashlib
import json
import operator
import pathlib
import re
import sys

ONLY = "only those whose name matches this regex"


def file(text):
    """Checks a path for argparse, so that no measurement is lost at the end."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: does its folder exist?")
    return path


def expression(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def chosen(only, names):
    """Returns the names that an expression matches or spells out."""
    found = [name for name in names if only.search(name) or only.pattern == name]
    if not found:
        sys.exit("\n".join([f"nothing is called {only.pattern!r}. There are:", *names]))
    return found


def stored(path):
    return json.loads(path.read_text()) if path and path.exists() else {"rows": []}


def digest(path):
    """Returns the metadata that ties a picture to the file it was drawn from."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Results:
    """Rows by name, in the order of `names`. `put` writes one row to the file; others stay."""

    def __init__(self, path, names, made_by, name_of=operator.itemgetter("row")):
        self.path, self.names, self.made_by = path, names, made_by
        before = stored(path)
        others = {k: before[k] for k, v in made_by.items() if before.get(k, v) != v}
        if others:
            sys.exit(
                f"{path} was made by {others}, not by {made_by}: name another file, or remove it."
            )
        self.rows = {name_of(row): row for row in before["rows"]}

    def put(self, name, row):
        self.rows[name] = {**row, "date": str(datetime.date.today())}
        self.write()

    def drop(self, name):
        if self.rows.pop(name, None):
            self.write()

    def write(self):
        if self.path:
            rows = [self.rows[name] for name in self.names if name in self.rows]
            self.path.write_text(json.dumps({**self.made_by, "rows": rows}, indent=1) + "\n")


def main(doc, path, rows, made_by, measured):
    """Returns the parsed command line of a benchmark that measures some of its rows and, with
    --json, stores them."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help=f"store in {path.name}")
    parser.add_argument("--only", type=expression, default="", help=ONLY)
    arguments = parser.parse_args()
    kept = Results(path if arguments.json else None, rows, made_by)
    for name in chosen(arguments.only, rows):
        row = {"row": name} | measured(rows[name])
        print(row, flush=True)
        kept.put(name, row)
