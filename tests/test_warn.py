"""Warnings point at the user's line, whoever is between it and what warns."""

import functools

import pytest

from zerojax._warn import warn

WARNS = functools.partial(warn, "mind")


def between(module, inner):
    """A function of that module that calls `inner`."""
    scope = {"__name__": module, "inner": inner}
    exec("def outer():\n    inner()", scope)
    return scope["outer"]


def file_of(call):
    with pytest.warns(UserWarning, match="mind") as seen:
        call()
    return seen[0].filename


def test_the_line_is_that_of_the_nearest_caller_outside():
    inner = between("zerojax._step.grad", between("contextlib", between("jax._src.api", WARNS)))
    assert file_of(inner) == __file__
    assert file_of(between("jax._src.api", lambda: inner())) == __file__
    for module in ("equinox._jit", "haiku._src.transform", "optax._src.base", "threading"):
        assert file_of(between(module, inner)) == __file__, module
    assert file_of(between("jaxtyping", inner)) == "<string>", "its name begins alike, no more"
