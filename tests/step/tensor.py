"""A stack of layers beside a `tensor` axis of the user's own."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
from tests.support.reference import train_state

LAYERS, DIM, INNER = 4, 32, 64
SPECS = {"up": P(None, None, "tensor"), "down": P(None, "tensor", None)}
SHAPES = {"up": (LAYERS, DIM, INNER), "down": (LAYERS, INNER, DIM)}
PART = LAYERS * DIM * INNER * 4 * 2 // 2  # bytes of both stacks on one of two tensor devices
SENT = PART // 2  # by each of two data devices, in one gather or one reduce-scatter
BATCH = np.random.default_rng(0).normal(size=(32, DIM)).astype(np.float32)


def cpu_mesh():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def make_state():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        name: jax.random.normal(key, shape) / 8
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }
    return train_state(params, optax.adam(1e-2))


def placed(mesh, stage):
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    state = make_state()
    state = state.replace(params={k: put(v, SPECS[k]) for k, v in state.params.items()})
    return zerojax.shard_train_state(state, stage, mesh=mesh)


def layer(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"], None


def scanned(params, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


def weights_sent(report, over="data"):
    """Bytes by kind of what is large and goes over an axis, and none goes over both."""
    large = [one for one in report.traffic if one.wire_bytes >= 1000]  # others are scalars
    assert {one.axes for one in large} <= {("data",), ("tensor",)}
    sent = collections.Counter()
    for one in large:
        sent[one.kind] += one.wire_bytes * one.trips * (one.axes == (over,))
    return dict(+sent)
