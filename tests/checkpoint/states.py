"""States to save, places to restore them to, and what two of them are compared by."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import make_mesh
from tests.support.reference import assert_equal_bits

STATE = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
# No number of devices from 2 to 8 divides a dimension of `w`. The 33 columns of `v` end on the
# seventh of 8 devices: the last one has nothing but padding.
SHAPES = {"w": (31, 11), "v": (13, 33), "scale": (3,)}
normal = lambda seed, shape: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
PARAMS = {name: normal(1, shape) for name, shape in SHAPES.items()}
BATCH = normal(0, (56, 31))


class State(TrainState):
    key: jax.Array = struct.field(default=None)  # type: ignore[assignment]


def make_state():
    """With moments of the parameters' shapes, factors of these, what is masked, and a key."""
    tx = optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), {"w": True, "v": True, "scale": False}),
        optax.scale_by_factored_rms(min_dim_size_to_factor=8),
        optax.adam(1e-2),
    )
    params = jax.tree.map(jnp.asarray, PARAMS)
    return State.create(apply_fn=None, params=params, tx=tx, key=jax.random.key(7))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["w"] * params["scale"][0])
    return jnp.mean(hidden**2) + jnp.mean(params["v"] ** 2) + params["scale"].sum()


@functools.cache
def step():
    return zerojax.train_step(loss_fn)


def trained(state):
    return jax.block_until_ready(step()(state, BATCH)[0])


def placed(stage=3, devices=8, **options):
    return zerojax.shard_train_state(make_state, stage, mesh=make_mesh(devices), **options)


def plan_of(stage=3, devices=8, **options):
    return zerojax.plan(make_state, stage=stage, mesh=make_mesh(devices), **options)


def words(tree):
    """The leaves as comparable arrays; of keys, their words."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]


def by_name(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def values(state):
    """The values of a placed state on the host by name, without what its plan says is padding."""
    pairs = zip(words(state), state.tx.plan.leaves, strict=True)
    return {leaf.path: np.asarray(x)[tuple(map(slice, leaf.shape))] for x, leaf in pairs}


def assert_holds(state, wanted, plan):
    """The values are those wanted, where the plan has them, in its shapes and with zeros around."""
    assert state.tx.plan == plan
    assert values(state).keys() == wanted.keys()
    assert_equal_bits(values(state), wanted)
    pairs = zip(jax.tree.leaves(state), words(state), plan.leaves, plan._shardings, strict=True)
    for leaf, value, planned, sharding in pairs:
        assert leaf.shape == planned.padded_shape, planned.path
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), planned.path
        assert leaf.sharding.memory_kind == sharding.memory_kind, planned.path
        around = np.array(value)
        around[tuple(map(slice, planned.shape))] = 0
        assert not around.any(), planned.path


def save_steps(directory, *steps, **options):
    """Saves STATE, to which each step adds its number; with `best=`, later steps are better."""
    with zerojax.Checkpoints(directory, keep=None, **options) as checkpoints:
        for n in steps:
            metrics = {options["best"]: 1 / n} if "best" in options else None
            checkpoints.save(n, {"w": STATE["w"] + n}, metrics=metrics, data={"at": n})
