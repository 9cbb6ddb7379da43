"""The lineage of values in stored programs: arguments, source lines, leaves of the state."""

import pytest

import zerojax
from tests.hlo.modules import module
from tests.stored import F32, LAYER, report


@pytest.mark.parametrize(
    "name", ["layers-8xH100-jax0.10", "layers-8xH100-jax0.12", "layers-cpu8-jax0.10"]
)
def test_gathers_are_traced_to_their_argument(name):
    """On newer GPUs' programs through a slice that XLA starts as an asynchronous fusion."""
    gather = next(t for t in report(name).traffic if t.kind == "all-gather")
    assert gather.paths == ("stack",)


def test_others_are_traced_to_their_line():
    for name in ("layers-cpu8-jax0.10", "layers-8xH100-jax0.12"):
        loss = next(t for t in report(name).traffic if t.kind == "all-reduce")
        file, line = (loss.source or "").split(":")
        assert file == "src/tests/programs/make.py" and int(line) > 30
        assert loss.serves == loss.source


@pytest.mark.parametrize("name", ["step3-8xH100-jax0.12", "step2-16xH100-jax0.10"])
def test_state_is_donated_and_named(name):
    found = report(name)
    # step, b and w, and the momentum of both; the rows and the norm are no state
    assert len(found.module.aliases) == 5 and found.not_donated == ()
    n, kept = (8, 1) if name.startswith("step3") else (16, 16)
    leaves = 4 * 256 * F32 + 4 * LAYER * F32
    assert found.memory.parameters == leaves // n * kept
    assert found.memory.optimizer == leaves // n
    assert {path for t in found.traffic for path in t.paths} >= {"params/layers/w"}


def test_gathers_that_xla_joined_are_traced_one_by_one():
    entry = """
  %a = f32[64,1024]{1,0} parameter(0), metadata={op_name="state.params['a']"}
  %b = f32[32,1024]{1,0} parameter(1), metadata={op_name="state.params['b']"}
  %both = (f32[1024,1024]{1,0}, f32[512,1024]{1,0}) all-gather(%a, %b), dimensions={0}
  %full = f32[512,1024]{1,0} get-tuple-element(%both), index=1
  %again = f32[512,16384]{1,0} all-gather(%full), replica_groups={}, dimensions={1}
  ROOT %r = f32[] constant(0)
"""
    text = module(entry).text.replace("(a: f32[64,1024])", "(a: f32[64,1024], b: f32[32,1024])")
    joined, again = zerojax.audit(text).traffic
    assert [part.paths for part in joined.parts] == [("params/a",), ("params/b",)]
    assert again.paths == ("params/b",)
