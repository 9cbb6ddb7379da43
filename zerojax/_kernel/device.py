"""A step in its plainest form: the loss and its gradients on each device, the update on shards.

`Param` says how one parameter takes part, `DeviceStep` is the code of one device, and `rested` ends
a step. An option that changes a parameter or a device overrides one property or method: see
`_step/parameter.py` and `_step/program.py`.
"""

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._kernel import travel as _travel
from zerojax._kernel.arrays import Value
from zerojax._kernel.body import How
from zerojax._kernel.engine import SplitLoss
from zerojax._kernel.pieces import WEIGHT, InputKind
from zerojax._kernel.places import Groups, LeafPlan, Placement
from zerojax._kernel.travel import EXACT, Codec, Cut, Held, Route
from zerojax._specs import Axes, axes_size, beyond
from zerojax._types import PyTree, wide, zero_gradient

# -- one parameter


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of a step. The placements of its leaf decide everything."""

    leaf: LeafPlan
    mesh: Mesh
    batch_axes: Axes
    groups: Groups

    @property
    def is_varied(self) -> bool:
        """Whether it has a gradient."""
        return jnp.issubdtype(self.leaf.dtype, jnp.inexact) and not self.leaf.frozen

    @property
    def is_held(self) -> bool:
        """Whether the loss receives it as `Held`, and reduces its gradient where it uses it.

        If nothing is sharded, stacks of matrices are `Held` all the same, so that a loop reduces
        each layer's gradient as it goes: see the note in `Cut.fixed`.
        """
        if self.landing.dim is not None:
            return True
        is_alone = axes_size(self.mesh, self.batch_axes) == 1
        return not (self.groups.opt_state or is_alone) and len(self.leaf.shape) > 2

    @property
    def landing(self) -> Placement:
        """The placement in which the loss leaves the gradient: that of the update."""
        return self.leaf.update

    @property
    def is_own_source(self) -> bool:
        """Whether the loss gathers from the same shard through which the gradient leaves."""
        return self.leaf.rest == self.landing

    @property
    def compute_dtype(self) -> DTypeLike:
        return self.leaf.dtype

    @property
    def grad_dtype(self) -> DTypeLike:
        return self.leaf.dtype

    # -- how it travels

    @property
    def cut(self) -> Cut:
        """How the engine sees it, if it is `Held`."""
        near, padding = self.leaf.near.axes, self.leaf.rest.padding
        gather = Route(near, self.crosses, (), self.gather_codec, padding)
        reduce = self.route((), self.landing.axes, self.sums_over)
        return self.leaf.cut(gather, reduce, self.compute_dtype)

    @property
    def far(self) -> Axes:
        """The axes that shard it only between steps."""
        return beyond(self.leaf.rest.axes, self.leaf.near.axes)

    @property
    def crosses(self) -> Axes:
        """The axes that each gather crosses first."""
        return self.far

    @property
    def sums_over(self) -> Axes:
        """The replicas over which the loss sums its gradient."""
        return self.replicas

    @property
    def gather_codec(self) -> Codec:
        return EXACT

    @property
    def reduce_codec(self) -> Codec:
        return EXACT

    @property
    def replicas(self) -> Axes:
        """The axes of the batch over which devices update the same shard."""
        return beyond(self.batch_axes, self.leaf.update.axes)

    def route(self, start: Axes, end: Axes, replicas: Axes) -> Route:
        """Returns the route that takes a gradient from shards over `start` to shards over `end`.

        The near hop ends at `leaf.grad`, where a step sums gradients; the far hop may wait.
        """
        summed_over = self.leaf.grad.axes if self.leaf.grad else ()
        axes = beyond(end, start)
        far = beyond(axes, summed_over)
        padding = self.leaf.update.padding if end and not start else 0
        return Route(beyond(axes, far), far, replicas, self.reduce_codec, padding)

    def shard_shape(self, place: Placement) -> tuple[int, ...]:
        """Returns the shape of one device's part in a `shard_map` over ZeRO's axes."""
        full = place.padded(self.leaf.shape)
        return NamedSharding(self.mesh, place.local).shard_shape(full)

    # -- how the loss receives it, and what becomes of its gradient

    def kind(self) -> InputKind:
        return self.cut if self.is_held else WEIGHT

    def varied(self, value: Array) -> PyTree:
        """Returns the value to differentiate the loss by: the shard, if there is one."""
        if not jnp.issubdtype(self.leaf.dtype, jnp.inexact):
            return value
        if not self.is_held:
            return value.astype(self.compute_dtype)
        if not self.is_varied:
            return value
        # The gather casts a shard again; its gradient comes back in this dtype.
        return value.astype(self.grad_dtype) if self.is_own_source else self.unread

    @property
    def unread(self) -> Array:
        """The shard through which the gradient leaves if the loss gathers from elsewhere: see
        `Held`."""
        return jnp.zeros(self.shard_shape(self.landing), self.grad_dtype)

    def loss_input(self, value: Array, varied: PyTree) -> Value:
        """Returns the parameter as the engine takes it."""
        if not self.is_held:
            return varied
        return Held(varied) if self.is_own_source else Held(varied, rest=value)

    def reduced(self, grad: Array) -> Array:
        """Returns the gradient summed over the devices, if the loss has not summed it itself."""
        if self.is_held:
            return grad
        return self.sent(grad, self.route(self.landing.axes, self.leaf.update.axes, self.replicas))

    def sent(self, grad: Array, route: Route) -> Array:
        """Returns a gradient after a route, if it leads anywhere."""
        if axes_size(self.mesh, self.batch_axes) > 1 and (route.axes + route.replicas):
            # A gradient that was summed in a wider dtype travels in the one it was computed in.
            (grad,) = _travel.reduced([grad.astype(self.compute_dtype)], [self.cut], [route])
        return grad.astype(self.grad_dtype)

    def mean(self, grad: Array, remaining: float) -> Array:
        """Returns a gradient that lacks this factor."""
        if remaining == 1:
            return grad
        return (grad.astype(wide(grad.dtype)) * remaining).astype(grad.dtype)

    def no_gradient(self) -> Array | np.ndarray:
        """Returns zeros in a dtype that optax can add, or JAX's own zero for keys."""
        shape = self.shard_shape(self.leaf.update)
        return zero_gradient(jax.ShapeDtypeStruct(shape, self.leaf.dtype))


# -- one device

P = TypeVar("P", bound=Param)


class DeviceStep(Generic[P]):
    """The loss and its gradients as code of one device, to run under `shard_map`.

    `jaxpr` is the loss of one device's rows. Its inputs are the parameters, and then the batch.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        params: Sequence[P],
        mesh: Mesh,
        axes: Axes,
        how: How,
    ) -> None:
        self.jaxpr, self.params, self.how = jaxpr, list(params), how
        self.mesh, self.axes, self.size = mesh, axes, axes_size(mesh, axes)
        self.split = self.split_by(self.params)

    def split_by(self, params: Sequence[P]) -> SplitLoss:
        others = [None] * (len(self.jaxpr.invars) - len(params))
        return SplitLoss(self.jaxpr, [*(p.kind() for p in params), *others])

    def in_specs(self) -> tuple[list, ...]:
        args = len(self.jaxpr.invars) - len(self.params)
        return [p.leaf.rest.local for p in self.params], [PartitionSpec(self.axes)] * args

    def out_specs(self) -> tuple:
        return PartitionSpec(), [p.leaf.update.local for p in self.params]

    def on_all_devices(self) -> Callable[..., tuple]:
        """Returns the program of all devices together."""
        # Only ZeRO's axes are manual: over axes of the user's own, XLA shards the loss as it likes.
        # JAX must not track values that vary over the devices (vma): it would sum gradients again.
        return jax.shard_map(
            self,
            mesh=self.mesh,
            in_specs=self.in_specs(),
            out_specs=self.out_specs(),
            axis_names=set(self.axes),
            check_vma=False,
        )

    def __call__(self, values: list[Array], args: list[Array]) -> tuple:
        """Returns the loss and the gradients, means over the devices."""
        share, remaining = exact_share(self.size)
        varied = [p.varied(value) for p, value in zip(self.params, values, strict=True)]

        def scaled_loss(floats: list[PyTree]) -> tuple[Array, Array]:
            inputs = self.with_floats(varied, floats)
            inputs = [p.loss_input(*x) for p, *x in zip(self.params, values, inputs, strict=True)]
            (loss,) = self.run([*inputs, *args])
            return loss * share, loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(self.floats(varied))
        means = [
            p.mean(p.reduced(grad), remaining) if p.is_varied else p.no_gradient()
            for p, grad in zip(self.params, self.with_floats(varied, grads), strict=True)
        ]
        return self.device_mean(loss), means

    def run(self, inputs: list) -> list[Array]:
        """Returns the outputs of the loss, whose weights come from `loss_input`."""
        if any(p.is_held for p in self.params):
            return self.split(inputs, self.how)
        return _compat.run_jaxpr(self.jaxpr, inputs)

    def floats(self, varied: Sequence[PyTree]) -> list[PyTree]:
        """Returns the values to differentiate by, without integers, keys and frozen parameters."""
        return [v for p, v in zip(self.params, varied, strict=True) if p.is_varied]

    def with_floats(self, varied: Sequence[PyTree], floats: Sequence[PyTree]) -> list[PyTree]:
        """Returns one value for each parameter, from `floats` if it is differentiated."""
        each = iter(floats)
        return [next(each) if p.is_varied else v for p, v in zip(self.params, varied, strict=True)]

    def device_mean(self, value: Array) -> Array:
        return lax.pmean(value, self.axes) if self.size > 1 else value


def exact_share(ways: int) -> tuple[float, float]:
    """Splits `1 / ways` into a power of two and the remaining factor.

    A power of two is exact in narrow dtypes. It scales the loss, so that sums of gradients do not
    overflow. The other factor, which most dtypes round, scales the sums. It is 1 if `ways` is a
    power of two.
    """
    power = 1 << (ways - 1).bit_length()
    return 1 / power, power / ways


# -- the update, on all devices together, so that optimizers see global norms and whole matrices


def scattered(value: Array, leaf: LeafPlan, mesh: Mesh) -> Array:
    """Constrains a leaf, or its gradient, to the placement of its update, without padding."""
    value = _compat.fetched(value)
    if value.shape != leaf.shape:
        value = constrained(value, leaf.update, mesh)
        value = value[tuple(map(slice, leaf.shape))]
    if leaf.update.padding:
        return _compat.constrained(value, leaf.update.sharding(mesh))
    return constrained(value, leaf.update, mesh)


def updated(value: Array, leaf: LeafPlan, mesh: Mesh) -> Array:
    """Constrains a new leaf to the placement of its update, and pads it."""
    if _compat.is_on_host(value):  # stored already
        return value
    with jax.named_scope("optimizer"):  # an optimizer may have worked in a layout of its own
        value = scattered(value, leaf, mesh)
    if not leaf.update.padding:
        return value
    longer = _travel.with_padding(value, leaf.update.dim, leaf.update.padding)
    return constrained(longer, leaf.update, mesh)


def rested(
    values: Sequence[Array],
    leaves: Sequence[LeafPlan],
    mesh: Mesh,
    axes: Axes,
    *,
    into: Sequence[Array | None],
    resting: Container[int] = (),
) -> list[Array]:
    """Returns the leaves of an updated state where they rest, in a step's `jax.jit`.

    Each leaf goes first to the placement of its update, and then to where it rests. So XLA updates
    a parameter of stage 1 or 2 on shards, and the step gathers it once, in its own dtype; stacks of
    layers go into those of the donated old state, `into`. Leaves at positions in `resting` are at
    rest already.
    """
    values = list(values)
    moved = [i for i in range(len(values)) if i not in resting]
    for i in moved:
        values[i] = updated(values[i], leaves[i], mesh)
    gathers = [
        i
        for i in moved
        if leaves[i].rest.on_device != leaves[i].update and not _compat.is_on_host(values[i])
    ]
    if gathers:
        shards, old = [values[i] for i in gathers], [into[i] for i in gathers]
        whole = _gathered(shards, old, [leaves[i] for i in gathers], mesh, axes)
        for i, value in zip(gathers, whole, strict=True):
            values[i] = value
    there = {i for i in moved if leaves[i].rest == leaves[i].update}
    pairs = enumerate(zip(values, leaves, strict=True))
    return [value if i in there else at_rest(value, leaf, mesh) for i, (value, leaf) in pairs]


def _gathered(
    shards: list[Array],
    old: list[Array | None],
    leaves: Sequence[LeafPlan],
    mesh: Mesh,
    axes: Axes,
) -> list[Array]:
    """Gathers leaves that rest whole, by hand: XLA would choose the time and the dtype itself."""
    rest = [leaf.rest.local for leaf in leaves]

    def gather(shard: Array, stack: Array | None, leaf: LeafPlan) -> Array:
        # Over all axes: a leaf that does not rest where it is updated rests whole. Exact, because
        # quantized parameters would drift.
        cut = leaf.cut(Route(leaf.update.axes, padding=leaf.update.padding))
        return _travel.gather_updated(shard, stack, cut, leaf.stacked)

    return jax.shard_map(
        lambda shards, old: list(map(gather, shards, old, leaves)),
        mesh=mesh,
        in_specs=([leaf.update.local for leaf in leaves], rest),
        out_specs=rest,
        axis_names=set(axes),
        check_vma=False,
    )(shards, old)


def at_rest(value: Array, leaf: LeafPlan, mesh: Mesh) -> Array:
    """Constrains a padded leaf to its placement between steps."""
    if not _compat.is_on_host(value):
        value = constrained(value, leaf.rest.on_device, mesh)
    return constrained(_compat.stored(value), leaf.rest, mesh) if leaf.is_on_host else value


def constrained(value: Array, place: Placement, mesh: Mesh) -> Array:
    return lax.with_sharding_constraint(value, place.sharding(mesh))
