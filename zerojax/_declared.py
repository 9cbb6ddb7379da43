"""Options declared once, as fields of a dataclass.

The signature and the help of each function that takes them, their checks, and the flags of the
command line are made from the fields: who adds one edits no other line.
"""

import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
S = TypeVar("S", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")
HERE = "{options}"  # where a docstring gets the help of the options
WIDTH = 96


def option(
    default: Any, text: str, *, check: Callable[[Any], Any] | None = None, flag: Any = None
) -> Any:
    """Declares an option: its default and its help, for those who call and for those who read.

    Arguments:
        check: returns the value as the library uses it, and raises for one that it does not know.
        flag: the keyword arguments of `argparse` for the command line; None, where it has no flag.
    """
    metadata = {"text": " ".join(text.split()), "check": check, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


def switch(name: str) -> Callable[[Any], bool]:
    """Returns the check of an option that is on or off."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True or False.")
        return value

    return check


@dataclasses.dataclass(frozen=True)
class Options:
    """A set of options, each checked where it is given."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if check := field.metadata.get("check"):
                object.__setattr__(self, field.name, check(getattr(self, field.name)))


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
    """Has a function take options one by one, and receive them as one value, its last argument.

    Type checkers and editors see each option, by the signature of the dataclass; so do `help` and
    `inspect.signature`. `{options}` in the docstring becomes their help.
    """

    def decorate(function: Callable[..., R]) -> Any:
        made: Any = options
        *own, last = inspect.signature(function).parameters.values()
        fields = inspect.signature(options).parameters.values()
        signature = inspect.Signature([*own, *fields])

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> R:
            try:
                given = signature.bind(*args, **named).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}: {error}{_near(named, signature)}") from None
            own_values = {p.name: given.pop(p.name) for p in own if p.name in given}
            return function(**own_values, **{last.name: made(**given)})

        call.__signature__, call.options = signature, options  # type: ignore
        call.__doc__ = _with_help(function.__doc__ or "", options)
        return call

    return decorate  # type: ignore


def _with_help(text: str, options: Any) -> str:
    """Puts the help of each option into a docstring, in place of `{options}`."""
    if not (place := re.search(rf"^( *){re.escape(HERE)}$", text, re.MULTILINE)):
        return text
    wrapped = [
        textwrap.fill(
            f"{name}: {help}",
            width=WIDTH,
            initial_indent=place[1],
            subsequent_indent=place[1] + " " * 4,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, help in helps(options).items()
    ]
    return text[: place.start()] + "\n".join(wrapped) + text[place.end() :]


def helps(options: Any) -> dict[str, str]:
    """Returns the help of each option, by name."""
    return {f.name: f.metadata["text"] for f in dataclasses.fields(options) if f.metadata}


def _near(named: dict[str, Any], signature: inspect.Signature) -> str:
    """Names the option that a user may have meant by one that there is not."""
    unknown = [name for name in named if name not in signature.parameters]
    close = difflib.get_close_matches(unknown[0], signature.parameters, n=1) if unknown else []
    return f". Did you mean {close[0]}=?" if close else "."
