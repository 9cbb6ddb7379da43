"""Collectives and loops of a jaxpr or a compiled module: tests of what steps send use them."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import core as jex_core

KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
}


class Collective(NamedTuple):
    kind: str
    dtype: str
    elements: int  # of the whole (gathered, or to be reduced) value
    depth: int
    times: int
    axes: tuple[str, ...]

    @property
    def moved(self) -> int:
        """Elements that pass a device in a step, as the ZeRO paper counts them."""
        return self.elements * self.times * (2 if self.kind == "all-reduce" else 1)


def collectives(jaxpr: Any, depth: int = 0, times: int = 1) -> Iterator[Collective]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if kind := KINDS.get(eqn.primitive.name):
            side = eqn.outvars if kind == "all-gather" else eqn.invars
            named = eqn.params.get("axis_name", eqn.params.get("axes"))
            axes = (named,) if isinstance(named, str) else tuple(named)
            for var in side:
                dtype, size = str(var.aval.dtype), math.prod(var.aval.shape)
                yield Collective(kind, dtype, size, depth, times, axes)
        loop = eqn.primitive.name == "scan"
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from collectives(
                inner, depth + loop, times * (eqn.params["length"] if loop else 1)
            )


def scans_of(jaxpr: Any, nested: bool = False) -> Iterator[jex_core.JaxprEqn]:
    """The outermost scans, with `nested` also those inside of them."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        is_scan = eqn.primitive.name == "scan"
        if is_scan:
            yield eqn
        if nested or not is_scan:
            for inner in jex_core.jaxprs_in_params(eqn.params):
                yield from scans_of(inner, nested)


def every_equation(jaxpr: Any) -> Iterator[jex_core.JaxprEqn]:
    """The equations of a jaxpr, at any depth."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from every_equation(inner)


def has_collectives(module: Any, instruction: Any) -> bool:
    inside = [one for name in instruction.called for one in module.computations[name].values()]
    loops = ("while", "call", "conditional")
    return instruction.base in set(KINDS.values()) or (
        instruction.opcode in loops and any(has_collectives(module, one) for one in inside)
    )


def unordered(module: Any) -> tuple[int, list[str]]:
    """How many loops and branches of collectives a compiled module has; and the collectives, or
    loops of them, that do not depend on such a loop, nor it on them."""
    loops, free = 0, []
    for instructions in module.computations.values():
        scheduled = list(instructions.values())
        for at, loop in enumerate(scheduled):
            if loop.opcode not in ("while", "conditional") or not has_collectives(module, loop):
                continue
            loops += 1
            before, after = {*loop.operands}, {loop}
            for one in reversed(scheduled[:at]):
                if one in before:
                    before.update(one.operands)
            for one in scheduled[at + 1 :]:
                if after.intersection(one.operands):
                    after.add(one)
            others = (one for one in scheduled if one not in before | after)
            free += [one.name for one in others if has_collectives(module, one)]
    return loops, free
