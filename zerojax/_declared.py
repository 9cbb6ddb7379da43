"""Options that are declared once, as fields of a dataclass.

The signature, the help and the checks of each function that takes them, and the flags of the
command line, are made from the fields: to add an option, add a field.
"""

import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from zerojax._deprecations import arguments

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
S = TypeVar("S", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")
HERE = "{options}"  # where a docstring gets the help of the options
WIDTH = 96
_TAKEN_BY: dict[str, dict[str, None]] = defaultdict(dict)  # the functions that take an option


def option(
    default: Any, text: str, *, check: Callable[[Any], Any] | None = None, flag: Any = None
) -> Any:
    """Declares an option, with its default and its help.

    Arguments:
        check: returns the value as the library uses it, and raises for an invalid one.
        flag: the keyword arguments of `argparse`; None for an option without a flag.
    """
    metadata = {"text": " ".join(text.split()), "check": check, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """A set of options; making one checks each."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise TypeError(f"{field.name}={value!r} must be True or False.")
            if check := field.metadata.get("check"):
                object.__setattr__(self, field.name, check(value))


class _Takes(Protocol[P, S]):
    """Gives a function of one, two or three arguments the options as further ones."""

    @overload
    def __call__(self, function: Callable[[A, S], R], /) -> Callable[Concatenate[A, P], R]: ...
    @overload
    def __call__(
        self, function: Callable[[A, B, S], R], /
    ) -> Callable[Concatenate[A, B, P], R]: ...
    @overload
    def __call__(
        self, function: Callable[[A, B, C, S], R], /
    ) -> Callable[Concatenate[A, B, C, P], R]: ...


def takes(options: Callable[P, S]) -> _Takes[P, S]:
    """Lets callers pass options one by one to a function that receives them as its last argument.

    The signature of the dataclass shows each option to type checkers, editors, `help` and
    `inspect.signature`. Their help replaces `{options}` in the docstring.
    """

    def decorate(function: Callable[..., R]) -> Any:
        make: Any = options
        *own, last = inspect.signature(function).parameters.values()
        fields = inspect.signature(options).parameters.values()
        signature = inspect.Signature([*own, *fields])
        for name in inspect.signature(options).parameters:
            _TAKEN_BY[name][function.__name__] = None  # once: nnx has some of the same names

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> R:
            named = arguments(function.__name__, named)
            try:
                values = signature.bind(*args, **named).arguments
            except TypeError as error:
                unknown = [name for name in named if name not in signature.parameters] or [""]
                close = difflib.get_close_matches(unknown[0], signature.parameters, n=1)
                meant = f" Did you mean {close[0]}=?" if close else ""
                if others := [*_TAKEN_BY.get(unknown[0], ())]:
                    meant = f" {unknown[0]}= is an option of {' and '.join(others[:2])}."
                raise TypeError(f"{function.__name__}: {error}.{meant}") from None
            own_values = {p.name: values.pop(p.name) for p in own if p.name in values}
            return function(**own_values, **{last.name: make(**values)})

        call.__signature__, call.options = signature, options  # type: ignore
        call.__doc__ = _with_help(function.__doc__ or "", options)
        return call

    return decorate  # type: ignore


def _with_help(text: str, options: Any) -> str:
    """Puts the help of each option into a docstring, in place of `{options}`."""
    if not (place := re.search(rf"^( *){re.escape(HERE)}$", text, re.MULTILINE)):
        return text
    wrapper = textwrap.TextWrapper(
        width=WIDTH,
        initial_indent=place[1],
        subsequent_indent=place[1] + " " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )
    helps = [
        wrapper.fill(f"{field.name}: {field.metadata['text']}")
        for field in dataclasses.fields(options)
        if field.metadata
    ]
    return text[: place.start()] + "\n".join(helps) + text[place.end() :]
