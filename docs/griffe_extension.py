"""An extension of mkdocstrings, which spells out what docstrings leave to readers of the code."""

import importlib
import inspect
import re
from typing import Any

import griffe

GROUP = re.compile(r"^    (\w+(?:, \w+)+): (.+(?:\n {8}.+)*)", re.MULTILINE)
# The place where a text has said what all names have in common.
CLAUSE_END = re.compile(r"; |\. (?=[A-Z])|\.?$")


class Spelled(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if obj.is_class and "{options}" in text:  # which `zerojax._declared.described` spells out
            text = inspect.getdoc(getattr(importlib.import_module(obj.module.path), obj.name))
        obj.docstring.value = spelled(text)

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Shows options that are declared elsewhere, and the values of named defaults."""
        if any("takes(" in str(decorator.value) for decorator in func.decorators):
            _spell_out_options(func)
        for parameter in func.parameters:
            while isinstance(parameter.default, griffe.Expr):
                try:
                    named = loader.modules_collection[parameter.default.canonical_path]
                except KeyError:  # another library's, or no name
                    break
                if not isinstance(named, griffe.Attribute):
                    break
                parameter.default = named.value


def _spell_out_options(func: griffe.Function) -> None:
    """Gives a function the parameters and the docstring that `zerojax._declared.takes` makes."""
    function = getattr(importlib.import_module(func.module.path), func.name)
    func.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                name,
                annotation=re.sub(r"[\w.]+\.(?=\w)", "", inspect.formatannotation(one.annotation)),
                kind=griffe.ParameterKind(one.kind.description),
                default=None if one.default is one.empty else repr(one.default),
            )
            for name, one in inspect.signature(function).parameters.items()
        )
    )
    assert func.docstring is not None  # keep it: it has the settings of the parser
    func.docstring.value = spelled(inspect.getdoc(function))


def spelled(text: str) -> str:
    """Returns a docstring that shows its `Example:` as code, and has a line for each argument."""
    text = text.replace("\nExample:\n", "\nExamples:\n")
    before, heading, arguments = text.partition("Arguments:\n")
    arguments, examples, rest = arguments.partition("\nExamples:\n")
    return before + heading + GROUP.sub(_one_a_line, arguments) + examples + rest


def _one_a_line(group: re.Match[str]) -> str:
    """Returns `a, b: as for f; more.` as a line for each, so that each has its type and default.

    The further text goes to the name that it mentions as `b=`, or to the first.
    """
    names, text = group[1].split(", "), " ".join(group[2].split())
    brief = text[: CLAUSE_END.search(text).start()] + "."
    about = next((name for name in names if f"{name}=" in text), names[0])
    return "\n".join(f"    {name}: {text if name == about else brief}" for name in names)
