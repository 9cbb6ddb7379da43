"""How one parameter is held during a step, and what becomes of its gradient."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import _collectives
from zerojax._collectives import Cut, Wire
from zerojax._engine.ir import WEIGHT, Kind, Shard
from zerojax._plan.plan import LeafPlan, Plan
from zerojax._plan.precision import Precision, promoted
from zerojax._state.state import OPT_STATE, PARAMS


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a step. The stage table decides all of it."""

    leaf: LeafPlan
    plan: Plan
    precision: Precision
    accumulates: bool

    @property
    def is_held(self) -> bool:
        """Whether the loss sees shards, to gather and to send gradients through as they appear.

        Below stage 2, gradients wait for one thing only: to be summed over microbatches.
        """
        sums_whole = self.accumulates and not self.plan.sharded["grads"]
        return not sums_whole and self.dim is not None

    @property
    def dim(self) -> int | None:
        """Along which it is cut. At stage 0 of stacks of matrices the last, as far as loops over
        them need to know: each layer's gradient is then reduced while others are computed."""
        if self.plan.sharded[OPT_STATE] or self.plan.size == 1:
            return self.leaf.dim
        return len(self.leaf.shape) - 1 if len(self.leaf.shape) > 2 else None

    @property
    def is_varied(self) -> bool:
        """Whether it has a gradient."""
        return jnp.issubdtype(self.leaf.dtype, jnp.inexact) and not self.leaf.frozen

    @property
    def grad_dtype(self) -> Any:
        """The parameter's own, as in JAX; wider only where wider master copies want it."""
        precision, own = self.precision, self.leaf.dtype
        if precision.master is None or not jnp.issubdtype(own, jnp.floating):
            return own
        wide = precision.master if self.accumulates else precision.reduce
        return promoted(own, wide or own)

    @property
    def compute_dtype(self) -> Any:
        is_float = jnp.issubdtype(self.leaf.dtype, jnp.floating)
        return (is_float and self.precision.compute) or self.leaf.dtype

    @property
    def shard_shape(self) -> tuple[int, ...]:
        cuts = [d == self.leaf.dim for d in range(len(self.leaf.shape))]
        sizes = zip(self.leaf.shape, cuts, strict=True)
        return tuple(n // self.plan.size if cut else n for n, cut in sizes)

    def kind(self) -> Kind:
        if not self.is_held or self.dim is None:
            return WEIGHT
        keeps_all = not self.plan.sharded[OPT_STATE]
        others = self.leaf.others(self.plan.axes)
        return Shard(None, Cut(self.dim, self.compute_dtype, keeps_all=keeps_all, others=others))

    def varied(self, value: Any) -> Any:
        """What the loss is differentiated by: the shard where there is one."""
        if not jnp.issubdtype(self.leaf.dtype, jnp.inexact):
            return value
        if not self.is_held:
            return value.astype(self.compute_dtype)
        if not self.is_varied:
            return value
        if self.plan.sharded[PARAMS]:
            return value.astype(self.grad_dtype)
        return jnp.zeros(self.shard_shape, self.grad_dtype)  # only routes the gradient

    def loss_input(self, value: Any, varied: Any) -> Any:
        """The parameter as the engine takes it."""
        if not self.is_held:
            return varied
        return (varied,) if self.plan.sharded[PARAMS] else (value, varied)

    def reduced(self, grad: Any, wire: Wire) -> Any:
        """The gradient summed over the devices, where the loss did not do so itself."""
        if self.plan.size > 1 and not self.is_held:
            grad = grad.astype(self.compute_dtype)  # what accumulated wider travels as computed
            others = self.leaf.others(self.plan.axes)
            if self.leaf.dim is not None:
                grad = _collectives.scatter(grad, self.leaf.dim, wire, others)
            else:
                grad = _collectives.reduce(grad, wire, others)
        return grad.astype(self.grad_dtype)

    def no_gradient(self) -> Any:
        """Zeros in a dtype that optax can add; keys get JAX's own zero."""
        if jnp.issubdtype(self.leaf.dtype, jax.dtypes.extended):
            return np.zeros(self.leaf.shape, jax.dtypes.float0)
        return jnp.zeros(self.shard_shape, self.leaf.dtype)
