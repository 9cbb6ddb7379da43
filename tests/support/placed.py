"""Placed states of the small models."""

import jax
import optax

import zerojax
from tests.support.reference import make_state


def place(model, stage=3, tx=None, **options):
    state = make_state(model, tx or optax.adam(1e-3))
    return zerojax.shard_train_state(state, stage, **options)


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)
