"""The plan that a placed state carries in its optimizer."""

import copy

import zerojax
from tests.models import mlp
from tests.placed import place
from tests.reference import assert_equal_bits


def test_placed_states_can_be_copied():
    made = mlp(False)
    state = place(made)
    for copied in (copy.copy(state), copy.deepcopy(state)):
        assert_equal_bits(copied.params, state.params)
    step = zerojax.train_step(made.loss, donate=False)
    assert_equal_bits(step(copied, made.batch)[0].params, step(state, made.batch)[0].params)
    assert step._cache_size() == 1
