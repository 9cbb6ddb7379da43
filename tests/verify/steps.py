"""Steps to verify: made by the library, and written by hand with one fault at will."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec

import zerojax
from tests.conftest import make_mesh

ROWS, DEVICES = 64, 2
SPEC = PartitionSpec("data")
W = {"w": np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32) / 5}
X = np.random.default_rng(1).normal(size=(ROWS, 24)).astype(np.float32)
# Uneven over the parts, and none without a true element.
MASK = (np.arange(ROWS) % 8 == 0) | (np.arange(ROWS) % 7 < np.arange(ROWS) // 16)
MASKED = {"x": X, "mask": MASK}
ADAM = optax.adam(1e-3)  # its own small eps: full-size steps from rounding noise


class State(TrainState):
    batch_stats: Any = None


def squares(params, x):
    return jnp.sum((x @ params["w"]) ** 2, -1)


def mean_loss(params, x):
    return squares(params, x).mean()


def masked_loss(params, batch, mean=jnp.mean):
    return mean(squares(params, batch["x"]), where=batch["mask"])


def dropping(params, x, rng):
    return squares(params, x * jax.random.bernoulli(rng, 0.5, x.shape)).mean()


def roots(params, x):
    return jnp.sqrt(jnp.sum((x @ params["w"]) ** 2))  # no gradient at 0


def placed(params=W, tx=ADAM, stage=3, devices=DEVICES, fields=None, **options):
    state = State.create(apply_fn=None, params=params, tx=tx, **(fields or {}))
    return zerojax.shard_train_state(state, stage, **{"mesh": make_mesh(devices)} | options)


def verified(loss=mean_loss, batch=X, *rng, state=None, made=None, **options):
    """The verification of a step of `loss`, which is `made` with these options."""
    state = placed() if state is None else state
    step = zerojax.train_step(loss, **(made or {}))
    return zerojax.verify(step, state, batch, *rng, **options)


def by_hand(plan, tx, loss_fn, fault="", with_key=False):
    """A ZeRO step in shard_map, with one fault at will."""
    specs = plan._treedef.unflatten([leaf.spec for leaf in plan.leaves])
    leaves = plan._treedef.unflatten(plan.leaves)["params"]
    size = plan.mesh.size

    def mean(x):
        return x if fault == "dropped" else lax.psum(x, "data") / (1 if fault == "sum" else size)

    def whole(shard, leaf):
        if leaf.rest.dim is None:
            return shard
        full = lax.all_gather(shard, "data", axis=leaf.dim, tiled=True)
        return full[tuple(map(slice, leaf.shape))]

    def cut(grad, leaf):
        if leaf.rest.dim is None:
            return mean(grad)
        pads = [(0, n - have) for n, have in zip(leaf.padded_shape, grad.shape, strict=True)]
        full = jnp.pad(grad, pads)
        return lax.psum_scatter(full, "data", scatter_dimension=leaf.dim, tiled=True) / size

    def per_device(state, batch, *rng):
        if rng and fault != "unfolded":
            rng = [jax.random.fold_in(rng[0], lax.axis_index("data"))]
        params = jax.tree.map(whole, state["params"], leaves)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, *rng)
        grads = jax.tree.map(cut, grads, leaves)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        if fault == "twice":
            updates = jax.tree.map(lambda u: 2 * u, updates)
        new = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return new, (loss if fault == "loss" else mean(loss))

    keys = (PartitionSpec(),) if with_key else ()
    mapped = jax.shard_map(
        per_device,
        mesh=plan.mesh,
        in_specs=(specs, SPEC, *keys),
        out_specs=(specs, PartitionSpec()),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def check_by_hand(fault="", tx=ADAM, stage=0, loss=mean_loss, rng=None, devices=DEVICES):
    state = {"params": W, "opt_state": tx.init(W)}
    mesh = make_mesh(devices)
    plan = zerojax.plan(state, stage=stage, tx=tx, min_shard_size=0, mesh=mesh)
    step = by_hand(plan, tx, loss, fault, rng is not None)
    batch = zerojax.shard_batch(X[: ROWS // devices * devices], like=plan)
    like = zerojax.train_step(loss, tx=tx, plan=plan)
    return zerojax.verify(step, plan.place(state), batch, rng, like=like)
