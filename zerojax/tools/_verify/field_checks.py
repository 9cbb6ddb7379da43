"""Checks that the parts of a batch agree on fields in `mutable=`, and with the whole batch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from zerojax._loss import fields as _fields
from zerojax._state import state as _state
from zerojax.tools._verify import compare as _compare
from zerojax.tools._verify.compare import Check
from zerojax.tools._verify.reference import Reference, averaged
from zerojax.tools._verify.replay import Replayed

NAMED = 3  # leaves that a sentence names before it counts the rest


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
    return Found(checks, [_disagree(reference, wrong)] if wrong else [], [])


def of_the_whole(reference: Reference, parts: Replayed, whole: Replayed, tolerance: float) -> Found:
    """Checks that counts are those of the whole batch; other means that differ get a note."""
    counts, means = [], []
    for leaf in _leaves(reference, parts, whole):
        differs = _compare.difference(leaf.kept, leaf.whole)
        if leaf.has_no_mean and not leaf.parts_differ and np.any(differs):
            counts.append(leaf)
        limit = tolerance * np.max(np.abs(leaf.whole), initial=0.0)
        if not leaf.has_no_mean and leaf.parts_differ and np.any(differs > limit):
            means.append(leaf)
    checks = [_check(f"{x.name} on the whole batch", x.kept, x.whole) for x in counts]
    causes = [_count_a_part(reference, counts)] if counts else []
    return Found(checks, causes, [_are_means(reference, means)] if means else [])


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


def _disagree(reference: Reference, leaves: Sequence[_Leaf]) -> str:
    def values(leaf: _Leaf) -> str:
        differs = np.any(leaf.parts != leaf.parts[:1], axis=0)
        return ", ".join(_element(part, differs) for part in leaf.parts)

    named = _listed([f"{leaf.name} ({values(leaf)})" for leaf in leaves])
    return (
        f"The parts of the batch disagree on {named}, in mutable= and of a dtype that has no mean: "
        "a step keeps what the first one makes. Make it from what all devices share: "
        f"jax.lax.psum(x, {reference.axis_name}) of what each one counts; a key from the state's "
        "own, not from one folded for the device."
    )


def _count_a_part(reference: Reference, leaves: Sequence[_Leaf]) -> str:
    def values(leaf: _Leaf) -> str:
        part, whole = (_element(x, leaf.kept != leaf.whole) for x in (leaf.kept, leaf.whole))
        return f"{leaf.name} ({part} and {whole})"

    named = _listed(map(values, leaves))
    times = f", times {count}" if (count := reference.split.accumulate) > 1 else ""
    return (
        f"A part of the batch and all of it make different numbers of {named}, in mutable=. Count "
        f"over the devices: jax.lax.psum(x, {reference.axis_name}){times}, or accept it with "
        "whole_batch=False."
    )


def _are_means(reference: Reference, leaves: Sequence[_Leaf]) -> str:
    named = _listed(leaf.name for leaf in leaves)
    return (
        f"A step keeps the mean of what the parts of the batch make of {named}, in mutable=, and "
        "the whole batch makes something else. Running statistics are meant to; a queue is not: "
        f"put into it what all devices have, jax.lax.all_gather(x, {reference.axis_name}, "
        "tiled=True)."
    )


def _element(value: np.ndarray, differs: np.ndarray) -> str:
    """Shows the first element that differs."""
    return f"{value.reshape(-1)[np.argmax(differs)]:.0f}"


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return ", ".join(shown[:NAMED]) + more
