"""Steps and gradients with the options of a schedule beside the others: most tests use them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import zerojax

FIELDS = [field.name for field in dataclasses.fields(zerojax.Schedule)]


def scheduled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `zerojax.train_step` that flat options stand for."""
    own = {name: value for name, value in options.items() if name in FIELDS}
    others = {name: value for name, value in options.items() if name not in FIELDS}
    return others | ({"schedule": zerojax.Schedule(**own)} if own else {})


def train_step(loss: Any, **options: Any) -> Any:
    return zerojax.train_step(loss, **scheduled(options))


def value_and_grad(loss: Any, plan: zerojax.Plan, **options: Any) -> Any:
    return zerojax.value_and_grad(loss, plan, **scheduled(options))
