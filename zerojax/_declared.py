"""Options that are declared once, as fields of a dataclass.

The signature, the help and the checks of each function that takes them, and the flags of the
command line, are made from the fields: to add an option, add a field.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import numbers
import pathlib
import re
import reprlib
import textwrap
import traceback
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from zerojax import _compat

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
S = TypeVar("S", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")
HERE = "{options}"  # where a docstring gets the help of the options
WIDTH = 96
PACKAGE = str(pathlib.Path(__file__).parent)
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


def check_count(count: object, name: str, what: str) -> object:
    """Returns a positive integer, and raises for all else. `what` says what it counts."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name}={count!r} must be a positive integer: {what}.")
    return count


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


# [Note: arguments of other types]
# A signature says what a function takes, and Python takes anything. So where a call fails in the
# words of Python or of another library, the first argument of another type than its signature has
# is named. Errors that zerojax itself raises say more, and stay. Calls that succeed pay nothing.
def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Names the argument of another type, where a public function fails: see the note."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        with _named_types(signature, args, named):
            return function(*args, **named)

    return call


@contextlib.contextmanager
def _named_types(
    signature: inspect.Signature, args: Sequence[object], named: Mapping[str, object]
) -> Iterator[None]:
    try:
        yield
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = frame.filename.startswith(PACKAGE) and (frame.line or "").startswith("raise")
        if is_ours or _compat.is_of_runtime(error):
            raise
        try:
            bound = signature.bind(*args, **named).arguments
        except TypeError:  # Python's own error says which argument is missing, or one too many
            raise error from None
        for name, value in bound.items():
            parameter = signature.parameters[name]
            every = value if parameter.kind is parameter.VAR_KEYWORD else {name: value}
            for key, each in {} if parameter.kind is parameter.VAR_POSITIONAL else every.items():
                if not _is_of(each, parameter.annotation):
                    meant = " or ".join(_meant(parameter.annotation))
                    raise TypeError(f"{key}={reprlib.repr(each)} must be {meant}.") from error
        raise


# What to pass for a type, by its name.
MEANT = {
    "bool": "True or False",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "NoneType": "None",
    "Callable": "a function",
    "Mapping": "a dict",
    "Sequence": "a sequence",
    "Collection": "a collection",
    "PathLike": "a path",
    "type": "a type",
    "Device": "a device of jax.devices()",
    "Mesh": "a mesh, as zerojax.mesh() makes one",
    "Plan": "a plan, as zerojax.plan(state, stage=3) makes one",
    "GradientTransformation": "an optimizer, such as optax.adam(1e-3)",
    "Module": "a model, a nnx.Module",
    "Optimizer": "its optimizer, nnx.Optimizer(model, tx, wrt=nnx.Param)",
    "State": "what zerojax.nnx.state(model, optimizer) returns",
    "Step": "a step, as zerojax.train_step(loss_fn) makes one",
}


def _is_of(value: Any, hint: object) -> bool:
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return any(_is_of(value, part) for part in parts)
    if not isinstance(kind, type) or kind in (Any, inspect.Parameter.empty):  # or a variable
        return True
    if getattr(kind, "_is_protocol", False) and kind is not Callable:
        return all(hasattr(value, name) for name in vars(kind) if not name.startswith("_"))
    if kind in (int, float):
        is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real)
        return is_number or getattr(value, "shape", None) == ()
    if not isinstance(value, kind) or (kind is not str and isinstance(value, str)):
        return False
    if issubclass(kind, Mapping) and parts:
        return all(_is_of(key, parts[0]) and _is_of(of, parts[1]) for key, of in value.items())
    of_each = issubclass(kind, Collection) and len(parts) == 1
    return not of_each or all(_is_of(each, parts[0]) for each in value)


def _meant(hint: object) -> list[str]:
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (types.UnionType, typing.Union):
        return list(dict.fromkeys(text for part in parts for text in _meant(part)))
    text = MEANT.get(name := getattr(kind, "__name__", str(kind)), f"a {name}")
    return [f"{text} of {MEANT[parts[0].__name__][2:]}s" if parts in ((str,), (int,)) else text]


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
        signature = inspect.Signature([*own, *inspect.signature(options).parameters.values()])
        for name in inspect.signature(options).parameters:
            _TAKEN_BY[name][function.__name__] = None  # once: nnx has some of the same names

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> R:
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
            with _named_types(signature, args, named):
                return function(**own_values, **{last.name: make(**values)})

        call.__signature__, call.options = signature, options  # type: ignore
        call.__doc__ = _with_help(function.__doc__ or "", options)
        return call

    return decorate  # type: ignore


def described(options: type[A]) -> type[A]:
    """Puts the help of its options into the docstring of a class that users make."""
    options.__doc__ = _with_help(options.__doc__ or "", options)
    for name in inspect.signature(options).parameters:
        _TAKEN_BY[name][f"zerojax.{options.__name__}"] = None
    return options


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
    fields = [field for field in dataclasses.fields(options) if field.metadata]
    helps = [wrapper.fill(f"{field.name}: {field.metadata['text']}") for field in fields]
    return text[: place.start()] + "\n".join(helps) + text[place.end() :]
