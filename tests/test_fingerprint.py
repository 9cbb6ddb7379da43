"""Fingerprints: equal for the same program and the same values only."""

import jax
import numpy as np

from zerojax import _fingerprint


def test_programs_are_told_apart_and_the_same_program_is_the_same():
    def text(rate, table):
        def f(x):
            inner = jax.jit(lambda x: x * rate)
            return jax.lax.scan(lambda c, x: (inner(c) + x @ table, None), x[0], x)[0]

        return _fingerprint.of_program(jax.make_jaxpr(f)(np.ones((3, 4), np.float32)))

    table = np.eye(4, dtype=np.float32)
    assert text(0.1, table) == text(0.1, table.copy()) and " at 0x" not in text(0.1, table)
    assert text(0.1, table) != text(0.2, table) != text(0.2, table + 1)


def test_values_of_every_kind_have_a_fingerprint():
    key, narrow = jax.random.key(1), jax.numpy.arange(4, dtype="bfloat16")
    values = [key, narrow, narrow[::-1], np.zeros((0, 3)), True, 3, np.float32(0.1), narrow > 1]
    found = _fingerprint.of_values((str(i), value) for i, value in enumerate(values)).values()
    assert len(set(found)) == len(values)
    assert [*found][4:7] == ["True", "3", "0.1"]
    assert _fingerprint.show({"b", "a", "c"}) == "{a, b, c}"
