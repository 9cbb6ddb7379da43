"""Says whether another revision lowers the same programs and has the same messages.

    python tests/same.py                         # what this checkout changes in HEAD
    python tests/same.py HEAD~10                 # what it changes in a revision
    python tests/same.py HEAD~10 --only offload  # of some configurations, with their whole diffs
    python tests/same.py --show 'gpt, stage 2'   # what one of them lowers to

A commit that only moves or renames code changes nothing. Both revisions lower the table in
`tests/support/configurations.py` side by side, from shapes; nothing is compiled. Programs are
compared without the names of Python functions and lines of source: what is computed, where each
value is, what is donated, in which scopes operations are, and what is warned of. The exit status
is 0 if all is the same.
"""

import argparse
import ast
import collections
import difflib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # before an installed checkout

from tests import house

LINES = 20  # of a diff


def check_out(revision: str, folder: pathlib.Path) -> None:
    for module, text in house.sources(revision).items():
        path = folder / "zerojax" / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def lowered(libraries: list[pathlib.Path], pattern: str) -> list[dict[str, Any]]:
    """Returns what `tests/support/configurations.py` makes of each folder's zerojax."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder, f"{number}.json") for number in range(len(libraries))]
        workers = []
        for number, (library, path) in enumerate(zip(libraries, paths, strict=True)):
            settings = {
                "PYTHONPATH": os.pathsep.join(map(str, (library, ROOT))),
                # The processes of one run hash strings differently, and must run one program.
                "PYTHONHASHSEED": str(number),
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "8",
            }
            module = "tests.support.configurations"
            command = [sys.executable, "-P", "-m", module, pattern, str(path)]
            workers.append(subprocess.Popen(command, env=os.environ | settings))
        codes = [worker.wait() for worker in workers]
        if any(codes):
            sys.exit("not lowered: see above")
        results = [json.loads(path.read_text()) for path in paths]
    for library, result in zip(libraries, results, strict=True):
        assert pathlib.Path(result["library"]).is_relative_to(library), result["library"]
    if not results[0]["texts"]:
        names = "; ".join(results[0]["names"])
        sys.exit(f"no configuration matches {pattern!r}, among: {names}")
    return results


def difference(old: str, new: str, lines: int | None = LINES) -> str:
    """Returns how many operations there are of which kinds, where that changed, and a diff."""
    heads = [
        text.splitlines()[0] if text.startswith("refused") else "lowered" for text in (old, new)
    ]
    if heads[0] != heads[1]:
        return f"    was {heads[0]}\n    is {heads[1]}"
    kinds = (re.findall(r"(?<!#)\b(?:stablehlo|sdy)\.\w+", text) for text in (old, new))
    was, now = map(collections.Counter, kinds)
    counts = [f"    {op}: {was[op]} -> {now[op]}" for op in sorted(was | now) if was[op] != now[op]]
    # After a value that is new, all have other numbers, which tell nothing.
    texts = [re.sub(r"%[\w#]+|@f\d+", lambda at: at[0][0], text) for text in (old, new)]
    texts = [old, new] if texts[0] == texts[1] else texts
    diff = difflib.unified_diff(*map(str.splitlines, texts), n=1, lineterm="")
    shown = itertools.islice(diff, 2, None if lines is None else lines + 2)
    return "\n".join([*counts, *(f"    {line}" for line in shown)])


def messages(modules: dict[str, str]) -> set[str]:
    """Returns all texts of four words and more that are not docstrings."""
    texts = itertools.chain.from_iterable(_texts(ast.parse(text)) for text in modules.values())
    return {text for text in texts if len(text.split()) >= 4}


def _texts(node: ast.AST) -> Iterator[str]:
    """Yields the strings in a tree, without the names of the values in them."""
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.JoinedStr(parts):
            values = [part for part in parts if isinstance(part, ast.FormattedValue)]
            yield "".join("‹›" if part in values else part.value for part in parts)
            yield from itertools.chain.from_iterable(map(_texts, values))
        case ast.Expr(ast.Constant()):  # a docstring
            return
        case _:
            yield from itertools.chain.from_iterable(map(_texts, ast.iter_child_nodes(node)))


def changed(old: set[str], new: set[str]) -> Iterator[str]:
    """Yields a line for each message that was lost, or was added, or has other words."""
    added = sorted(new - old)
    for text in sorted(old - new):
        close = difflib.get_close_matches(text, added, n=1, cutoff=0.7)
        added = [other for other in added if other not in close]
        yield "\n  now: ".join([f"message {'changed' if close else 'lost'}: {text}", *close])
    yield from (f"message added: {text}" for text in added)


def compared(revision: str, pattern: str | None) -> tuple[list[str], str]:
    """Returns what differs from a revision, and what was compared."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        check_out(revision, folder)
        was, now = lowered([folder, ROOT], pattern or "")
    lines = LINES if pattern is None else None
    found = [f"{name} {why}" for name, why in now["wrong"].items()]
    for name, text in now["texts"].items():
        old = was["texts"].get(name, "refused")
        found += [f"{name} differs:\n{difference(old, text, lines)}"] if old != text else []
    says = messages(house.sources())
    if pattern is None:
        found += changed(messages(house.sources(revision)), says)
    left_out = (
        f" ({now['left_out']} for GPUs left out: make gpu-compile)" if now["left_out"] else ""
    )
    return found, f"{len(now['texts'])} configurations{left_out}, {len(says)} messages"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--only", metavar="PATTERN", help="of the names of configurations")
    parser.add_argument("--show", metavar="PATTERN", help="print these, and compare nothing")
    options = parser.parse_args()
    if options.show is not None:
        (found,) = lowered([ROOT], options.show)
        print(*found["texts"].values(), sep="\n\n")
        return
    start = time.monotonic()
    found, what = compared(options.revision, options.only)
    print(*found, sep="\n\n", end="\n\n" if found else "")
    result = f"{len(found)} difference{'s' * (len(found) > 1)} from" if found else "the same as"
    print(f"{result} {options.revision}: {what}, {time.monotonic() - start:.0f} s")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
