"""Rivals on plain JAX, as users would write them: a jitted step, sharded by annotations.

A rival is a function in `STEPS`, under its name in the tables. It takes a model, a mesh, the policy
of `jax.checkpoint`, and the number of microbatches. It returns a jitted `(state, batch) -> (state,
loss)` and the state's shapes with their shardings.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import zerojax

CONSTRAINED = ("weights", "blocks", "nothing")
SMALL = 4 * 2**20  # bytes up to which big_vision's rule replicates


def replicated(model, mesh):
    """Returns the state of data parallelism, all replicated."""
    return zerojax.plan(model.make_state, stage=0, mesh=mesh).abstract()


def planned(model, mesh):
    """Returns the state with every array that the GPUs divide sharded as zerojax shards it."""
    return zerojax.plan(model.make_state, stage=3, mesh=mesh, pad=False).abstract()


def cut_along_largest(model, mesh):
    """Returns the state sharded by the rule of big_vision and kauldron."""

    def placed(x):
        spec = [None] * x.ndim
        largest_first = np.argsort(x.shape)[::-1]
        divisible = [dim for dim in largest_first if x.shape[dim] % mesh.size == 0]
        if divisible and x.size * x.dtype.itemsize > SMALL:
            spec[divisible[0]] = "data"
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(placed, replicated(model, mesh))


def annotated_step(placed, constrain, model, mesh, remat, accumulate):
    """Returns a jitted step and its state from `placed`; `constrain` says what else is annotated.

    "weights": the scan replicates each layer's weights, the strongest hint there is.
    "blocks": each layer's activations are sharded along the batch, as in Flax models.
    "nothing": only parameters and batch are sharded, and XLA figures out the rest, as in guides.
    """
    state = placed(model, mesh)
    places = jax.tree.map(lambda x: x.sharding, state)
    held_to = lambda spec: functools.partial(
        jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, spec)
    )
    whole, rows = held_to(PartitionSpec()), held_to(PartitionSpec("data"))

    class Annotated(type(model)):
        def layer(self, x, p):
            if constrain == "weights":
                p = jax.tree.map(whole, p)
            if constrain == "nothing":
                return super().layer(x, p)
            x, _ = super().layer(rows(x), p)
            return rows(x), None

    loss_fn = functools.partial(Annotated(**vars(model)).loss, remat=remat)
    held = lambda grads: jax.lax.with_sharding_constraint(grads, places.params)
    gradients = accumulated(jax.value_and_grad(loss_fn), accumulate, held)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, None))
    def step(state, batch):
        loss, grads = gradients(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return step, state


def accumulated(gradients, times, held=lambda grads: grads):
    """Returns a `value_and_grad` that averages over microbatches in a scan, as written by hand.

    `held` constrains the gradients' shardings. A device's microbatches consist of its own rows.
    """
    if times == 1:
        return gradients

    def averaged(params, batch):
        split = lambda x: x.reshape(-1, times, *x.shape[1:]).swapaxes(0, 1)

        def add(total, microbatch):
            loss, grads = gradients(params, microbatch)
            return jax.tree.map(jnp.add, total, (loss, held(grads))), None

        start = jnp.zeros(()), held(jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, start, jax.tree.map(split, batch))
        return jax.tree.map(lambda x: x / times, total)

    return averaged


RULES = {"annotations": planned, "largest dimension": cut_along_largest}
STEPS = {"replicated": functools.partial(annotated_step, replicated, "blocks")} | {
    f"{name}, {constrain}": functools.partial(annotated_step, placed, constrain)
    for name, placed in RULES.items()
    for constrain in CONSTRAINED
}
