"""One parameter of a step with options: precision, microbatches, updates in backward."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._features.in_backward import LayerUpdate
from zerojax._kernel import travel as _travel
from zerojax._kernel.arrays import Value
from zerojax._kernel.device import Param
from zerojax._kernel.places import LeafPlan, Placement
from zerojax._kernel.travel import Codec, Held, Route, Updating
from zerojax._plan.encodings import as_float
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision
from zerojax._specs import Axes, slow
from zerojax._types import PyTree, wide
from zerojax._wire.codecs import codec_of, sum_codec_of, way_of


def codecs_of(leaf: LeafPlan, precision: Precision, plan: Plan) -> tuple[Codec, Codec]:
    """Returns the codecs in which a weight is gathered, and its gradient reduced."""
    summed = sum_codec_of(leaf, precision.reduce, plan.mesh, plan.batch_axes)
    return codec_of(leaf, precision.gather, plan.mesh), summed


def as_of(path: str, precision: Precision) -> Precision:
    """Returns the precision with the rules for this path, for parameters at any path."""
    gather, reduce = (way_of(path, ways) for ways in (precision.gather, precision.reduce))
    return dataclasses.replace(precision, gather=gather, reduce=reduce)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParam(Param):
    """One parameter, with the options of a step."""

    precision: Precision
    accumulates: bool  # over microbatches that run one after another
    update: LayerUpdate | None = None  # that backward applies
    loops: bool = False  # whether the engine differentiates loops over layers in any case
    copied: bool = False  # whether the step copies it, in the dtype in which it travels

    @classmethod
    def of(cls, leaf: LeafPlan, plan: Plan, precision: Precision, **others: Any) -> "StepParam":
        return cls(leaf, plan.mesh, plan.batch_axes, plan.groups, precision=precision, **others)

    @property
    def is_held(self) -> bool:
        """Whether the loss receives it as `Held`, and disposes of each gradient at once.

        Where full gradients are accumulated, they are reduced after the last microbatch.
        """
        if self.update is not None or self.leaf.is_on_host or (self.loops and self.leaf.stacked):
            return True
        return super().is_held and (self.landing.dim is not None or not self.accumulates)

    @property
    def landing(self) -> Placement:
        """The placement in which the loss leaves the gradient."""
        # The gradient of a single microbatch goes all the way to the shard that is updated, layer
        # by layer, and hides behind the layers before. Those of several go only to where they are
        # summed.
        grad = self.leaf.grad if self.accumulates else None
        return super().landing if grad is None else grad

    @property
    def is_own_source(self) -> bool:
        return super().is_own_source and not (self.is_brought_near or self.copied)

    @property
    def compute_dtype(self) -> DTypeLike:
        is_float = jnp.issubdtype(self.leaf.dtype, jnp.floating)
        return (is_float and self.precision.compute) or self.leaf.dtype

    @property
    def grad_dtype(self) -> DTypeLike:
        """The parameter's own dtype, as in JAX; a wider one only for wider master copies."""
        precision, own = self.precision, self.leaf.dtype
        if precision.master is None or not jnp.issubdtype(own, jnp.floating):
            return own
        wide = precision.master_dtype if self.accumulates else precision.sums
        return jnp.promote_types(own, wide or own)

    @property
    def gather_codec(self) -> Codec:
        # A weight that rests whole does not travel. One that was brought near was decoded there,
        # and the rest of its way is fast.
        travels = self.leaf.rest.axes and not self.is_brought_near
        return codec_of(self.leaf, self.precision.gather if travels else None, self.mesh)

    @property
    def reduce_codec(self) -> Codec:
        return sum_codec_of(self.leaf, self.precision.reduce, self.mesh, self.batch_axes)

    @property
    def crosses(self) -> Axes:
        return () if self.accumulates else self.far

    @property
    def sums_over(self) -> Axes:
        # Replicas wait for the last microbatch, so that each gradient crosses nodes once.
        return () if self.accumulates else self.replicas

    def route(self, start: Axes, end: Axes, replicas: Axes) -> Route:
        route = super().route(start, end, replicas)
        return route.coded_over(slow(route.axes, self.batch_axes))

    @property
    def is_brought_near(self) -> bool:
        """Whether it crosses nodes once, before the microbatches, which share what arrives."""
        return self.accumulates and bool(self.far)

    def brought_near(self, value: Array, dtype: DTypeLike) -> Array:
        """Returns what microbatches gather from, in the dtype that they gather."""
        codec = codec_of(self.leaf, self.precision.gather, self.mesh)
        cut = self.leaf.cut(Route(self.far, codec=codec), dtype=self.compute_dtype)
        return _travel.gathered(_compat.fetched(value).astype(dtype), cut).astype(dtype)

    def reduced(self, grad: Array) -> Array:
        if self.is_held and not self.accumulates:
            return grad.astype(self.grad_dtype)
        # The part of the way that microbatches need not send each time.
        return self.sent(grad, self.route(self.landing.axes, self.leaf.update.axes, self.replicas))

    # -- where backward updates it

    def stacks(self, value: Array, state: Sequence[Array]) -> PyTree:
        """Returns what the loss is differentiated by: the parameter, the state that is updated with
        it, zeros in place of sums over each layer's gradient, first that of the squares, and stacks
        for the old state."""
        assert self.update is not None
        count, sums = len(self.update.stacks) - 1, self.update.sums
        zeros = [jnp.zeros(len(value), wide(self.grad_dtype))] * (1 + len(sums))
        state = list(map(as_float, state))
        return value, *state[:count], *zeros, *state[count:]

    def taken_apart(self, stacks: Sequence[Array]) -> tuple[list[Array], Array, list[Array]]:
        """Returns the new ones of these stacks, the sum of squares and the other sums."""
        assert self.update is not None
        count, sums = len(self.update.stacks), len(self.update.sums)
        squares, *others = map(jnp.sum, stacks[count : count + 1 + sums])
        return [*stacks[:count], *stacks[count + 1 + sums :]], squares, others

    def updated_input(
        self,
        stacks: PyTree,
        given: Sequence[Array],
        old: Sequence[Array | None],
        remaining: float,
        reached: set[str],
    ) -> Value:
        """Returns the parameter as the engine takes it.

        Its update reads `given`, multiplies the gradient by `remaining`, and notes in `reached`
        that backward came to it. See `Updating` for `old`.
        """
        update = self.update
        assert update is not None

        def apply(grad: Array, layers: list[Array], given: Sequence[Array]) -> list[Array]:
            reached.add(self.leaf.path)
            rest, *others = layers[: len(update.stacks)]
            grad = self.mean(grad[None], remaining)
            squares = jnp.sum(jnp.square(grad.astype(wide(grad.dtype))))
            # In one fusion with a sum, XLA would not write the new layers into their stacks.
            summed, grad = grad, lax.optimization_barrier(grad)
            with jax.named_scope("optimizer"):
                others = [self.own_part(rest), *others]
            kept = [layer for was, layer in zip(old, others, strict=False) if was is None]
            sums = update.added(summed, others, given)
            new, *others = update.apply(grad, others, given)
            if self.leaf.rest.on_device != self.leaf.update:  # it rests whole
                cut = self.leaf.cut(Route(self.leaf.update.axes), dtype=self.compute_dtype)
                new = _travel.gathered(new, cut)
            return [new, *others, squares[None], *(each[None] for each in sums), *kept]

        read = (*old, *[None] * (1 + len(update.sums))) if old else ()
        return Held(self.unread, updating=Updating(stacks, tuple(given), apply, read))

    def own_part(self, layer: Array) -> Array:
        """Returns the shard that this device updates of a layer as it rests."""
        place = self.leaf.update
        if self.leaf.rest.on_device == place or place.dim is None:
            return layer
        size = self.shard_shape(place)[place.dim]
        start = lax.axis_index(place.axes) * size
        return lax.dynamic_slice_in_dim(layer, start, size, place.dim)
