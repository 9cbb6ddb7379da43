"""What one device makes of a step's inputs: loss, gradients, new state."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._loss import batch as _batch
from zerojax._loss.fields import has_no_mean, split_fields, with_fields
from zerojax._plan.optimizer import apply_gradients
from zerojax._plan.plan import Plan
from zerojax._plan.precision import wide
from zerojax._state import state as _state
from zerojax._step import finite as _finite
from zerojax._step.program import precision_of
from zerojax._step.step import Recipe, grad_norm
from zerojax._verify import compare as _compare
from zerojax._verify.replay import Replayed, Split, on_one_device, replay


class Reference:
    """A recipe followed on one device, from a state and a batch gathered there."""

    def __init__(
        self, recipe: Recipe, plan: Plan, state: Any, args: Sequence[Any], device: Any
    ) -> None:
        self.recipe, self.plan, self.device = recipe, plan, device
        self.state = on_one_device(state, device)
        self.args = on_one_device(tuple(args), device)
        self.roles = _batch.roles(args, recipe.options.batch_specs, plan.axes)
        self.precision = precision_of(plan, recipe.options.precision)
        # Others have one device too, so that a loss may name them.
        sizes = {a: n if a in plan.axes else 1 for a, n in plan.mesh.shape.items()}
        self.split = Split(sizes, recipe.options.accumulate)
        self._update = jax.jit(self.updated)

    def updated(self, state: Any, grads: Any, fields: dict[str, Any], loss_is_finite: Any) -> Any:
        """What the step makes of these gradients: the user's update, and the loss scale's."""
        new_state = apply_gradients(state, grads, self.recipe.tx, fields)
        if not self.may_skip:
            return new_state
        finite = loss_is_finite & jnp.isfinite(grad_norm(grads))
        new_state = _finite.held(finite, new_state, state, self.recipe.mutable)
        new_state = _finite.counted(new_state, 1 - finite.astype(jnp.int32))
        scale = _finite.scale_of(state)
        if scale is None:
            return new_state
        return _state.replace(new_state, dynamic_scale=_finite.next_scale(scale, finite))

    @property
    def may_skip(self) -> bool:
        """Whether the step leaves out updates that are not finite."""
        return self.recipe.skip_nonfinite or _finite.scale_of(self.state) is not None

    def skips(self, replayed: Replayed) -> bool:
        norm = grad_norm(replayed.grads)
        return self.may_skip and not (np.isfinite(replayed.loss) and np.isfinite(norm))

    @property
    def axis_name(self) -> str:
        """As a loss names it in its collectives."""
        axes = self.plan.axes
        return repr(axes[0] if len(axes) == 1 else axes)

    @property
    def has_keys(self) -> bool:
        return any(role.kind == _batch.KEY for role in self.roles)

    def replay(
        self,
        split: Split | None = None,
        args: Any = None,
        *,
        in_float32: bool = False,
        **options: Any,
    ) -> Replayed:
        """The loss on every part, in what the step computes in or at least in float32."""
        compute, state = self.precision.compute, self.state
        if in_float32 and self.computes_narrow:
            compute = jnp.float32
        loss_fn = with_fields(self.recipe.loss_fn, state, self.recipe.mutable)
        replayed = replay(
            loss_fn,
            _state.get_params(state),
            self.args if args is None else args,
            self.split if split is None else split,
            compute=compute,
            **{"mutable": self.recipe.mutable, "roles": self.roles} | options,
        )
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
        return self.update(replayed.grads, replayed)

    def fields(self, replayed: Replayed) -> dict[str, Any]:
        if not self.recipe.mutable:
            return {}
        return split_fields(
            averaged(replayed.aux, self.recipe.mutable), self.state, self.recipe.mutable
        )[1]

    def update(self, grads: Any, right: Replayed) -> Any:
        """The state after the update by other gradients; the rest as in `right`."""
        return self.update_of(self.state, grads, right)

    def update_of(self, state: Any, grads: Any, right: Replayed) -> Any:
        """The same, of any state: of the shards of one device, say."""
        params = _state.get_params(state)
        grads = jax.tree.map(lambda g, p: g if _is_key(p) else g.astype(p.dtype), grads, params)
        return self._update(state, grads, self.fields(right), np.isfinite(right.loss))

    def part_args(self, parts: Sequence[int], ways: int) -> Any:
        """The arguments with these parts of `ways` put together as the batch."""
        values, treedef = jax.tree.flatten(self.args)

        def taken(value: Any, role: _batch.Role) -> Any:
            if role.kind != _batch.BATCH:
                return value
            cut = _batch.split(value, role.dim, ways)
            return jnp.concatenate([cut[i] for i in parts], axis=role.dim)

        return treedef.unflatten(map(taken, values, self.roles))


def averaged(aux: Any, mutable: Sequence[str] = ()) -> Any:
    """The mean over the parts, or the first one's where a field has none; integers as floats."""

    def mean(path: tuple, leaf: Any) -> Any:
        if has_no_mean(path, leaf, mutable):
            return leaf[0]
        return jnp.mean(leaf, axis=0, dtype=wide(leaf.dtype))

    return jax.tree_util.tree_map_with_path(mean, aux)


def aux_like(aux: Any, like: Any) -> Any:
    """The aux of all parts as a step gives it back: averaged, or put together row by row."""

    def joined(stacked: Any, mean: Any, value: Any) -> Any:
        rows = stacked.reshape(-1, *stacked.shape[2:]) if stacked.ndim > 1 else mean
        fits = rows.shape == np.shape(value) != mean.shape
        return rows if fits else mean

    return jax.tree.map(joined, aux, averaged(aux), like)


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.extended)
