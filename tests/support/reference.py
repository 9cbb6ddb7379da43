"""One device's numbers, without zerojax: the truth that every stage is compared with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from tests.support.models import Model


class State(TrainState):
    batch_stats: Any = None


def make_state(model: Model, tx: optax.GradientTransformation) -> Any:
    return State.create(apply_fn=None, params=model.params, tx=tx, **model.fields)


def split_aux(result: Any) -> tuple[Any, Any]:
    return result if isinstance(result, tuple) else (result, {})


def reference_loss(model: Model, shards: int, accumulate: int) -> Any:
    """The mean of the loss over shards and microbatches, each with its own folded key.

    With one shard and one microbatch, the plain loss on the whole batch.
    """

    def loss(params, batch, rng, fields):
        def one(index_and_part):
            index, part = index_and_part
            args = (params, part)
            if rng is not None:
                key = jax.random.fold_in(rng, index // accumulate)
                args += (jax.random.fold_in(key, index % accumulate) if accumulate > 1 else key,)
            return split_aux(model.loss(*args, **fields))

        ways = shards * accumulate
        parts = jax.tree.map(lambda x: x.reshape(ways, -1, *x.shape[1:]), batch)
        losses, aux = jax.lax.map(one, (jnp.arange(ways), parts))
        return losses.mean(), jax.tree.map(lambda x: x.mean(0), aux)

    return loss


def reference_run(model: Model, tx: Any, steps: int, shards: int = 1, accumulate: int = 1) -> Any:
    """State, losses and first gradients of a plain loop on one device."""
    loss = reference_loss(model, shards, accumulate)

    @jax.jit
    def step(state, batch):
        fields = {name: getattr(state, name) for name in model.fields}
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, aux), grads = grad(state.params, batch, model.rng, fields)
        new_fields = {name: aux[name] for name in model.fields}
        return state.apply_gradients(grads=grads, **new_fields), value, grads

    device = jax.devices()[0]
    state, batch = jax.device_put((make_state(model, tx), model.batch), device)
    losses, first = [], None
    for _ in range(steps):
        state, value, grads = step(state, batch)
        losses.append(float(value))
        first = grads if first is None else first
    return state, losses, first


def assert_close(actual: Any, wanted: Any, tolerance: float = 1e-5, what: str = "") -> None:
    """Every leaf within `tolerance` of the other, measured against the leaf's own norm.

    Leaves that are noise next to the whole tree are measured against the tree.
    """
    a_leaves = jax.tree_util.tree_flatten_with_path(actual)[0]
    b_leaves = jax.tree.leaves(wanted)
    assert len(a_leaves) == len(b_leaves), f"{what}: other leaves"
    sizes = [np.linalg.norm(np.asarray(b, np.float64)) for b in b_leaves]
    floor = 1e-4 * max(sizes, default=0.0)
    for (path, a), b, size in zip(a_leaves, b_leaves, sizes, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}{path}: {a} and {b}"
        diff = np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        limit = tolerance * max(size, floor)
        assert diff <= limit or diff == 0, (
            f"{what}{jax.tree_util.keystr(path)}: off by {diff / max(size, floor, 1e-30):.1e}"
        )


def assert_equal_bits(actual: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def divided(tree: Any, devices: int = 8) -> tuple[dict[str, Any], dict[str, Any]]:
    """By name, the arrays that devices share and the others, read off their shapes alone.

    Arrays of fewer than 128 elements are not worth a collective; `blocks` are stacks of layers.
    """
    shared, others = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        dims = leaf.shape["blocks/" in name :]
        divides = leaf.size >= 128 and any(dim % devices == 0 for dim in dims)
        (shared if divides else others)[name] = leaf
    return shared, others


def tree_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "size"))
