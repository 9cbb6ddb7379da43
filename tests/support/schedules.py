"""Options of a step as one flat dict, for tests that try many of them."""

import dataclasses
from typing import Any

import zerojax

FIELDS = [field.name for field in dataclasses.fields(zerojax.Schedule)]


def scheduled(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `zerojax.train_step` that flat options stand for."""
    own = {name: value for name, value in options.items() if name in FIELDS}
    others = {name: value for name, value in options.items() if name not in FIELDS}
    return others | ({"schedule": zerojax.Schedule(**own)} if own else {})
