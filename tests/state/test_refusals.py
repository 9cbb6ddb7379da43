"""States that are gone, and optimizers that take more than gradients."""

import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.linear import BATCH, EVAL, STEP, loss, placed


def test_a_donated_state_is_refused_wherever_it_is_passed(tmp_path):
    state = placed()
    new, _ = STEP(state, BATCH)
    path = str(tmp_path / "there")
    uses = {
        "step": lambda s: STEP(s, BATCH),
        "eval": lambda s: EVAL(s, BATCH),
        "save": lambda s: zerojax.save(path, s),
        "export": lambda s: zerojax.export_safetensors(path, s),
        "verify": lambda s: zerojax.verify(STEP, s, BATCH),
        "gather": zerojax.gather_params,
        "shard": zerojax.shard_train_state,
        "place": lambda s: zerojax.plan(s).place(s),
    }
    with zerojax.Checkpoints(tmp_path / "all") as checkpoints:
        uses["checkpoints"] = lambda s: checkpoints.save(1, s, force=True)
        for name, use in uses.items():
            with pytest.raises(ValueError, match=r"donated.*state, metrics = step\(") as raised:
                use(state)
            assert "state leaf step is gone" in str(raised.value), name
    assert list(tmp_path.iterdir()) == [tmp_path / "all"], "no half file"
    STEP(new, BATCH)


def test_a_state_with_one_deleted_leaf_is_refused():
    state = placed()
    w = state.params["w"]
    w.delete()
    for step in (STEP, EVAL):
        with pytest.raises(ValueError, match=r"state leaf params/w is gone"):
            step(state, BATCH)
    assert not state.step.is_deleted()


def test_a_donated_batch_is_not_called_a_state():
    batch = {"x": zerojax.shard_batch(BATCH)}
    batch["x"].delete()
    step = zerojax.train_step(lambda params, batch: loss(params, batch["x"]))
    with pytest.raises(ValueError, match=r"batch leaf x was donated.*Pass a new batch"):
        step(placed(), batch)


@pytest.mark.parametrize(
    ("tx", "wants"),
    [
        (optax.lbfgs(), "value=, grad=, value_fn="),
        (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "value="),
        (optax.polyak_sgd(), "value="),
    ],
)
def test_optimizers_whose_update_takes_more(tx, wants):
    message = rf"takes {wants} in addition to the gradients.*zerojax.value_and_grad.*docs/loop.md"
    with pytest.raises(TypeError, match=message):
        STEP(placed(tx), BATCH)


def test_what_a_loss_is_not_given_is_told_how_to_give():
    asked = {
        "stats": lambda params, batch, *, stats: 0.0,
        "ema": lambda params, batch, dropout_key, ema: 0.0,
    }
    for field, wants in asked.items():
        message = rf"missing .*'{field}'.*jax.random.key\(n\).*by name: mutable=\('{field}',\)"
        with pytest.raises(TypeError, match=message):
            zerojax.train_step(wants)(placed(), BATCH)


def test_parameters_that_are_one_array():
    w = jnp.ones((64, 16))
    state = TrainState.create(apply_fn=None, params=w, tx=optax.sgd(0.1))
    step = zerojax.train_step(lambda w, batch: jnp.mean((batch @ w) ** 2))
    with pytest.raises(TypeError, match=r"parameters are one array.*into a dict, params={'w': w}"):
        step(zerojax.shard_train_state(state), BATCH)
