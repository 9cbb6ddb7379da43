"""Saved leaves matched by name: strict by default, with options to allow differences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.checkpoint.states import make_state, place
from tests.reference import assert_equal_bits


def test_a_missing_leaf_is_an_error_that_names_it(tmp_path):
    state = {"params": {"a": jnp.ones((8, 8))}}
    more = {"params": {"a": jnp.zeros((8, 8)), "b": jnp.full(3, 5.0)}}
    zerojax.save(tmp_path / "c", state)
    with pytest.raises(ValueError, match=r"not in the checkpoint: params/b \(keep=<path regex>"):
        zerojax.restore(tmp_path / "c", more)
    back = zerojax.restore(tmp_path / "c", more, keep="params/b$")
    assert back["params"]["a"].sum() == 64 and back["params"]["b"].sum() == 15
    with pytest.raises(ValueError, match=r"no value for it, only a shape. Give a placed state"):
        zerojax.restore(tmp_path / "c", jax.eval_shape(lambda: more), keep="b$")
    with pytest.raises(ValueError, match=r"keep= has .*'\(', which is no regular.*Escape"):
        zerojax.restore(tmp_path / "c", more, keep="(")
    for pattern in (("b",), lambda name: name == "b"):
        with pytest.raises(TypeError, match=r"keep=.* is no path pattern. Pass one regular expr"):
            zerojax.restore(tmp_path / "c", more, keep=pattern)


@pytest.mark.parametrize("wrapper", [zerojax.narrow_moments, zerojax.master_weights])
def test_an_optimizer_inside_another_is_told_of(tmp_path, wrapper):
    params = {"a": jnp.ones((8, 8))}
    bare, wrapped = (
        {"params": params, "opt_state": tx.init(params)}
        for tx in (optax.adam(1e-3), wrapper(optax.adam(1e-3)))
    )
    zerojax.save(tmp_path / "bare", bare)
    with pytest.raises(ValueError, match=r"or it was saved without Precision\(master=\) or "):
        zerojax.restore(tmp_path / "bare", wrapped)
    zerojax.save(tmp_path / "wrapped", wrapped)
    with pytest.raises(ValueError, match=r"or it was saved with Precision\(master=\) or .*same"):
        zerojax.restore(tmp_path / "wrapped", bare)
    with pytest.raises(ValueError, match="not in the checkpoint: params/b") as raised:
        zerojax.restore(tmp_path / "bare", bare | {"params": params | {"b": jnp.ones(3)}})
    assert "Precision" not in str(raised.value)


def test_an_extra_leaf_is_an_error_that_names_it(tmp_path):
    zerojax.save(tmp_path / "c", place())
    like = {"params": make_state().params}
    with pytest.raises(ValueError, match=r"only in the checkpoint: .* and \d+ more \(ignore=<path"):
        zerojax.restore(tmp_path / "c", like)
    back = zerojax.restore(tmp_path / "c", like, ignore="^(opt_state|step|key)")
    assert_equal_bits(back, like)


def test_a_reshaped_leaf_is_an_error_that_names_it(tmp_path):
    zerojax.save(tmp_path / "c", {"params": {"w": jnp.ones((8, 4))}})
    like = {"params": {"w": jnp.zeros((4, 8))}}
    with pytest.raises(
        ValueError, match=r"another shape: params/w: \[8, 4\] saved, \[4, 8\] wanted \(keep="
    ):
        zerojax.restore(tmp_path / "c", like)
    assert_equal_bits(zerojax.restore(tmp_path / "c", like, keep="params/w"), like)


def test_another_models_checkpoint_is_told_of(tmp_path):
    zerojax.save(tmp_path / "c", {"params": {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}})
    for like in ({"v": jnp.ones(3), "u": jnp.ones(3)}, {"w": jnp.ones((9, 9)), "b": jnp.ones(9)}):
        with pytest.raises(ValueError, match=r"of another model do: give this run a dir.*import_s"):
            zerojax.restore(tmp_path / "c", {"params": like})
    with pytest.raises(ValueError, match="not in the checkpoint: params/v") as raised:
        zerojax.restore(tmp_path / "c", {"params": {"w": jnp.ones((8, 4)), "v": jnp.ones(4)}})
    assert "another model" not in str(raised.value)


def test_a_retyped_leaf_is_an_error_that_names_it(tmp_path):
    zerojax.save(tmp_path / "c", {"params": {"w": jnp.full((8, 4), 1.5), "n": jnp.arange(3)}})
    like = {"params": {"w": jnp.zeros((8, 4), jnp.bfloat16), "n": jnp.arange(3)}}
    with pytest.raises(ValueError, match=r"params/w: float32 saved, bfloat16 wanted \(cast=True"):
        zerojax.restore(tmp_path / "c", like)
    back = zerojax.restore(tmp_path / "c", like, cast=True)["params"]["w"]
    assert back.dtype == jnp.bfloat16 and np.all(np.asarray(back, np.float32) == 1.5)
    like["params"]["n"] = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"params/n: int32 saved, float32 wanted"):
        zerojax.restore(tmp_path / "c", like, cast=True)


def test_leaves_without_elements_come_back(tmp_path):
    """Orbax refuses them; some models train with them all the same."""
    rows = jnp.arange(8.0)
    state = {"params": {"none": jnp.zeros((0, 3), "bfloat16"), "w": rows}}
    placed = zerojax.shard_train_state(state, min_shard_size=1)
    zerojax.save(tmp_path / "one", placed)
    with zerojax.Checkpoints(tmp_path / "many") as checkpoints:
        checkpoints.save(1, placed)
    for path in (tmp_path / "one", tmp_path / "many" / "1"):
        for like in (zerojax.plan(state, stage=1), placed):
            back = zerojax.restore(path, like=like)
            none = back["params"]["none"]
            assert none.shape == (0, 3) and none.dtype == jnp.bfloat16
            assert isinstance(none.sharding, jax.sharding.NamedSharding)
            np.testing.assert_array_equal(back["params"]["w"], rows)
    with pytest.raises(ValueError, match=r"not in the checkpoint: params/none"):
        filled = {"none": jnp.zeros((2, 3), "bfloat16"), "w": rows}
        zerojax.restore(tmp_path / "one", like={"params": filled})
    zerojax.save(tmp_path / "full", {"params": filled})
    with pytest.raises(ValueError, match=r"params/none: \[2, 3\] saved, \[0, 3\] wanted"):
        zerojax.restore(tmp_path / "full", like=placed)
    zerojax.save(tmp_path / "empty", {"none": jnp.zeros((0, 3))})
    assert zerojax.restore(tmp_path / "empty", {"none": jnp.ones((0, 3))})["none"].shape == (0, 3)


def test_what_was_saved_from_nnx_objects_says_what_reads_it(tmp_path):
    """Checkpoints of models themselves, as they were once saved, have their names in nnx."""
    model, other = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    optimizer = nnx.Optimizer(other, optax.sgd(0.1), wrt=nnx.Param)
    zerojax.save(tmp_path / "c", nnx.state(model))
    with pytest.raises(ValueError, match=r"from Flax nnx objects: like=nnx.state\(model\), or"):
        zerojax.restore(tmp_path / "c", zerojax.nnx.state(other, optimizer))
    nnx.update(other, zerojax.restore(tmp_path / "c", nnx.state(other)))
    assert_equal_bits(other.kernel[...], model.kernel[...])


def test_nnx_variables_that_rest_padded_are_saved_with_their_plan(tmp_path):
    model = nnx.Linear(3, 13, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, stage=3, min_shard_size=1)
    with pytest.raises(TypeError, match=r"that zerojax pads. Save zerojax.nnx.state\(model, opt"):
        zerojax.save(tmp_path / "c", nnx.state(model))
    zerojax.save(tmp_path / "c", zerojax.nnx.state(model, optimizer))
