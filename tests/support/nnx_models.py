"""Flax nnx models and their loop on one device: tests of nnx and of forecasts use them."""

import jax.numpy as jnp
import optax
from flax import nnx

from tests.support import draw

ROWS, WIDTH = 64, 32
EPS = 1e-4
BATCH = draw.normal(1, ROWS, 16)


class Net(nnx.Module):
    """A dense net with everything that is no parameter: statistics, streams, a plain counter."""

    def __init__(self, rngs, axis_name=None, rate=0.0):
        # A bias before the norm would have a mathematically zero gradient.
        first = nnx.Linear(16, WIDTH, use_bias=False, rngs=rngs)
        self.layers = nnx.List([first, nnx.Linear(WIDTH, 16, rngs=rngs)])
        self.norm = nnx.BatchNorm(WIDTH, axis_name=axis_name, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.activation = jnp.tanh

    def __call__(self, x):
        self.calls[...] += 1
        return self.layers[1](self.drop(self.activation(self.norm(self.layers[0](x)))))


def linear(rngs):
    return nnx.Linear(16, 16, rngs=rngs)


def loss_fn(model, batch):
    return jnp.mean((model(batch) - batch) ** 2)


def make(make_model=Net, wrt=nnx.Param, tx=None, **options):
    model = make_model(nnx.Rngs(0), **options)
    return model, nnx.Optimizer(model, tx or optax.adam(1e-2, eps=EPS), wrt=wrt)


def own_model():
    return make()[0]


def pure(model):
    return nnx.to_pure_dict(nnx.state(model))


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def plain_loop(model, optimizer, steps, loss=loss_fn):
    @nnx.jit
    def train_step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, optimizer.wrt))(
            model, batch
        )
        optimizer.update(model, grads)
        return value

    return [float(train_step(model, optimizer, BATCH)) for _ in range(steps)]
