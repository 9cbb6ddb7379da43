"""Steps to verify: made by the library, and written by hand with one fault at will."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

import zerojax
from tests.conftest import make_mesh
from tests.models import ROWS, Model
from tests.reference import make_state

SPEC = PartitionSpec("data")
W = {"w": jax.random.normal(jax.random.key(0), (24, 16)) / 5}
X = jax.random.normal(jax.random.key(1), (ROWS, 24))
# Uneven over the parts, and none without a true element.
MASK = (jnp.arange(ROWS) % 8 == 0) | (jnp.arange(ROWS) % 7 < jnp.arange(ROWS) // 16)
MASKED = {"x": X, "mask": MASK}
ADAM = optax.adam(1e-3)  # its own small eps: full-size steps from rounding noise


def squares(params, x):
    return jnp.sum((x @ params["w"]) ** 2, -1)


def masked_loss(params, batch, mean=jnp.mean):
    return mean(squares(params, batch["x"]), where=batch["mask"])


def placed(params, tx=ADAM, stage=3, **options):
    state = make_state(Model(params, None, None), tx)
    return zerojax.shard_train_state(state, stage, **options)


def verified(made, stage=3, tx=ADAM, accumulate=1, **options):
    state = zerojax.shard_train_state(make_state(made, tx), stage)
    step = zerojax.train_step(made.loss, accumulate=accumulate, mutable=tuple(made.fields))
    rng = [] if made.rng is None else [made.rng]
    return zerojax.verify(step, state, made.batch, *rng, **options)


def by_hand(plan, tx, loss_fn, fault="", with_key=False):
    """A ZeRO step in shard_map, with one fault at will."""
    specs = plan.treedef.unflatten([leaf.spec for leaf in plan.leaves])
    leaves = plan.treedef.unflatten(plan.leaves)["params"]
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
    return jax.jit(jax.shard_map(
        per_device, mesh=plan.mesh, in_specs=(specs, SPEC, *keys),
        out_specs=(specs, PartitionSpec()), check_vma=False,
    ), donate_argnums=(0, 1))  # fmt: skip


def check_by_hand(fault="", tx=ADAM, stage=0, loss=None, rng=None, devices=8):
    loss = loss or (lambda p, x: squares(p, x).mean())
    state = {"params": W, "opt_state": tx.init(W)}
    mesh = make_mesh(devices)
    plan = zerojax.plan(state, stage=stage, tx=tx, min_shard_size=0, mesh=mesh)
    step = by_hand(plan, tx, loss, fault, rng is not None)
    rows = ROWS // devices * devices
    batch = zerojax.shard_batch(X[:rows], plan=plan)
    return zerojax.verify(step, plan.place(state), batch, rng, loss_fn=loss, tx=tx, plan=plan)


def dropping(params, x, rng):
    return squares(params, x * jax.random.bernoulli(rng, 0.5, x.shape)).mean()


def roots(params, x):
    return jnp.sqrt(jnp.sum((x @ params["w"]) ** 2))  # no gradient at 0
