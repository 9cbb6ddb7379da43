"""A table of embeddings and a stack of layers, trained for a step by zerojax and without it."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from tests.conftest import make_mesh
from tests.support.models import EPS
from tests.support.reference import assert_close, split_aux, train_state
from tests.support.schedules import train_step

ALL = zerojax.Offload(min_bytes=0)
BATCH = np.arange(32) % 60
adam = functools.partial(optax.adamw, 1e-3, eps=EPS)


def stacks(tx=None, dim=32, layers=3):
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape) / 16
    params = {
        "blocks": {"w": normal(keys[0], layers, dim, dim), "norm": jnp.ones((layers, dim))},
        "embed": normal(keys[1], 2 * dim, dim),
    }
    return train_state(params, tx or adam())


def loop(x, layers, **options):
    layer = lambda x, p: (x + jnp.tanh((x * p["norm"]) @ p["w"]), None)
    return jax.lax.scan(jax.checkpoint(layer), x, layers, **options)[0]


def loss(params, batch, **options):
    x = loop(params["embed"][batch], params["blocks"], **options)
    return jnp.mean((x @ params["embed"].T) ** 2)


def trained(make=stacks, loss=loss, placing=None, **options):
    """A step, the state after it and its metrics."""
    placing = {"mesh": make_mesh(2), **(placing or {})}
    state = zerojax.shard_train_state(make, **placing)
    step = train_step(loss, **options)
    return step, *jax.block_until_ready(step(state, BATCH))


@functools.cache
def on_one_device(make=stacks, loss=loss):
    """The state after a step of plain JAX and optax, and the norm of the gradients."""

    @jax.jit
    def step(batch):
        state = make()
        grads = jax.grad(lambda params: split_aux(loss(params, batch))[0])(state.params)
        return state.apply_gradients(grads=grads), optax.tree.norm(grads)

    return jax.device_get(step(BATCH))


def check(state, metrics, make=stacks, loss=loss):
    """Compares what a step returned with one device."""
    wanted, norm = on_one_device(make, loss)
    assert_close(jax.device_get(jax.tree.leaves(state)), jax.tree.leaves(wanted))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


def is_on_host(x):
    return x.sharding.memory_kind == "pinned_host"


@functools.cache
def on_gpus(gpus, stage=3, update="after", offload=None, layers=8):
    """A plan, and the audit of a step for it, compiled for GPUs; older JAX warns."""
    make = functools.partial(stacks, optax.adamw(1e-3), dim=512, layers=layers)
    plan = zerojax.plan(make, stage=stage, mesh=zerojax.aot.mesh(gpus), offload=offload)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((64,), "int32"), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = train_step(loss, plan=plan, update=update)
        compiled = step.lower(plan.abstract(), batch).compile()
    return plan, compiled, zerojax.audit(compiled, plan=plan)
