"""States to save, places to restore them to, and the words that two of them are compared by."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import make_mesh


class State(TrainState):
    key: jax.Array = struct.field(default=None)  # type: ignore[assignment]


def make_state(width=64):
    k1, k2 = jax.random.split(jax.random.key(0))
    params = {
        "layer": {"w": jax.random.normal(k1, (16, width)), "b": jnp.zeros(width)},
        "head": [jax.random.normal(k2, (width, 8), jnp.bfloat16)],
    }
    mask = {"layer": {"w": True, "b": False}, "head": [True]}
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.add_decayed_weights(0.1), mask),
        optax.adam(1e-2),
    )
    return State.create(apply_fn=None, params=params, tx=tx, key=jax.random.key(7))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["layer"]["w"] + params["layer"]["b"])
    return jnp.mean((hidden @ params["head"][0].astype(jnp.float32)) ** 2)


BATCH = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def place(stage=3, devices=8, make=make_state, **options):
    return zerojax.shard_train_state(make, stage, mesh=make_mesh(devices), **options)


def plan_of(stage, devices, make=make_state):
    return zerojax.plan(make, stage=stage, mesh=make_mesh(devices))


def words(tree):
    """The leaves as comparable arrays; of keys, their words."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]


def trained(state, steps=2):
    step = zerojax.train_step(loss_fn)
    for _ in range(steps):
        state, _ = jax.block_until_ready(step(state, BATCH))
    return state


STATE = {"w": jnp.arange(12.0).reshape(3, 4)}


def save_steps(directory, *steps, **options):
    with zerojax.Checkpoints(directory, keep=None, **options) as checkpoints:
        for n in steps:
            metrics = {options["best"]: 1 / n} if "best" in options else None
            checkpoints.save(n, {"w": STATE["w"] + n}, metrics=metrics, data={"at": n})


def filled(n):
    return {"params": {name: jnp.full((64, 64), n, jnp.float32) for name in "abcd"}}
