"""Small stacks of layers, for CPU devices or GPUs not there: tests of audits and steps use them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import make_mesh
from tests.support.schedules import scheduled

LAYERS, DIM, ROWS = 4, 128, 32


def mesh_of(where: str) -> Any:
    """Of CPU devices or, in tests marked `gpu_code`, of GPUs to compile for.

    Six of them divide neither DIM nor its multiples, so that every parameter is padded.
    """
    sizes = {"cpu": 8, "6xcpu": 6}
    return make_mesh(sizes[where]) if where in sizes else zerojax.aot.mesh(where)


def make_state(tx: Any = None, layers: int = LAYERS, dim: int = DIM) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "layers": {
            "w": jax.random.normal(keys[0], (layers, dim, dim)) / 16,
            "norm": jnp.ones((layers, dim)),
        },
        "embed": jax.random.normal(keys[1], (2 * dim, dim)),
    }
    return TrainState.create(apply_fn=None, params=params, tx=tx or optax.adamw(1e-3))


def layer(x: Any, p: Any) -> tuple[Any, None]:
    return x + jnp.tanh((x * p["norm"].astype(x.dtype)) @ p["w"].astype(x.dtype)), None


def loss(params: Any, tokens: Any, wrap: Any = jax.checkpoint, dtype: Any = jnp.bfloat16) -> Any:
    x = params["embed"].astype(dtype)[tokens]
    x, _ = jax.lax.scan(wrap(layer), x, params["layers"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def tokens(plan: Any, rows: int = ROWS) -> Any:
    shape = jax.ShapeDtypeStruct((rows * plan.size,), jnp.int32)
    return zerojax.aot.batch(shape, plan)


def planned(where: str, stage: int, **options: Any) -> Any:
    return zerojax.plan(make_state, stage=stage, mesh=mesh_of(where), **options)


def audited(plan: Any, loss_fn: Any = loss, step: Any = None, state: Any = None, **options) -> Any:
    """The audit of a step on abstract arguments."""
    step = zerojax.train_step(loss_fn, **scheduled(options)) if step is None else step
    state = plan.abstract() if state is None else state
    return zerojax.audit(step, state, tokens(plan), plan=plan)
