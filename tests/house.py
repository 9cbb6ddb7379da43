"""Counts the library's files, lines, functions, comments and imports, by package and in all.

    python tests/house.py            # this checkout
    python tests/house.py f66407e    # a revision of it
    python tests/house.py --files    # what each file of this checkout is, in the order of imports

Functions are measured without their docstrings. "code" are the lines that are neither blank nor
docstring nor comment, as `ruff format` writes them: packed lines do not count as fewer.
"""

import ast
import graphlib
import io
import itertools
import pathlib
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
# Each package may import those of the lines above its own, and within itself without circles.
RANKS = (
    "_axis_types _compat _declared _fence _figures _fingerprint _jaxprs _parallel _progress "
    "_readings _specs _table _types _warn",
    "_kernel",
    "_run _state tools._flops tools._hlo",
    "_wire _update",
    "_plan",
    "_passes",
    "_loss",
    "_features",
    "_step",
    "_checkpoint run tools._audit tools._launch aot keras manual nnx",
    "tools._verify tools._forecast tools._replay checkpoint",
    "tools._flags tools._meter",
    "tools._cli",
    "__main__",
)
# The files of the kernel, in the order in which they are read, and what it stands on.
KERNEL = [
    "travel",
    "places",
    "split",
    "pieces",
    "arrays",
    "body",
    "loops",
    "engine",
    "device",
]
BENEATH_KERNEL = {"_compat", "_fence", "_jaxprs", "_specs", "_types", "_warn"}
RANK = {package: rank for rank, names in enumerate(RANKS) for package in names.split()}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENDMARKER}


def sources(revision: str | None = None) -> dict[str, str]:
    """Returns the text of each module: {"_audit.contract": text, "_audit.__init__": text, ...}."""
    if revision is None:
        files = {path.relative_to(ROOT): path.read_text() for path in ROOT.glob("zerojax/**/*.py")}
    else:
        command = ["git", "archive", revision, "zerojax"]
        archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE)
        if archive.returncode:
            sys.exit(f"git has no zerojax/ at {revision!r}: see above")
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            members = [member for member in tar if member.name.endswith(".py")]
            files = {pathlib.Path(m.name): tar.extractfile(m).read().decode() for m in members}
    return {".".join(path.with_suffix("").parts[1:]): files[path] for path in sorted(files)}


def imports(modules: dict[str, str]) -> dict[str, set[str]]:
    """Returns the modules that each one imports, also in functions and for type checking."""
    found = {name: set() for name in modules}
    for name, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zerojax":
                module = node.module.removeprefix("zerojax").removeprefix(".")
                names = {f"{module}.{alias.name}".removeprefix(".") for alias in node.names}
                found[name] |= modules.keys() & (names | {module})
    return found


def upward(modules: dict[str, str]) -> list[tuple[str, str]]:
    """Returns the imports that do not point down: (module, what it imports)."""
    pairs = [(name, other) for name, found in imports(modules).items() for other in found]
    return [pair for pair in pairs if not _points_down(*pair)]


def files(modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each file and the first sentence of its docstring, packages below what they import.

    Inside a package the order is that of imports, too, and in the kernel that of reading.
    """
    modules = {name: text for name, text in modules.items() if not name.endswith("__init__")}
    imported = {name: sorted(others) for name, others in imports(modules).items()}
    order = list(graphlib.TopologicalSorter(imported).static_order())
    reading = [f"_kernel.{name}" for name in KERNEL]
    packages = list(RANK)

    def place(name: str) -> tuple[int, int]:
        at = reading.index(name) if name in reading else order.index(name)
        return packages.index(package_of(name)), at

    for name in sorted(order, key=place):
        paragraph = (ast.get_docstring(ast.parse(modules[name])) or "").partition("\n\n")[0]
        first = re.match(r".*?\.(?= |$)|.*", " ".join(paragraph.split()))
        yield f"zerojax/{name.replace('.', '/')}.py", first[0]


def names_from_kernel(modules: dict[str, str]) -> set[str]:
    """Returns the names that other packages import from the kernel."""
    names = set()
    for module, text in modules.items():
        if package_of(module) == "_kernel":
            continue
        tree, files_of = ast.parse(text), {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.module == "zerojax._kernel":
                files_of |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif (node.module or "").startswith("zerojax._kernel."):
                names |= {f"{node.module.split('.')[2]}.{alias.name}" for alias in node.names}
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        for node in (a for a in attributes if isinstance(a.value, ast.Name)):
            if node.value.id in files_of:
                names.add(f"{files_of[node.value.id]}.{node.attr}")
    return names


def overrides(modules: dict[str, str]) -> set[str]:
    """Returns the methods that override one of a class of another package of the library.

    Those whose body is `...` or raises a NotImplementedError are there to be written.
    """
    abstract = ("...", "raise NotImplementedError")
    classes, methods = {}, {}
    for module, text in modules.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = package_of(module), node
                own = [each for each in node.body if isinstance(each, FUNCTIONS)]
                methods[node.name] = {
                    f.name for f in own if ast.unparse(f.body[-1]) not in abstract
                }
    found = set()
    for name, (package, node) in classes.items():
        for base in (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases):
            if base in classes and classes[base][0] != package:
                same = methods[name] & methods[base]
                found |= {
                    f"{package}.{name}.{method}" for method in same - {"__init__", "__post_init__"}
                }
    return found


def words(*patterns: str) -> int:
    """Returns how many words files of this checkout have."""
    files = (path for pattern in patterns for path in ROOT.glob(pattern))
    return sum(len(path.read_text().split()) for path in files)


def package_of(module: str) -> str:
    """Returns the package of a module: `_plan` of `_plan.mesh`, `tools._hlo` of its `gpus`."""
    return ".".join(module.split(".")[: 1 + module.startswith("tools.")])


def _points_down(module: str, imported: str) -> bool:
    package, other = package_of(module), package_of(imported)
    if package.endswith("__init__"):  # the public names, imported when they are asked for
        return True
    within = package == other != module or RANK[package] == RANK[other] == 0
    return within or RANK[other] < RANK[package]


def measured(text: str) -> tuple[Counter[str], list[int]]:
    """Counts what is in a module, and the lines of each of its functions."""
    tree = ast.parse(text)
    nodes = [n for n in ast.walk(tree) if isinstance(n, FUNCTIONS | ast.ClassDef)]
    length = lambda node: node.end_lineno - node.lineno + 1
    docstrings = {n: length(n.body[0]) if ast.get_docstring(n) else 0 for n in [tree, *nodes]}
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    counts = Counter({"files": 1, "lines": len(text.splitlines())})
    counts["Any"] = sum(token.string == "Any" for token in tokens)
    counts["fmt: skip"] = sum("fmt: skip" in token.string for token in comments)
    counts["docstrings"] = sum(docstrings.values())
    counts["comments"] = sum(token.line.lstrip().startswith("#") for token in comments)
    counts["trailing"] = len(comments) - counts["comments"]  # comments after code
    counts["code"] = len(code_lines(formatted(text)))
    counts["classes"] = sum(isinstance(node, ast.ClassDef) for node in nodes)
    return counts, [length(n) - docstrings[n] for n in nodes if isinstance(n, FUNCTIONS)]


def formatted(text: str) -> str:
    """Returns a module as the formatter writes it where nothing tells it not to."""
    if "fmt: skip" not in text:
        return text
    command = ["ruff", "format", "--line-length=100", "-"]
    text = re.sub(r" *# fmt: skip", "", text)
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def code_lines(text: str) -> set[int]:
    """Returns the numbers of the lines that have code on them."""
    found = set()
    for statement in ast.walk(ast.parse(text)):
        has_docstring = isinstance(statement, ast.Module | ast.ClassDef | FUNCTIONS)
        if has_docstring and ast.get_docstring(statement):
            found.add(statement.body[0].lineno)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in found
        if token.type not in NO_CODE and not is_docstring:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def row(modules: list[str]) -> dict[str, object]:
    """Returns the cells of a line; p50, p90 and max are lines of functions."""
    found = [measured(text) for text in modules]
    counts = sum((counts for counts, _ in found), Counter())
    functions = sorted(itertools.chain.from_iterable(lengths for _, lengths in found)) or [0]
    cells = {name: counts[name] for name in ("files", "lines", "code", "classes")}
    cells |= {"longest": max(c["lines"] for c, _ in found), "functions": len(functions)}
    for title, share in (("p50", 0.5), ("p90", 0.9), ("max", 1)):
        cells[title] = functions[round(share * (len(functions) - 1))]
    for name in ("Any", "docstrings", "comments", "trailing"):
        cells[f"{name} %"] = f"{100 * counts[name] / counts['lines']:.1f}"
    return cells | {"fmt: skip": counts["fmt: skip"]}


def main() -> None:
    if sys.argv[1:] == ["--files"]:
        for path, sentence in files(sources()):
            print(f"{path:36} {sentence}")
        return
    modules = sources(*sys.argv[1:2])
    folders = {name: name.rpartition(".")[0] or "top level" for name in modules}
    filed = {package_of(name) for name in modules} <= RANK.keys() | {"__init__", "tools.__init__"}
    up = [folders[name] for name, _ in upward(modules)] if filed else []
    print(" " * 16, *row(list(modules.values())), "imports up", sep="  ")
    for folder in [*sorted(set(folders.values())), "all"]:
        inside = [modules[name] for name in modules if folder in (folders[name], "all")]
        count = len(up) if folder == "all" else up.count(folder)
        cells = row(inside) | {"imports up": count if filed else "-"}
        print(f"{folder:16}", *(f"{c:>{len(title)}}" for title, c in cells.items()), sep="  ")
    for says, figure in figures(modules).items():
        print(f"{figure:>7,}  {says}")


def figures(modules: dict[str, str]) -> dict[str, int]:
    """Returns by name what else is counted; words and tests are those of this checkout."""
    beneath = [modules[name] for name in sorted(BENEATH_KERNEL & modules.keys())]
    found = {f"lines of code beneath the kernel: {', '.join(sorted(BENEATH_KERNEL))}": beneath}
    code = {name: row(texts)["code"] for name, texts in found.items() if texts}
    tests = [len(path.read_text().splitlines()) for path in ROOT.glob("tests/**/*.py")]
    return code | {
        "names that others import from the kernel": len(names_from_kernel(modules)),
        "methods that override one of another package": len(overrides(modules)),
        "times Any": sum(measured(text)[0]["Any"] for text in modules.values()),
        "lines of tests": sum(tests),
        "words of docs": words("docs/**/*.md"),
        "words of README": words("README.md"),
        "words of CONTRIBUTING": words("CONTRIBUTING.md"),
    }


if __name__ == "__main__":
    main()
