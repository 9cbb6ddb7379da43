"""The result of a step's inputs on one device, and the step's own, to be compared with it."""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax._loss import batch as _batch
from zerojax._loss.fields import has_no_mean, split_fields, with_fields
from zerojax._plan.optimizer import apply_gradients
from zerojax._plan.padding import on_host
from zerojax._plan.plan import Plan
from zerojax._plan.precision import wide
from zerojax._state import state as _state
from zerojax._step import finite as _finite
from zerojax._step.step import Recipe, grad_norm
from zerojax._step.step_options import precision_of
from zerojax._types import Device, PyTree, is_key
from zerojax._wire.codecs import Quantized, each_of
from zerojax.tools._verify import compare as _compare, draws as _draws, replay as _replay
from zerojax.tools._verify.compare import Check
from zerojax.tools._verify.replay import BatchSplit, Replayed, on_one_device

# How far gradients may be off, relative to their largest element, where weights or they themselves
# travel as codes: in units of the codes' noise.
WEIGHTS_NOISE, GRADIENTS_NOISE = 10, 4


class Reference:
    """A recipe followed on one device, from a state and a batch gathered there."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        state: PyTree,
        args: Sequence[PyTree],
        *,
        device: Device | None = None,
    ) -> None:
        self.recipe, self.plan = recipe, plan
        self.device = plan.mesh.devices.flat[0] if device is None else device
        self.roles = _batch.roles(args, recipe.options.batch_specs, plan.batch_axes)
        _batch.check(args, self.roles, plan.size, recipe.options.accumulate)
        _replay.check_fits(plan, self.device)
        self.state = on_one_device(on_host(state, plan), self.device)
        self.args = on_one_device(tuple(args), self.device)
        self.precision = precision_of(plan, recipe.options.precision)
        # Axes of the user's own have size 1 here, so that a loss may name them.
        sizes = {a: n if a in plan.batch_axes else 1 for a, n in plan.mesh.shape.items()}
        sizes |= dict.fromkeys(sorted(plan.absent), 1)
        self.split = BatchSplit(sizes, recipe.options.accumulate)
        self._update = jax.jit(self.updated)

    def updated(
        self, state: PyTree, grads: PyTree, fields: dict[str, PyTree], loss_is_finite: jax.Array
    ) -> PyTree:
        """Returns what the step makes of gradients: the user's update, and the loss scale's."""
        new_state = apply_gradients(state, grads, self.recipe.tx, fields)
        if not self.may_skip:
            return new_state
        finite = loss_is_finite & jnp.isfinite(grad_norm(grads))
        return _finite.guarded(finite, new_state, state, self.recipe.mutable)

    @property
    def may_skip(self) -> bool:
        """Whether the step skips updates that are not finite."""
        return self.recipe.skip_nonfinite or _finite.scale_of(self.state) is not None

    def skips(self, replayed: Replayed) -> bool:
        norm = grad_norm(replayed.grads)
        return self.may_skip and not (np.isfinite(replayed.loss) and np.isfinite(norm))

    @property
    def axis_name(self) -> str:
        """The ZeRO axes as a loss names them in its collectives."""
        axes = self.plan.batch_axes
        return repr(axes[0] if len(axes) == 1 else axes)

    @property
    def has_keys(self) -> bool:
        return any(role.kind == _batch.KEY for role in self.roles)

    def with_draws_alike(self) -> "Reference":
        """Returns the same with keys from which every draw is the same number, on any part.

        Those of the streams that a nnx model holds too: the step folds them by an argument.
        """
        other = copy.copy(self)
        values, treedef = jax.tree.flatten(self.args)
        keys = [role.kind == _batch.KEY for role in self.roles]
        other.args = treedef.unflatten(
            [_draws.alike(v) if k else v for v, k in zip(values, keys, strict=True)]
        )
        if hasattr(self.state, "with_streams"):
            other.state = self.state.with_streams(_draws.alike)
        return other

    def replay(
        self,
        split: BatchSplit | None = None,
        args: PyTree = None,
        *,
        roles: Sequence[_batch.Role] | None = None,
        in_float32: bool = False,
        differentiate: bool = True,
        fold: bool = True,
    ) -> Replayed:
        """Evaluates the loss on every part, in the step's dtype or at least in float32.

        As in a step, gradients of frozen parameters are zeros.
        """
        compute = self.precision.compute
        if in_float32 and self.computes_narrow:
            compute = jnp.float32
        replayed = _replay.evaluate(
            with_fields(self.recipe.loss_fn, self.state, self.recipe.mutable),
            _state.get_params(self.state),
            self.args if args is None else args,
            self.split if split is None else split,
            compute=compute,
            differentiate=differentiate,
            fold=fold,
            mutable=self.recipe.mutable,
            roles=self.roles if roles is None else roles,
        )
        if not differentiate:
            return replayed
        leaves, treedef = jax.tree.flatten(replayed.grads)
        pairs = zip(leaves, self.plan.params, strict=True)
        grads = treedef.unflatten([jnp.zeros_like(g) if p.frozen else g for g, p in pairs])
        return dataclasses.replace(replayed, grads=grads)

    @property
    def computes_narrow(self) -> bool:
        dtypes = [self.precision.compute, *(p.dtype for p in self.plan.params)]
        floats = [d for d in dtypes if d is not None and jnp.issubdtype(d, jnp.floating)]
        return any(jnp.finfo(d).bits < 32 for d in floats)

    def tolerance(self, replayed: Replayed) -> float:
        """Returns the tolerance for a step, which rounds in its loss, in reductions over the
        devices, and to the dtypes of the parameters, which their gradients have."""
        given = (self.precision.gather, WEIGHTS_NOISE), (self.precision.reduce, GRADIENTS_NOISE)
        ways = [(way, factor) for ways, factor in given for way in each_of(ways)]
        noise = [factor * way.noise for way, factor in ways if isinstance(way, Quantized)]
        sent = [way for way, _ in ways if way is not None and not isinstance(way, Quantized)]
        params = [p.dtype for p in self.plan.params if jnp.issubdtype(p.dtype, jnp.floating)]
        dtypes = [replayed.dtype, *sent, *params]
        return max([_compare.tolerance_for(dtypes, self.device.platform), *noise])

    def update(self, grads: PyTree, right: Replayed, state: PyTree = None) -> PyTree:
        """Returns the state, or another one, after an update by `grads`, with `right`'s fields."""
        state = self.state if state is None else state
        params = _state.get_params(state)
        typed = jax.tree.map(lambda g, p: g if is_key(p) else g.astype(p.dtype), grads, params)
        names = self.recipe.mutable
        fields = split_fields(averaged(right.aux, names), state, names)[1] if names else {}
        return self._update(state, typed, fields, np.isfinite(right.loss))

    def repeated(self, part: int) -> PyTree:
        """Returns the arguments with one part of the batch in place of every part."""
        values, treedef = jax.tree.flatten(self.args)
        ways = self.split.ways

        def taken(value: jax.Array, role: _batch.Role) -> jax.Array:
            if role.kind != _batch.BATCH:
                return value
            return jnp.concatenate([_batch.split(value, role.dim, ways)[part]] * ways, role.dim)

        return treedef.unflatten(map(taken, values, self.roles))


class Observed(NamedTuple):
    """The results of a step, with its gradients where these are known."""

    state: PyTree
    metrics: dict[str, PyTree]
    grads: PyTree
    by_hand: bool  # not from `train_step`

    @property
    def loss(self) -> PyTree:
        return self.metrics.get("loss")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of a step beside the right ones: the replay of the parts on one device."""

    reference: Reference
    right: Replayed
    observed: Observed
    tolerance: float

    @functools.cached_property
    def limits(self) -> PyTree:
        """The distance from the right gradients that rounding explains, for each leaf."""
        return _compare.gradient_limits(self.right.grads, self.tolerance)

    @functools.cached_property
    def wanted(self) -> tuple[PyTree, list[np.ndarray]]:
        """The right new state, and how far rounding may put each of its elements from it."""
        return self.led_to(self.right.grads, self.limits)

    def led_to(self, grads: PyTree, limits: PyTree) -> tuple[PyTree, list[np.ndarray]]:
        """Returns the new state that these gradients lead to, and how far rounding moves it."""
        update = functools.partial(self.reference.update, right=self.right)
        new = update(grads)
        seen = grads if self.observed.grads is None else self.observed.grads
        return new, _compare.spread(update, new, grads, limits, seen)

    def state_checks(self, new: PyTree, spreads: Sequence[np.ndarray]) -> Iterator[Check]:
        """Compares the step's new state with another one."""
        return _compare.compare_states(
            _state.leaves_of(self.observed.state),
            jax.tree.leaves(self.reference.state),
            _state.leaves_of(new),
            spreads,
            self.tolerance,
            [leaf.padded_shape for leaf in self.reference.plan.leaves],
        )

    def padding_checks(self) -> Iterator[Check]:
        """Checks that the padding of the new state is zero."""
        padded = {leaf.path: leaf for leaf in self.reference.plan.leaves if leaf.rest.padding}
        for leaf in _state.leaves_of(self.observed.state):
            planned = padded.get(leaf.name)
            if planned is not None and np.shape(leaf.value) == planned.padded_shape:
                yield _compare.compare_padding(leaf, planned.shape)

    def gradient_checks(self, grads: PyTree, limits: PyTree) -> Iterator[Check]:
        """Compares the step's gradients, where they are known, with others."""
        if self.observed.grads is None:
            return iter(())
        rests = [leaf.update.padded(leaf.shape) for leaf in self.reference.plan.params]
        return _compare.compare_trees(
            "grads", "gradient", self.observed.grads, grads, limits, rests
        )


def averaged(aux: PyTree, mutable: Sequence[str] = ()) -> PyTree:
    """Returns the mean over the parts, or the first part's value of a field that has no mean."""

    def mean(path: tuple, leaf: jax.Array) -> jax.Array:
        if has_no_mean(path, leaf, mutable):
            return leaf[0]
        return jnp.mean(leaf, axis=0, dtype=wide(leaf.dtype))  # floats, of integers too

    return jax.tree_util.tree_map_with_path(mean, aux)


def aux_like(aux: PyTree, like: PyTree) -> PyTree:
    """Returns the aux of all parts as a step does: averaged, or put together row by row."""

    def joined(stacked: jax.Array, mean: jax.Array, value: jax.Array) -> jax.Array:
        rows = stacked.reshape(-1, *stacked.shape[2:]) if stacked.ndim > 1 else mean
        fits = rows.shape == np.shape(value) != mean.shape
        return rows if fits else mean

    return jax.tree.map(joined, aux, averaged(aux), like)
