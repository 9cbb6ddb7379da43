"""Saved leaves are matched by name: strictly, with options to allow differences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.support.reference import assert_equal_bits

ONES, TWOS, B = np.ones((8, 4), np.float32), np.full((8, 4), 2, np.float32), np.ones(4, np.float32)
NARROW, COUNT = np.zeros((8, 4), jnp.bfloat16), np.arange(3, dtype=np.int32)
MANY = {name: B for name in "abcdefg"}
NONE = np.zeros((0, 3), np.float32)
OTHER = "Most leaves differ, as if another model was saved: give this run its.*import_safetensors"
PARAMS, CHAIN_OF = {"w": ONES}, lambda tx: optax.chain(tx, optax.scale(2.0)).init({"w": ONES})
CHAIN = {"params": PARAMS, "opt_state": CHAIN_OF(optax.adam(1e-3))}
# Masters that are not those of a Precision, which wraps all of the optimizer.
MASTERS = zerojax.manual.master_weights(optax.adam(1e-3), "float32")
INSIDE = {"params": PARAMS, "opt_state": CHAIN_OF(MASTERS)}

# What is saved, what like= is, its options, and what is said.
REFUSED = [
    ({"w": ONES}, {"w": ONES, "b": B}, {}, r"not in the checkpoint: b \(keep=<path regex>"),
    ({"w": ONES, "b": B}, {"w": ONES}, {}, r"only in the checkpoint: b \(ignore=<path regex>"),
    ({"w": ONES, **MANY}, {"w": ONES}, {}, "a; b; c; d; e and 2 more"),
    ({"w": ONES, "b": B}, {"w": ONES.T, "b": B}, {}, r"w: \[8, 4\] saved, \[4, 8\] wanted \(keep="),
    ({"w": ONES}, {"w": NARROW}, {}, r"w: float32 saved, bfloat16 wanted \(cast=True"),
    ({"n": COUNT}, {"n": np.zeros(3)}, {"cast": True}, "n: int32 saved, float32 wanted"),
    ({"w": ONES, "n": B}, {"w": ONES, "n": NONE}, {}, r"n: \[4\] saved, \[0, 3\] wanted"),
    ({"w": ONES, "b": B}, {"v": ONES, "u": B}, {}, OTHER),
    (
        {"w": ONES},
        {"w": ONES},
        {"keep": "v$"},
        r"keep='v\$' matches no leaf of like=. Paths are.* w",
    ),
    (
        {"w": ONES},
        {"w": ONES},
        {"keep": "opt_state/hed"},
        "keep='opt_state/hed' matches no leaf of",
    ),
    (CHAIN, INSIDE, {}, r"or it was saved without Precision\(master=\) or Precision\(moments=\)"),
    (INSIDE, CHAIN, {}, r"it was saved with Precision\(master=\) or .*place like= with the same"),
]


@pytest.mark.parametrize("saved, like, options, message", REFUSED)
def test_a_difference_is_an_error_that_names_it(tmp_path, saved, like, options, message):
    zerojax.save(tmp_path / "c", saved)
    with pytest.raises(ValueError, match=message) as raised:
        zerojax.restore(tmp_path / "c", like, **options)
    assert ("another model" in str(raised.value)) == (message == OTHER)
    assert ("Precision" in str(raised.value)) == ("Precision" in message)


# And what is read.
ALLOWED = [
    # An optimizer without state, and an array without elements.
    ({"w": TWOS}, {"w": ONES}, {"keep": "opt_state"}, {"w": TWOS}),
    ({"w": TWOS, "n": NONE}, {"w": ONES, "n": NONE}, {"keep": "n$"}, {"w": TWOS, "n": NONE}),
    ({"w": TWOS}, {"w": ONES, "b": B}, {"keep": "b$"}, {"w": TWOS, "b": B}),
    ({"w": TWOS, "b": B}, {"w": ONES}, {"ignore": "^(b|c)"}, {"w": TWOS}),
    ({"w": TWOS, "b": 2 * B}, {"w": ONES.T, "b": B}, {"keep": "w"}, {"w": ONES.T, "b": 2 * B}),
    ({"w": TWOS}, {"w": NARROW}, {"cast": True}, {"w": TWOS.astype(jnp.bfloat16)}),
    ({"w": TWOS, "n": 3}, {"w": ONES, "n": 1}, {}, {"w": TWOS, "n": np.int32(3)}),
    ({"n": NONE}, {"n": NONE}, {}, {"n": NONE}),
]


@pytest.mark.parametrize("saved, like, options, wanted", ALLOWED)
def test_options_allow_a_difference(tmp_path, saved, like, options, wanted):
    zerojax.save(tmp_path / "c", saved)
    back = zerojax.restore(tmp_path / "c", like, **options)
    assert jax.tree.structure(back) == jax.tree.structure(wanted)
    assert_equal_bits(back, wanted)
    assert [x.dtype for x in jax.tree.leaves(back)] == [x.dtype for x in jax.tree.leaves(wanted)]


def test_leaves_without_elements_come_back_in_their_places(tmp_path):
    """Orbax refuses them; some models train with them all the same."""
    state = {"params": {"none": jnp.zeros((0, 3), "bfloat16"), "w": jnp.arange(8.0)}}
    placed = zerojax.shard_train_state(state, min_shard_size=1)
    zerojax.save(tmp_path / "one", placed)
    with zerojax.Checkpoints(tmp_path / "many") as checkpoints:
        checkpoints.save(1, placed)
    for path in (tmp_path / "one", tmp_path / "many" / "1"):
        for like in (zerojax.plan(state, stage=1), placed):
            none = zerojax.restore(path, like=like)["params"]["none"]
            assert none.shape == (0, 3) and none.dtype == jnp.bfloat16
            assert isinstance(none.sharding, jax.sharding.NamedSharding)


def test_nnx_objects_are_told_what_saves_and_reads_them(tmp_path):
    """Checkpoints of models themselves, as they were once saved, have their names in nnx."""
    model, other = (nnx.Linear(3, 13, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    optimizer = nnx.Optimizer(other, optax.sgd(0.1), wrt=nnx.Param)
    zerojax.save(tmp_path / "c", nnx.state(model))
    with pytest.raises(ValueError, match=r"from Flax nnx objects: .*like=nnx.state\(model\), or"):
        zerojax.restore(tmp_path / "c", zerojax.nnx.state(other, optimizer))
    nnx.update(other, zerojax.restore(tmp_path / "c", nnx.state(other)))
    assert_equal_bits(other.kernel[...], model.kernel[...])
    zerojax.nnx.shard(other, optimizer, stage=3, min_shard_size=1)
    with pytest.raises(TypeError, match=r"that zerojax pads. Save zerojax.nnx.state\(model, opt"):
        zerojax.save(tmp_path / "padded", nnx.state(other))
