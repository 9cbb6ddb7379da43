"""Parameters told from states, and parameters in trees of any kind."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.support.reference import assert_equal_bits


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array


W, B = np.arange(1024.0, dtype=np.float32).reshape(64, 16), np.ones(16, np.float32)
TREES = {
    "list": [W, B],
    "list of pairs": [(W, B), (W + 1, B)],
    "list and no state": [W, ()],
    "tuple": (W, B),
    "tuple of one": (W,),
    "named tuple": Layer(W, B),
    "list under params": {"params": [W, B]},
    "optimizer's state": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init({"w": W}),
}


@pytest.mark.parametrize("name", TREES)
def test_parameters_in_lists_and_tuples_are_all_of_them(tmp_path, name):
    params = jax.tree.map(jnp.asarray, TREES[name])
    wanted = TREES[name]["params"] if isinstance(TREES[name], dict) else TREES[name]
    assert_equal_bits(zerojax.gather_params(params), wanted)
    zerojax.checkpoint.export_safetensors(tmp_path / "w", params)
    read = zerojax.checkpoint.import_safetensors(tmp_path / "w", like=params)
    assert jax.tree.structure(read) == jax.tree.structure(wanted)
    assert_equal_bits(read, wanted)


OPTAX = [optax.sgd(0.1), optax.adam(0.1), optax.named_chain(("a", optax.adam(0.1)))]


@pytest.mark.parametrize("tx", OPTAX, ids=["sgd", "adam", "named_chain"])
def test_pairs_with_a_state_of_optax_are_states(tx):
    params = [jnp.asarray(W), jnp.asarray(B)]
    for state in [(params, tx.init(params)), (params, tx.init(params), jnp.zeros(()))]:
        assert_equal_bits(zerojax.gather_params(zerojax.shard_train_state(state)), params)


@pytest.mark.parametrize("second", [{"m": W}, (W, B), [W], None, Layer(W, B)])
def test_pairs_that_could_be_either_are_refused_where_no_state_is_expected(tmp_path, second):
    pair = ({"w": W}, second)
    remedy = r"may be \(params, opt_state\), or a tuple of p.*state\[0\], or.*list\(params\)"
    export = lambda params: zerojax.checkpoint.export_safetensors(tmp_path / "w", params)
    for refused in (zerojax.gather_params, export):
        with pytest.raises(ValueError, match=remedy):
            refused(pair)
    assert not (tmp_path / "w").exists()
    assert len(zerojax.gather_params(list(pair))) == 2
    plan = zerojax.plan(pair)
    zerojax.checkpoint.export_safetensors(tmp_path / "w", pair[0])
    assert_equal_bits(zerojax.checkpoint.import_safetensors(tmp_path / "w", like=plan), pair[0])
