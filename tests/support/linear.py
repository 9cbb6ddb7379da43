"""One linear layer, its smallest state and its steps: tests of messages and of states use it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax
from tests.support.schedules import scheduled

BATCH = np.ones((8, 64), np.float32)


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def noisy(params, batch, rng):
    return loss(params, batch) + jax.random.normal(rng)


def made(tx=None):
    params = {"w": jnp.ones((64, 16))}
    return TrainState.create(apply_fn=None, params=params, tx=tx or optax.adam(0.1))


def placed(tx=None, stage=3):
    return zerojax.shard_train_state(made(tx), stage)


STEP, EVAL = zerojax.train_step(loss), zerojax.eval_step(loss)


def start(**options):
    """A placed state, a step and a batch."""
    return placed(optax.sgd(0.1)), zerojax.train_step(loss, **scheduled(options)), BATCH
