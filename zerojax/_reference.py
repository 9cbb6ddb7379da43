"""What one device makes of a step's inputs: loss, gradients, new state."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import _batch, _compare, _finite, _state
from zerojax._fields import split_fields, with_fields
from zerojax._plan import Plan
from zerojax._precision import promoted
from zerojax._program import precision_of
from zerojax._replay import Replayed, Split, on_one_device, replay
from zerojax._step import Recipe, grad_norm
from zerojax._update import apply_gradients


class Reference:
    """A recipe followed on one device, from a state and a batch gathered there."""

    def __init__(
        self, recipe: Recipe, plan: Plan, state: Any, args: Sequence[Any], device: Any
    ) -> None:
        self.recipe, self.plan, self.device = recipe, plan, device
        self.state = on_one_device(state, device)
        self.args = on_one_device(tuple(args), device)
        self.roles = _batch.roles(args)
        self.precision = precision_of(plan, recipe.options.precision)
        # Others have one device too, so that a loss may name them.
        sizes = {a: n if a in plan.axes else 1 for a, n in plan.mesh.shape.items()}
        self.split = Split(sizes, recipe.options.accumulate)
        self._update = jax.jit(self.updated)

    def updated(self, state: Any, grads: Any, fields: dict[str, Any]) -> Any:
        """What the step makes of these gradients: the user's update, and the loss scale's."""
        new_state = apply_gradients(state, grads, self.recipe.tx, fields)
        scale = _finite.scale_of(state)
        if scale is None:
            return new_state
        finite = jnp.isfinite(grad_norm(grads))
        new_state = _finite.held(finite, new_state, state, self.recipe.mutable)
        return _state.replace(new_state, dynamic_scale=_finite.next_scale(scale, finite))

    @property
    def has_keys(self) -> bool:
        return _batch.KEY in self.roles

    def replay(
        self, split: Split | None = None, args: Any = None, *, wide: bool = False, **options: Any
    ) -> Replayed:
        """The loss on every part. `wide`: in float32, whatever the step computes in."""
        compute, state = self.precision.compute, self.state
        if wide and self.computes_narrow:
            compute = jnp.float32
        loss_fn = with_fields(self.recipe.loss_fn, state, self.recipe.mutable)
        replayed = replay(
            loss_fn, _state.get_params(state), self.args if args is None else args,
            self.split if split is None else split, compute=compute, **options,
        )  # fmt: skip
        return dataclasses.replace(replayed, grads=self.without_frozen(replayed.grads))

    def without_frozen(self, grads: Any) -> Any:
        """The gradients as a step has them: none of what nothing updates."""
        leaves, treedef = jax.tree.flatten(grads)
        pairs = zip(leaves, self.plan.params, strict=False)  # none where not differentiated
        return treedef.unflatten([jnp.zeros_like(g) if p.frozen else g for g, p in pairs])

    @property
    def computes_narrow(self) -> bool:
        dtypes = [self.precision.compute, *(p.dtype for p in self.plan.params)]
        floats = [d for d in dtypes if d is not None and jnp.issubdtype(d, jnp.floating)]
        return any(jnp.finfo(d).bits < 32 for d in floats)

    def tolerance(self, replayed: Replayed) -> float:
        """For all that a step rounds: in the loss, on the way between devices, and to the dtypes
        of the parameters, in which their gradients come."""
        reduce = [self.precision.reduce] if self.precision.reduce is not None else []
        params = [p.dtype for p in self.plan.params if jnp.issubdtype(p.dtype, jnp.floating)]
        return _compare.tolerance_for([replayed.dtype, *reduce, *params], self.device.platform)

    def new_state(self, replayed: Replayed) -> Any:
        """The state after the update, by the user's own optimizer."""
        return self.update(replayed.grads, self.fields(replayed))

    def fields(self, replayed: Replayed) -> dict[str, Any]:
        if not self.recipe.mutable:
            return {}
        return split_fields(averaged(replayed.aux), self.state, self.recipe.mutable)[1]

    def update(self, grads: Any, fields: dict[str, Any]) -> Any:
        return self.update_of(self.state, grads, fields)

    def update_of(self, state: Any, grads: Any, fields: dict[str, Any]) -> Any:
        """The same, of any state: of the shards of one device, say."""
        params = _state.get_params(state)
        grads = jax.tree.map(lambda g, p: g if _is_key(p) else g.astype(p.dtype), grads, params)
        return self._update(state, grads, fields)

    def part_args(self, parts: Sequence[int], ways: int) -> Any:
        """The arguments with these parts of `ways` put together as the batch."""
        values, treedef = jax.tree.flatten(self.args)

        def taken(value: Any, role: str) -> Any:
            if role != _batch.BATCH:
                return value
            rows = value.shape[0] // ways
            return jnp.concatenate([value[i * rows : (i + 1) * rows] for i in parts])

        return treedef.unflatten(map(taken, values, self.roles))


def averaged(aux: Any) -> Any:
    """The mean over the parts; integers as floats."""

    def mean(leaf: Any) -> Any:
        return jnp.mean(leaf, axis=0, dtype=promoted(leaf.dtype, jnp.float32))

    return jax.tree.map(mean, aux)


def aux_like(aux: Any, like: Any) -> Any:
    """The aux of all parts as a step gives it back: averaged, or put together row by row."""

    def joined(stacked: Any, mean: Any, value: Any) -> Any:
        rows = stacked.reshape(-1, *stacked.shape[2:]) if stacked.ndim > 1 else mean
        fits = rows.shape == np.shape(value) != mean.shape
        return rows if fits else mean

    return jax.tree.map(joined, aux, averaged(aux), like)


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.extended)
