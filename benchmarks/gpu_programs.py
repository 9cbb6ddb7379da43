"""The programs that benchmarks/gpu.py times. Each takes a model, and returns a step and a state."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import rivals
from flax.training.train_state import TrainState

import zerojax


def make_params(model):
    """Makes random weights, not zeros: a GPU clocks higher when it multiplies zeros."""
    shapes, treedef = jax.tree.flatten(model.shapes())
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = [0.02 * jax.random.normal(k, s.shape) for k, s in zip(keys, shapes, strict=True)]
    return treedef.unflatten(leaves)


def ours(model, of_state=None, of_step=None):
    def make_state():
        return TrainState.create(apply_fn=None, params=make_params(model), tx=optax.adamw(1e-4))

    step = zerojax.train_step(model.losses(("full",))["full"], **of_step or {})
    return step, zerojax.shard_train_state(make_state, **{"stage": 3} | (of_state or {}))


def replayed(model):
    step, state = ours(model)
    return zerojax.tools.replay(step, every=1), state


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Adapted:
    """A frozen weight with a LoRA adapter; `@` takes it for a weight."""

    base: jax.Array
    first: jax.Array
    second: jax.Array

    def __rmatmul__(self, x):
        return x @ self.base + x @ self.first @ self.second


def qlora(model, rank=16):
    """Trains adapters of each matrix of a layer over a base in 4 bits."""

    def adapted(weight):
        layers, rows, columns = weight.shape
        first = jax.random.normal(jax.random.key(1), (layers, rows, rank)) / rows**0.5
        return Adapted(weight, first, jnp.zeros((layers, rank, columns)))

    def make_state():
        params = make_params(model)
        blocks = {k: adapted(w) if w.ndim == 3 else w for k, w in params["blocks"].items()}
        params["blocks"] = blocks
        frozen = jax.tree.map(lambda _: True, params)
        for weight in frozen["blocks"].values():
            if isinstance(weight, Adapted):
                weight.first = weight.second = False
        tx = optax.selective_transform(optax.adam(1e-4), freeze_mask=frozen)
        return zerojax.quantize(TrainState.create(apply_fn=None, params=params, tx=tx), "nf4")

    state = zerojax.shard_train_state(make_state, stage=3)
    return zerojax.train_step(model.losses(("full",))["full"]), state


def by_hand(model):
    tx, loss_fn = optax.adamw(1e-4), model.losses(("full",))["full"]

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    def make_state():
        params = make_params(model)
        return params, tx.init(params)

    return jax.jit(step, donate_argnums=0), jax.jit(make_state)()


def annotated(model):
    """Returns FSDP by annotations of parameters and activations, with random weights."""
    step, state = rivals.STEPS["annotations, blocks"](model, zerojax.mesh(data=-1), "full", 1)

    def make_state():
        return TrainState.create(apply_fn=None, params=make_params(model), tx=state.tx)

    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    rests = jax.jit(make_state, out_shardings=places)()
    return (lambda state, batch: step(state, batch)), rests
