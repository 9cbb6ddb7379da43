"""How a public name goes: it works for three months more, with a warning that says what to use.

Gain: programs of users do not break without notice. It costs nothing where no old name is used. To
rename or remove a name, add a line to `OLD_NAMES` or `OLD_ARGUMENTS`, with the day of the release
that warns first. From `gone` on, a release may drop the line. `docs/versions.md` is the promise.
"""

import dataclasses
import datetime
import importlib
from typing import Any

from zerojax._warn import warn

WARNED_FOR = datetime.timedelta(days=92)  # no three months in a row have more


@dataclasses.dataclass(frozen=True)
class Old:
    """A name that goes: `now` is what it stands for until then, and what callers are told to use.

    `now` is a path, such as "zerojax.run.log", or the name of an argument. If nothing takes its
    place, `now` is where the code still is, or the argument itself, and `remedy` says what to do.
    """

    now: str
    since: datetime.date
    remedy: str | None = None

    @property
    def gone(self) -> datetime.date:
        return self.since + WARNED_FOR


OLD_NAMES: dict[str, Old] = {}  # "zerojax.tools.old_name": Old("zerojax.tools.new_name", date(...))
OLD_ARGUMENTS: dict[str, dict[str, Old]] = {}  # "train_step": {"old": Old("new", date(...))}


def attribute(module: str, name: str) -> Any:
    """Returns what an old name of a module stands for; the module's `__getattr__` ends with it.

    A module without one gets `__getattr__ = functools.partial(attribute, __name__)`.
    """
    path = f"{module}.{name}"
    if path not in OLD_NAMES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    old = OLD_NAMES[path]
    _warn_of(path, old, old.now)
    home, _, now = old.now.rpartition(".")
    return getattr(importlib.import_module(home), now)


def arguments(function: str, named: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a call by their present names."""
    if function not in OLD_ARGUMENTS:
        return named
    found = {}
    for name, value in named.items():
        now, old = name, OLD_ARGUMENTS[function].get(name)
        if old is not None:
            now = old.now
            _warn_of(f"{name}= of {function}", old, f"{now}=")
        if now in found or (now != name and now in named):
            raise TypeError(f"{function} got both {now}= and {name}=, its old name. Pass {now}=.")
        found[now] = value
    return found


def _warn_of(what: str, old: Old, now: str) -> None:
    remedy = old.remedy or f"Use {now} instead."
    text = f"{what} is deprecated since {old.since}, and goes after {old.gone}. {remedy}"
    warn(text, FutureWarning)  # Python shows it to users wherever the line is
