"""Prints the errors and warnings in zerojax's source as Markdown: `python docs/errors.py`."""

import ast
import dataclasses
import html
import pathlib
import re
from collections.abc import Iterator

LIBRARY = pathlib.Path(__file__).parents[1] / "zerojax"
# The page that explains each part of the library. The longest name that starts a file's path wins.
PAGES = {
    "": ("Stages, meshes and plans", "stages.md"),
    "tools/_audit": ("Audits", "gpus.md#what-did-xla-compile"),
    "_checkpoint": ("Checkpoints", "checkpoints.md"),
    "_kernel": ("Loops over layers", "limits.md"),
    "tools/_forecast": ("Forecasts", "gpus.md#gpus-that-you-do-not-have"),
    "tools/_forecast/choose": ("The fastest options", "gpus.md#which-options-are-fastest"),
    "tools/_forecast/study": ("Studies", "gpus.md#how-a-model-scales"),
    "tools/_forecast/presets": ("The command line", "gpus.md#gpus-that-you-do-not-have"),
    "tools/_hlo": ("GPUs", "gpus.md#which-gpus-are-known"),
    "_features": ("Host memory", "offload.md"),
    "_loss": ("The loss and its batch", "loss.md"),
    "_loss/pad_batch": ("Batches of any size", "loop.md#evaluation"),
    "_passes": ("The loss and its batch", "loss.md"),
    "_passes/layered": ("Order of microbatches", "groups.md#layers-before-microbatches"),
    "_plan/offload": ("Host memory", "offload.md"),
    "_plan/padding": ("Padding", "padding.md"),
    "_plan/precision": ("Dtypes", "stages.md#dtypes"),
    "_run": ("Several processes", "hosts.md"),
    "_state": ("States and models", "models.md"),
    "_step": ("Steps", "loop.md"),
    "tools/_verify": ("Verification", "loss.md"),
    "_wire": ("Quantization", "wires.md"),
    "aot": ("GPUs", "gpus.md#which-gpus-are-known"),
    "nnx": ("Flax nnx", "models.md"),
    "tools/_cli": ("The command line", "gpus.md#gpus-that-you-do-not-have"),
    "tools/_launch": ("Starting processes", "hosts.md#zerojax-launch"),
    "tools/_flags": ("The command line", "gpus.md#gpus-that-you-do-not-have"),
}
SENTENCE = re.compile(r"(?<=[a-z0-9)\]'\"›])\. (?=[A-Z`])")


@dataclasses.dataclass(frozen=True)
class Message:
    file: str  # inside the library, without .py
    problem: str
    remedy: str

    @property
    def page(self) -> tuple[str, str]:
        return PAGES[max((name for name in PAGES if self.file.startswith(name)), key=len)]


def messages(library: pathlib.Path = LIBRARY) -> list[Message]:
    """Returns the messages that have a remedy, in source order."""
    found = {}
    for path in sorted(library.rglob("*.py")):
        file = path.relative_to(library).with_suffix("").as_posix()
        for text in _texts(ast.parse(path.read_text())):
            problem, *remedy = SENTENCE.split(text, maxsplit=1)
            if remedy:
                found.setdefault(text, Message(file, problem + ".", remedy[0]))
    return list(found.values())


def markdown() -> str:
    """Returns one list for each page of the guide, with its messages in alphabetical order."""
    pages: dict[tuple[str, str], list[str]] = {}
    for message in messages():
        item = f"- {_shown(message.problem)} **{_shown(message.remedy)}**"
        pages.setdefault(message.page, []).append(item)
    sections = (
        f"## {title}\n\nExplained in [{target.partition('.')[0]}]({target}).\n\n"
        + "\n".join(sorted(items, key=str.lower))
        for (title, target), items in sorted(pages.items())
    )
    return "\n\n".join(sections) + "\n"


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yields the first argument of each warning and each exception, raised or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _takes_message(node.func):
            text = _pattern(node.args[0])
            if text is not None:
                yield text


def _takes_message(function: ast.expr) -> bool:
    return re.fullmatch(r"\w+Error|warn", ast.unparse(function)) is not None


def _pattern(node: ast.expr) -> str | None:
    """Returns a string literal with ‹name› for each value, or None for any other node."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(_pattern(part) or "" for part in parts)
        case ast.FormattedValue(value):
            return f"‹{_name(value)}›"
        case ast.BinOp(left, ast.Add(), right):
            return (_pattern(left) or "‹…›") + (_pattern(right) or "‹…›")
    return None


def _name(value: ast.expr) -> str:
    """Returns the name by which a reader would know the value of an expression."""
    match value:
        case ast.Call(ast.Name("_install_command")):
            return "the line in the message"
        case ast.Attribute(_, "__name__"):
            return "type"
        case ast.Name(name) | ast.Attribute(_, name):
            return name.strip("_")
        case ast.Call(ast.Attribute(ast.Name("jax"), name)):
            return name
        case ast.Call(ast.Attribute(ast.Constant(), "join"), [first]) | ast.Call(_, [first, *_]):
            return _name(first)
        case ast.Call(ast.Attribute(of, _)) | ast.Subscript(of) | ast.GeneratorExp(of):
            return _name(of)
    return "…"


def _shown(text: str) -> str:
    """Returns Markdown that shows `text` literally, with its values in italics."""
    escaped = re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", html.escape(text, quote=False))
    return re.sub("‹(.*?)›", r"<i>\1</i>", escaped.replace("\n", " "))


if __name__ == "__main__":
    print(markdown())
