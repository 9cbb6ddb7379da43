"""The text of HLO modules: types and sizes, and damage that is refused in a line."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.stored import stored
from zerojax._hlo import module as _module

# -- types


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("bf16[4,256]{1,0}", 2048), ("f32[]", 4), ("pred[3]", 3), ("s4[8]{0}", 4), ("u32[2]", 8),
        ("f8e4m3fn[16]", 16), ("c64[2]", 16), ("token[]", 0), ("f64[0,4]", 0),
        ("(f32[2]{0}, (bf16[4]{0:T(128)}, s32[]), /*index=3*/u8[1])", 21),
        ("f32[<=8,2]", 64),
    ],
)  # fmt: skip
def test_sizes_of_types(text, nbytes):
    assert sum(array.nbytes for array in _module.arrays_of(text)) == nbytes


def test_members_of_a_tuple():
    text = "(f32[2,3]{1,0}, (bf16[4]{0}, s32[]), /*index=2*/u8[1])"
    assert _module.top_level_types(text) == ["f32[2,3]{1,0}", "(bf16[4]{0}, s32[])", "u8[1]"]
    assert _module.top_level_types("f32[2]{0}") == ["f32[2]{0}"]


# -- damaged text


def without(text, line):
    kept = [one for one in text.splitlines() if line not in one]
    assert len(kept) < len(text.splitlines())
    return "\n".join(kept)


NESTED = "nested-16xH100-jax0.12"
DAMAGES = {
    "empty": (lambda t: "", "starts with '' and not with 'HloModule'"),
    "prose": (lambda t: "Dear compiler,", "Pass compiled.as_text"),
    "cut off early": (lambda t: t[: len(t) // 2], "no ENTRY computation: was it cut off"),
    "cut off late": (lambda t: t[: t.rindex("ROOT")], "main.* has no ROOT"),
    "half a line": (lambda t: t.replace("copy(%get", "copy", 1)[:-200] + "\n}", "damaged"),
    "a missing value": (lambda t: without(t, "%bitcast.5.0 = "), "uses bitcast.5.0, which is now"),
    "a missing computation": (lambda t: t.replace("%fused_compare.1 (", "%other (", 1), "nowhere"),
    "a call cut short": (lambda t: t.replace(", calls=%fused_reduce", ""), "does not say what it"),
    "an open parenthesis": (
        lambda t: t.replace("parameter(0)", "parameter(0", 1), r"line \d+, '.*': its parentheses"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_text_is_refused_in_a_line(damage):
    change, message = DAMAGES[damage]
    with pytest.raises(ValueError, match=message) as caught:
        zerojax.audit(change(stored(NESTED)))
    assert "\n" not in str(caught.value)


def test_lines_lost_anywhere_are_no_internal_error():
    """A module without one of its lines is audited or refused, never a KeyError."""
    text = stored("layers-8xH100-jax0.12").splitlines()
    refused = 0
    for at in range(1, len(text), 3):
        try:
            zerojax.audit("\n".join(text[:at] + text[at + 1 :]))
        except ValueError as error:
            assert "HLO text" in str(error)
            refused += 1
    assert refused > 10


def test_an_instruction_comes_from_the_innermost_line_outside_of_libraries():
    layer, x = nn.Dense(8), jnp.ones((4, 16))
    params = layer.init(jax.random.key(0), x)

    def loss(params):
        return layer.apply(params, x).sum()

    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    made = _module.Module(text)
    found = [i for each in made.computations.values() for i in each.values() if i.opcode == "dot"]
    line = inspect.getsourcelines(loss)[1] + 1
    for dot in found:
        assert "/linear.py:" in made.source(dot)
        assert made.source(dot, ("/flax/",)) == f"{__file__}:{line}"
    assert found
