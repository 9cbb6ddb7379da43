"""One parameter of a step: how the loss receives it, and where its gradient goes."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from zerojax import _collectives, _compat
from zerojax._collectives import Held, Updating
from zerojax._engine.ir import WEIGHT, InputKind
from zerojax._engine.vary import Value
from zerojax._features.in_backward import LayerUpdate
from zerojax._plan import mesh as _mesh
from zerojax._plan.layout import LeafPlan
from zerojax._plan.placement import Axes, Placement, beyond
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision, promoted, wide
from zerojax._state.state import zero_gradient
from zerojax._types import PyTree
from zerojax._wire.routes import Cut, Route, Wire


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a step. The placements of its leaf decide all of it."""

    leaf: LeafPlan
    plan: Plan
    precision: Precision
    accumulates: bool
    update: LayerUpdate | None = None  # where backward updates it
    loops: bool = False  # whether loops over layers are differentiated by hand in any case

    @property
    def is_held(self) -> bool:
        """Whether the loss receives it as `Held`, and disposes of each gradient at once.

        Where full gradients are accumulated, they are reduced after the last microbatch. Where
        nothing is sharded, stacks of matrices are `Held` all the same: see the note in `Cut.fixed`.
        """
        if self.landing.dim is not None or self.update is not None or self.leaf.is_on_host:
            return True
        if self.loops and self.leaf.stacked:
            return True
        if self.accumulates or self.plan.groups.opt_state or self.plan.size == 1:
            return False
        return len(self.leaf.shape) > 2

    @property
    def landing(self) -> Placement:
        """The placement in which the loss leaves the gradient."""
        # One microbatch alone goes all the way to the shard that is updated, layer by layer, hidden
        # behind the layers before it. Of several, each goes no further than where they are summed.
        grad = self.leaf.grad if self.accumulates else None
        return self.leaf.update if grad is None else grad

    @property
    def is_varied(self) -> bool:
        """Whether it has a gradient."""
        return jnp.issubdtype(self.leaf.dtype, jnp.inexact) and not self.leaf.frozen

    @property
    def grad_dtype(self) -> DTypeLike:
        """The parameter's own dtype, as in JAX; a wider one only for wider master copies."""
        precision, own = self.precision, self.leaf.dtype
        if precision.master is None or not jnp.issubdtype(own, jnp.floating):
            return own
        wide = precision.master if self.accumulates else precision.sums
        return promoted(own, wide or own)

    @property
    def compute_dtype(self) -> DTypeLike:
        is_float = jnp.issubdtype(self.leaf.dtype, jnp.floating)
        return (is_float and self.precision.compute) or self.leaf.dtype

    @property
    def cut(self) -> Cut:
        """The sharding and the wire that the engine sees, where the parameter is `Held`."""
        # With microbatches, replicas wait for the last one: what crosses nodes crosses once.
        reduce = self.route((), self.landing.axes, () if self.accumulates else self.replicas)
        near, far = self.leaf.near.axes, () if self.accumulates else self.far
        # A weight that rests whole travels nowhere, and is used as it is.
        # What was brought near was decoded there, and the rest of its way is fast.
        travels = (near or far) and not self.is_brought_near
        codec = self.leaf.codec(self.precision.gather if travels else None, self.plan.mesh)
        devices = _mesh.axes_size(self.plan.mesh, (*near, *far))
        gather = Route(near, far, (), codec, self.leaf.rest.padding, devices=devices)
        return self.cut_by(Wire(gather, reduce))

    def cut_by(self, wire: Wire) -> Cut:
        update, rank = self.leaf.update, len(self.leaf.shape)
        others, path = update.others(rank), self.leaf.path
        return Cut(update.dim, rank, self.compute_dtype, wire, others=others, path=path)

    @property
    def far(self) -> Axes:
        """The axes that shard it between steps alone: a step all-gathers over these once."""
        return beyond(self.leaf.rest.axes, self.leaf.near.axes)

    @property
    def is_brought_near(self) -> bool:
        """Whether it crosses nodes once, before microbatches that share what arrives."""
        return self.accumulates and bool(self.far)

    def brought_near(self, value: Array, dtype: DTypeLike) -> Array:
        """Returns what microbatches gather from, in the dtype that they gather."""
        codec = self.leaf.codec(self.precision.gather, self.plan.mesh)
        cut = self.cut_by(Wire(Route(self.far, codec=codec)))
        return _collectives.gathered(_compat.fetched(value).astype(dtype), cut).astype(dtype)

    @property
    def is_own_source(self) -> bool:
        """Whether the loss gathers from the very shard that its gradient leaves through."""
        return self.leaf.rest == self.landing and not self.is_brought_near

    @property
    def replicas(self) -> Axes:
        """The axes of the batch over which devices update the same shard."""
        return beyond(self.plan.batch_axes, self.leaf.update.axes)

    def route(self, start: Axes, end: Axes, replicas: Axes) -> Route:
        """Returns the route that takes a gradient from shards over `start` to shards over `end`.

        Microbatches are summed where `leaf.grad` says: those axes come first, the others may wait.
        """
        near = self.leaf.grad.axes if self.leaf.grad else ()
        axes = beyond(end, start)
        far = beyond(axes, near)
        padding = self.leaf.update.padding if end and not start else 0
        codec = self.leaf.sum_codec(self.precision.reduce, self.plan.mesh, self.plan.batch_axes)
        devices = _mesh.axes_size(self.plan.mesh, axes)
        route = Route(beyond(axes, far), far, replicas, codec, padding, devices=devices)
        return route.coded_over(self.plan.slow(axes))

    def shard_shape(self, place: Placement) -> tuple[int, ...]:
        """Returns the shape of one device's part, as a `shard_map` over ZeRO's axes has it."""
        full = place.padded(self.leaf.shape)
        return NamedSharding(self.plan.mesh, place.local).shard_shape(full)

    def kind(self) -> InputKind:
        return self.cut if self.is_held else WEIGHT

    def varied(self, value: Array, state: Sequence[Array] = ()) -> PyTree:
        """Returns what the loss is differentiated by: the shard where there is one.

        Where backward updates the parameter: that, the state that is updated with it, and, in place
        of zeros, the sum of the squares of each layer's gradient.
        """
        if not jnp.issubdtype(self.leaf.dtype, jnp.inexact):
            return value
        if self.update is not None:
            return value, *state, jnp.zeros(len(value), wide(self.grad_dtype))
        if not self.is_held:
            return value.astype(self.compute_dtype)
        if not self.is_varied:
            return value
        # A shard is cast again as it is gathered; its gradient comes back in this dtype.
        return value.astype(self.grad_dtype) if self.is_own_source else self.unread

    @property
    def unread(self) -> Array:
        """What the gradient leaves through where the loss does not gather from it: see `Held`."""
        return jnp.zeros(self.shard_shape(self.landing), self.grad_dtype)

    def loss_input(
        self,
        value: Array,
        varied: PyTree,
        given: Sequence[Array],
        remaining: float,
        reached: set[str],
    ) -> Value:
        """Returns the parameter as the engine takes it.

        `given` is what its update reads, of a gradient that lacks the factor `remaining`; an update
        that backward does puts its path into `reached`.
        """
        if self.update is not None:
            apply = self.updating(self.update, remaining, reached)
            updating = Updating(varied, tuple(given), apply)
            return Held(self.unread, updating=updating)
        if not self.is_held:
            return varied
        return Held(varied) if self.is_own_source else Held(varied, rest=value)

    def updating(
        self, update: LayerUpdate, remaining: float, reached: set[str]
    ) -> Callable[[Array, list[Array], Sequence[Array]], list[Array]]:
        """Returns the update of a layer as the engine takes it: see `Updating`."""

        def apply(grad: Array, layers: list[Array], given: Sequence[Array]) -> list[Array]:
            reached.add(self.leaf.path)
            rest, *others, _ = layers
            grad = self.mean(grad[None], remaining)
            squares = jnp.sum(jnp.square(grad.astype(wide(grad.dtype))))
            # In one fusion with that sum, XLA would not write the new layers into their stacks.
            grad = lax.optimization_barrier(grad)
            with jax.named_scope("optimizer"):
                own = self.own_part(rest)
            new, *others = update.apply(grad, [own, *others], given)
            return [self.as_it_rests(new), *others, squares[None]]

        return apply

    def own_part(self, layer: Array) -> Array:
        """Returns the shard that this device updates of a layer as it rests."""
        place = self.leaf.update
        if self.leaf.rest.on_device == place or place.dim is None:
            return layer
        size = self.shard_shape(place)[place.dim]
        start = lax.axis_index(place.axes) * size
        return lax.dynamic_slice_in_dim(layer, start, size, place.dim)

    def as_it_rests(self, layer: Array) -> Array:
        """Returns an updated shard of a layer as it rests: gathered, where that is whole."""
        if self.leaf.rest.on_device == self.leaf.update:
            return layer
        cut = self.cut_by(Wire(gather=Route(self.leaf.update.axes)))
        return _collectives.gathered(layer, cut)

    def mean(self, grad: Array, remaining: float) -> Array:
        """Returns a gradient that lacks this factor."""
        if remaining == 1:
            return grad
        return (grad.astype(wide(grad.dtype)) * remaining).astype(grad.dtype)

    def reduced(self, grad: Array) -> Array:
        """Returns the gradient summed over the devices, as far as the loss did not do so itself."""
        # A parameter that is held was disposed of where the loss used it, layer by layer; what
        # microbatches need not send each time is left.
        left = self.route(self.landing.axes, self.leaf.update.axes, self.replicas)
        is_left = (self.accumulates or not self.is_held) and (left.near + left.far + left.replicas)
        if self.plan.size > 1 and is_left:
            # What is accumulated in a wider dtype is sent in the one it was computed in.
            narrow = grad.astype(self.compute_dtype)
            (grad,) = _collectives.reduced([narrow], [self.cut], [left])
        return grad.astype(self.grad_dtype)

    def no_gradient(self) -> Array | np.ndarray:
        """Returns zeros in a dtype that optax can add; keys get JAX's own zero."""
        shape = self.shard_shape(self.leaf.update)
        return zero_gradient(jax.ShapeDtypeStruct(shape, self.leaf.dtype))
