"""What a step costs, and whether it is right: reports, studies, meters, devices that err.

`zerojax.audit`, `verify` and `forecast` are at the top. The library itself imports nothing of this;
the command line, `python -m zerojax`, is here too.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from zerojax.tools._audit.report import Report as Report
    from zerojax.tools._forecast.choose import choose as choose
    from zerojax.tools._forecast.mfu import peak_flops as peak_flops, step_flops as step_flops
    from zerojax.tools._forecast.study import study as study
    from zerojax.tools._hlo.gpus import Rates as Rates, rates_of as rates_of
    from zerojax.tools._meter import Meter as Meter
    from zerojax.tools._replay import ReplayError as ReplayError, replay as replay
    from zerojax.tools._verify.compare import Verification as Verification

_EXPORTS = {  # imported when they are first used
    "_audit.report": ["Report"],
    "_forecast.choose": ["choose"],
    "_forecast.mfu": ["peak_flops", "step_flops"],
    "_forecast.study": ["study"],
    "_hlo.gpus": ["Rates", "rates_of"],
    "_meter": ["Meter"],
    "_replay": ["ReplayError", "replay"],
    "_verify.compare": ["Verification"],
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"zerojax.tools.{_MODULES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
