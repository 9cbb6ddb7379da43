"""Reads, checks and forecasts what XLA makes of a step; nothing else imports it."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from zerojax.tools._meter import Meter as Meter

# The same names, by the module that is imported when one of them is first used.
_EXPORTS = {"_meter": ["Meter"]}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zerojax.tools' has no attribute {name!r}")
    module = importlib.import_module(f"zerojax.tools.{_MODULES[name]}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
