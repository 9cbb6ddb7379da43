"""What a step is made of: its parameters, the loss on each device, the update on shards.

`Param` says how one parameter takes part, `DeviceLoss` is the loss as code of one device, and
`rested` ends a step. `tests/kernel/alone.py` makes a step of them, `_step/program.py` those with
options.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._fence import mark, mixes_up_collectives, wait
from zerojax._kernel import travel as _travel
from zerojax._kernel.arrays import Value
from zerojax._kernel.body import How
from zerojax._kernel.engine import SplitLoss
from zerojax._kernel.pieces import WEIGHT, InputKind
from zerojax._kernel.places import Groups, LeafPlan, Placement
from zerojax._kernel.travel import EXACT, Codec, Cut, Held, Route
from zerojax._specs import Axes, axes_size, beyond, slow
from zerojax._types import PyTree, wide, zero_gradient

# -- one parameter


@dataclasses.dataclass(frozen=True)
class Param:
    """How a step takes one parameter. `param_of` makes it from the placements of a leaf.

    If it is `is_held`, the loss receives it as `Held`: the engine gathers it along `cut`, and
    reduces its gradient where the loss uses it, to a shard of `landing_shape`. Otherwise the loss
    receives the array, and JAX its gradient. After the last microbatch a gradient goes `onward` to
    the shard that is updated. A parameter `is_varied` if it has a gradient. If it `is_own_source`,
    the loss gathers it from the shard through which the gradient leaves. Microbatches share what
    has travelled along `early`. Shapes are those of one device's part.
    """

    leaf: LeafPlan
    cut: Cut
    is_held: bool
    is_varied: bool
    is_own_source: bool
    landing_shape: tuple[int, ...]
    update_shape: tuple[int, ...]
    onward: Route | None
    early: Cut | None
    compute_dtype: DTypeLike
    grad_dtype: DTypeLike

    @property
    def kind(self) -> InputKind:
        return self.cut if self.is_held else WEIGHT

    def brought_near(self, value: Array, dtype: DTypeLike) -> Array:
        """Returns what microbatches gather from, in the dtype that they gather."""
        if self.early is None:
            return value
        return _travel.gathered(_compat.fetched(value).astype(dtype), self.early).astype(dtype)

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
        return jnp.zeros(self.landing_shape, self.grad_dtype)

    def loss_input(self, value: Array, varied: PyTree) -> Value:
        """Returns the parameter as the engine takes it."""
        if not self.is_held:
            return varied
        return Held(varied) if self.is_own_source else Held(varied, rest=value)

    def mean(self, grad: Array, remaining: float) -> Array:
        """Returns a gradient summed over the devices, times the factor that it lacks."""
        if self.onward is not None:
            # A gradient that was summed in a wider dtype travels in the one it was computed in.
            grad = grad.astype(self.compute_dtype)
            (grad,) = _travel.reduced([grad], [self.cut], [self.onward])
        return scaled(grad.astype(self.grad_dtype), remaining)

    def no_gradient(self) -> Array | np.ndarray:
        """Returns zeros in a dtype that optax can add, or JAX's own zero for keys."""
        return zero_gradient(jax.ShapeDtypeStruct(self.update_shape, self.leaf.dtype))


def param_of(
    leaf: LeafPlan,
    mesh: Mesh,
    batch_axes: Axes,
    groups: Groups,
    *,
    must_hold: bool = False,
    copied: bool = False,
    accumulates: bool = False,
    compute_dtype: DTypeLike | None = None,
    grad_dtype: DTypeLike | None = None,
    gather: Codec = EXACT,
    reduce: Codec = EXACT,
) -> Param:
    """Makes a parameter of a step from its leaf.

    It travels by the codecs `gather` and `reduce`. With `must_hold`, the engine takes it in any
    case; a `copied` one is a copy that the step has made in the dtype that travels. A step that
    `accumulates` over microbatches sums their gradients at `leaf.grad`, and sends the sum onward.
    """
    compute_dtype = leaf.dtype if compute_dtype is None else compute_dtype
    is_alone = axes_size(mesh, batch_axes) == 1
    far = beyond(leaf.rest.axes, leaf.near.axes)
    replicas = beyond(batch_axes, leaf.update.axes + leaf.update.apart)
    # The gradient of a single microbatch goes all the way to the shard that is updated, layer by
    # layer, and hides behind the layers before. Those of several go only to where they are summed,
    # so that each crosses nodes once, after the last microbatch.
    landing = leaf.grad if accumulates and leaf.grad is not None else leaf.update
    brings = accumulates and bool(far)

    route = functools.partial(_grad_route, leaf, batch_axes, reduce)

    def part(place: Placement) -> tuple[int, ...]:
        return NamedSharding(mesh, place.local).shard_shape(place.padded(leaf.shape))

    # If nothing is sharded, stacks of matrices are held all the same, so that a loop reduces each
    # layer's gradient as it goes: see the note in `Cut.fixed`. Full gradients of microbatches are
    # reduced after the last one.
    in_loops = not (groups.opt_state or is_alone or accumulates) and len(leaf.shape) > 2
    is_held = must_hold or leaf.is_on_host or landing.dim is not None or in_loops
    # A weight that rests whole does not travel. One that was brought near was decoded there, and
    # the rest of its way is fast.
    codec = gather if leaf.rest.axes and not brings else EXACT
    crosses = () if accumulates else far
    there = Route(leaf.near.axes, crosses, (), codec, leaf.rest.zeros)
    back = route((), landing.axes, () if accumulates else replicas)
    onward = None
    if (accumulates or not is_held) and not is_alone:
        onward = route(landing.axes, leaf.update.axes, replicas)
    return Param(
        leaf=leaf,
        cut=leaf.cut(there, back, compute_dtype),
        is_held=is_held,
        is_varied=jnp.issubdtype(leaf.dtype, jnp.inexact) and not leaf.frozen,
        is_own_source=leaf.rest == landing and not (brings or copied),
        landing_shape=part(landing),
        update_shape=part(leaf.update),
        onward=onward if onward and (onward.axes or onward.replicas) else None,
        early=leaf.cut(Route(far, codec=gather), dtype=compute_dtype) if brings else None,
        compute_dtype=compute_dtype,
        grad_dtype=leaf.dtype if grad_dtype is None else grad_dtype,
    )


def _grad_route(
    leaf: LeafPlan, batch_axes: Axes, codec: Codec, start: Axes, end: Axes, replicas: Axes
) -> Route:
    """Returns a gradient's route from shards over `start` to shards over `end`.

    The near hop ends at `leaf.grad`, where a step sums gradients; the far hop may wait.
    """
    axes = beyond(end, start)
    far = beyond(axes, leaf.grad.axes if leaf.grad else ())
    padding = leaf.update.zeros if end and not start else 0
    route = Route(beyond(axes, far), far, replicas, codec, padding)
    return route.coded_over(slow(route.axes, batch_axes))


# -- one device


class DeviceLoss:
    """A loss as code of one device, to run under `shard_map`, and what surrounds its derivative.

    `jaxpr` is the loss of one device's rows. Its first inputs are the parameters.
    """

    def __init__(self, jaxpr: Jaxpr, params: Sequence[Param], mesh: Mesh, axes: Axes) -> None:
        self.jaxpr, self.params = jaxpr, list(params)
        self.mesh, self.axes, self.size = mesh, axes, axes_size(mesh, axes)
        others = [None] * (len(jaxpr.invars) - len(self.params))
        self.split = SplitLoss(jaxpr, [*(p.kind for p in self.params), *others])

    def run(self, inputs: list[Any], how: How) -> list[Array]:
        """Returns the outputs of the loss, whose weights come from `Param.loss_input`."""
        if any(p.is_held for p in self.params):
            return self.split(inputs, how)
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

    def on_all_devices(
        self, code: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
    ) -> Callable[..., PyTree]:
        """Returns the program of all devices together, from the code of one."""
        # Only ZeRO's axes are manual: over axes of the user's own, XLA shards the loss as it likes.
        # JAX must not track values that vary over the devices (vma): it would sum gradients again.
        return jax.shard_map(
            code,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.axes),
            check_vma=False,
        )


def scaled(grad: Array, factor: float) -> Array:
    return grad if factor == 1 else (grad.astype(wide(grad.dtype)) * factor).astype(grad.dtype)


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
    lengths = zip(value.shape, leaf.update.padded(value.shape), strict=True)
    longer = jnp.pad(value, [(0, long - short) for short, long in lengths])
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
    shards: list[Array], old: list[Array | None], leaves: Sequence[LeafPlan], mesh: Mesh, axes: Axes
) -> list[Array]:
    """Gathers leaves that rest whole, by hand: XLA would choose the time and the dtype itself."""
    rest = [leaf.rest.local for leaf in leaves]
    # A stack is gathered in a loop: on CPUs, in its turn.
    in_turn = mixes_up_collectives(mesh) and any(leaf.stacked for leaf in leaves)

    def gather(shard: Array, stack: Array | None, leaf: LeafPlan) -> Array:
        # Over all axes: a leaf that does not rest where it is updated rests whole. Exact, because
        # quantized parameters would drift.
        cut = leaf.cut(Route(leaf.update.axes, padding=leaf.update.zeros))
        return _travel.gather_updated(shard, stack, cut, leaf.stacked)

    def gather_all(shards: list[Array], old: list[Array | None]) -> list[Array]:
        whole, done = list[Array](), mark(shards) if in_turn else None
        for shard, stack, leaf in zip(shards, old, leaves, strict=True):
            whole.append(gather(wait(shard, done), stack, leaf))
            done = mark(whole[-1:]) if in_turn else None
        return whole

    return jax.shard_map(
        gather_all,
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
