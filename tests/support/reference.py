"""States of small models, and comparisons of arrays: most tests use them."""

from typing import Any

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

from tests.support.models import Model


class State(TrainState):
    batch_stats: Any = None


def train_state(params: Any, tx: optax.GradientTransformation) -> TrainState:
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def make_state(model: Model, tx: optax.GradientTransformation) -> Any:
    return State.create(apply_fn=None, params=model.params, tx=tx, **model.fields)


def shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def split_aux(result: Any) -> tuple[Any, Any]:
    return result if isinstance(result, tuple) else (result, {})


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


def assert_near(actual: Any, wanted: Any, what: str, close: float = 2e-5) -> None:
    """Every element within `close` of the largest of all leaves."""
    most = max((np.abs(x).max() for x in jax.tree.leaves(wanted)), default=1)
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, b), a in zip(paths, jax.tree.leaves(actual), strict=True):
        assert a.shape == b.shape, f"{what}{jax.tree_util.keystr(path)}: {a.shape}, not {b.shape}"
        off = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0)
        assert off <= close * most, f"{what}{jax.tree_util.keystr(path)}: off by {off / most:.1e}"


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
