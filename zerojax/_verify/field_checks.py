"""Checks that the parts of a batch agree on fields in `mutable=`, and with the whole batch."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from zerojax._loss import fields as _fields
from zerojax._state import state as _state
from zerojax._verify import compare as _compare
from zerojax._verify.compare import Check
from zerojax._verify.reference import Reference, averaged
from zerojax._verify.replay import Replayed


class Found(NamedTuple):
    """A part of a verification."""

    checks: list[Check]
    causes: list[str]
    notes: list[str]

    def add(self, other: "Found") -> None:
        self.checks.extend(other.checks)
        self.causes.extend(other.causes)
        self.notes.extend(other.notes)


class _Leaf(NamedTuple):
    """A leaf as the parts make it, as a step keeps it, and as the whole batch makes it."""

    name: str
    parts: np.ndarray
    kept: np.ndarray
    whole: np.ndarray
    has_no_mean: bool

    @property
    def parts_differ(self) -> bool:
        return bool(np.any(self.parts != self.parts[:1]))


def of_the_parts(reference: Reference, parts: Replayed) -> Found:
    """Checks that all parts agree on leaves without a mean, of which a step keeps the first."""
    wrong = [x for x in _leaves(reference, parts, parts) if x.has_no_mean and x.parts_differ]
    checks = [_check(f"{x.name} on every part", x.parts, x.parts[:1]) for x in wrong]
    return Found(checks, [_disagree(reference, x) for x in wrong], [])


def of_the_whole(reference: Reference, parts: Replayed, whole: Replayed, tolerance: float) -> Found:
    """Checks that counts are those of the whole batch; other means that differ get a note."""
    found = Found([], [], [])
    for leaf in _leaves(reference, parts, whole):
        differs = _compare.difference(leaf.kept, leaf.whole)
        if leaf.has_no_mean and not leaf.parts_differ and np.any(differs):
            found.checks.append(_check(f"{leaf.name} on the whole batch", leaf.kept, leaf.whole))
            found.causes.append(_counts_a_part(reference, leaf))
        limit = tolerance * np.max(np.abs(leaf.whole), initial=0.0)
        if not leaf.has_no_mean and leaf.parts_differ and np.any(differs > limit):
            found.notes.append(_is_a_mean(reference, leaf))
    return found


def _leaves(reference: Reference, parts: Replayed, whole: Replayed) -> Iterator[_Leaf]:
    names = reference.recipe.mutable
    if not names:
        return
    kept, whole_kept = (averaged(x.aux, names) for x in (parts, whole))
    others = map(jax.tree.leaves, (kept, whole_kept))
    for leaf, *values in zip(_state.leaves_with_paths(parts.aux), *others, strict=True):
        if _fields.is_field(leaf.path, names):
            each, kept_one, whole_one = map(_compare.numbers, (leaf.value, *values))
            has_no_mean = _fields.has_no_mean(leaf.path, leaf.value, names)
            yield _Leaf(leaf.name, each, kept_one, whole_one, has_no_mean)


def _check(path: str, value: np.ndarray, wanted: np.ndarray) -> Check:
    far = _compare.difference(value, wanted)
    scale = float(np.max(np.abs(wanted), initial=0.0))
    return Check(path, "field", float(np.max(far)), scale, 0.0, _compare.WRONG)


def _disagree(reference: Reference, leaf: _Leaf) -> str:
    differs = np.any(leaf.parts != leaf.parts[:1], axis=0)
    values = ", ".join(_element(part, differs) for part in leaf.parts)
    return (
        f"The parts of the batch disagree on {leaf.name}, a field in mutable= of a dtype that has "
        f"no mean ({values}): a step keeps what the first one makes. Make it from what all devices "
        f"share: jax.lax.psum(x, {reference.axis_name}) of what each one counts; a key from the "
        "state's own, not from one folded for the device."
    )


def _counts_a_part(reference: Reference, leaf: _Leaf) -> str:
    times = f", times {count}" if (count := reference.split.accumulate) > 1 else ""
    differs = leaf.kept != leaf.whole
    return (
        f"{leaf.name}, a field in mutable=, becomes {_element(leaf.kept, differs)} by a part of "
        f"the batch and {_element(leaf.whole, differs)} by all of it. Count over the devices: "
        f"jax.lax.psum(x, {reference.axis_name}){times}, or accept it with whole_batch=False."
    )


def _element(value: np.ndarray, differs: np.ndarray) -> str:
    """Shows the first element that differs."""
    return f"{value.reshape(-1)[np.argmax(differs)]:.0f}"


def _is_a_mean(reference: Reference, leaf: _Leaf) -> str:
    return (
        f"{leaf.name}, a field in mutable=, becomes the mean of what the parts of the batch make "
        "of it, and the whole batch makes something else. Running statistics are meant to; a queue "
        "is not: put into it what all devices have, "
        f"jax.lax.all_gather(x, {reference.axis_name}, tiled=True)."
    )
