"""A training state for models that are pytrees of more than parameters, such as Equinox's."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from zerojax._state import carried as _carried
from zerojax._state.state import PARAMS
from zerojax._types import PyTree


@struct.dataclass
class ModuleState:
    """A training state of a model that is a pytree itself, such as an `equinox.Module`.

    `ModuleState.create(model, tx)` makes one. The loss takes the model, `loss_fn(model, batch)`;
    `state.model` is the trained model. Its arrays of floats are the parameters, and the optimizer
    sees only them, as in `tx.init(equinox.filter(model, equinox.is_inexact_array))`. Other arrays
    and other objects (an activation function, say) stay unchanged.

    Example:
        >>> model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((64, 16)))
        >>> state = zerojax.ModuleState.create(model, optax.adam(1e-3))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> step = zerojax.train_step(lambda model, x: jnp.mean(model(x) ** 2))
        >>> state, metrics = step(state, np.ones((8, 64), np.float32))
        >>> print(state.model(np.ones((1, 64))).shape)
        (1, 16)
    """

    makes_models = True  # `model` has logical shapes: see `carried.hides_padding`

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    arrays: PyTree
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    static: tuple = struct.field(pytree_node=False)  # treedef and leaves that are not arrays

    @classmethod
    def create(
        cls, model: PyTree, tx: optax.GradientTransformation, **fields: PyTree
    ) -> "ModuleState":
        """Makes the state of an untrained model; `fields` are those of a subclass."""
        params, arrays, rest = (
            jax.tree.map(lambda leaf, k=kind: leaf if _kind(leaf) == k else None, model)
            for kind in ("params", "arrays", "static")
        )
        leaves, treedef = jax.tree.flatten(rest)
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=tx.init(params),
            arrays=arrays,
            tx=tx,
            static=(treedef, tuple(leaves)),
            **fields,
        )

    @property
    def model(self) -> PyTree:
        """The model with the current parameters."""
        return self.model_of(self.params)

    @property
    def model_of(self) -> Callable[[PyTree], PyTree]:
        """A function from parameters to the model with them, which a step passes to its loss.

        It is a `Partial`, in which a trace finds the model's other arrays. Padded parameters get
        their logical shapes.
        """
        treedef, leaves = self.static
        bound = (_carried.carried_plan(self), treedef.unflatten(leaves))
        return jax.tree_util.Partial(functools.partial(_joined, *bound), self.arrays)

    def apply_gradients(self, *, grads: PyTree, **fields: PyTree) -> "ModuleState":
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        new = {"step": self.step + 1, "params": params, "opt_state": opt_state, **fields}
        return dataclasses.replace(self, **new)


def _joined(plan: _carried.CarriedPlan, static: PyTree, arrays: PyTree, params: PyTree) -> PyTree:
    params = params if plan is None else plan._logical_part(params, PARAMS)

    def first(*leaves: PyTree) -> PyTree:
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jax.tree.map(first, params, arrays, static, is_leaf=lambda x: x is None)


def _kind(leaf: PyTree) -> str:
    """Returns the field for a leaf of the model. As in Equinox, numpy arrays are constants."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return "static"
    trains = jnp.issubdtype(leaf.dtype, jnp.inexact) and not isinstance(leaf, np.ndarray)
    return "params" if trains else "arrays"
