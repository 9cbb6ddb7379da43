"""ZeRO-3 written by hand, inside a `shard_map` of one's own: `gather` and `scan`.

They state what `zerojax.train_step` finds in a loss by itself: where each weight is gathered, and
which loop is over layers. The gradients of shards are sums over the devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.tree_util import register_dataclass
from jax.typing import DTypeLike

from zerojax._kernel.arrays import Value
from zerojax._kernel.body import How
from zerojax._kernel.engine import SplitLoss
from zerojax._kernel.jaxprs import unclosed
from zerojax._kernel.pieces import InputKind
from zerojax._kernel.places import Axes, LeafPlan, beyond, slow
from zerojax._kernel.travel import Cut, Held, Route, names_in, obtain
from zerojax._plan.codes import codec_of, sum_codec_of
from zerojax._plan.plan import Plan, check_plan
from zerojax._state.state import get_params
from zerojax._step.step_options import how_on, precision_of, regathered
from zerojax._types import PyTree, TreeDef


@functools.partial(register_dataclass, data_fields=["data"], meta_fields=["cut", "how"])
@dataclasses.dataclass(frozen=True)
class Sharded:
    """This device's shard of a parameter, and how a loop runs that gathers it."""

    data: Array
    cut: Cut
    how: How

    @property
    def dim(self) -> int | None:
        """The sharded dimension."""
        return self.cut.dim

    @property
    def full(self) -> jax.ShapeDtypeStruct:
        """The full parameter without padding, as a shape."""
        route, dim = self.cut.gather, self.cut.dim
        size = lax.axis_size((*route.near, *route.far))
        shape = (n * size - route.padding if d == dim else n for d, n in enumerate(self.data.shape))
        return jax.ShapeDtypeStruct(tuple(shape), self.data.dtype)


def _is_sharded(leaf: PyTree) -> TypeGuard[Sharded]:
    return isinstance(leaf, Sharded)


def param_specs(plan: Plan, axis_names: Collection[str] = ()) -> PyTree:
    """Returns the parameters' `PartitionSpec`s, for `in_specs` and `out_specs` of `jax.shard_map`.

    They are those of placed parameters: `jax.shard_map` takes no others where the plan pads some.
    Gradients of these come out padded too; inside `jax.jit`, `plan.logical_grads` drops that.

    With `axis_names`, mesh axes of your own, a device gets its part over these too, such as the
    layers of a pipeline's stage; `zerojax.manual.gather` still gathers over ZeRO's axes alone.

    Example:
        >>> plan = zerojax.plan({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> print(zerojax.manual.param_specs(plan))
        {'w': P('data',)}
    """
    check_plan(plan, "param_specs(plan)")
    if unknown := set(axis_names) - set(plan.mesh.axis_names):
        raise ValueError(
            f"axis_names={axis_names!r} names {min(unknown)!r}, and the plan's mesh has the axes "
            f"{plan.mesh.axis_names}. Name some of these."
        )
    specs = [leaf.rest.within({*leaf.rest.axes, *axis_names}) for leaf in plan.params]
    return _params_tree(plan).unflatten(specs)


def shards(params: PyTree, plan: Plan) -> PyTree:
    """Marks the device's shards of the parameters as such, inside of `jax.shard_map`.

    Differentiate by what this returns. Parameters that the plan replicates stay plain arrays,
    and their gradients are the device's own: sum those with `jax.lax.psum`.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> plan = zerojax.plan({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> def grad_of_w(params, x):
        ...     loss = lambda parts: jnp.sum(x @ zerojax.manual.gather(parts)["w"])
        ...     return jax.grad(loss)(zerojax.manual.shards(params, plan))["w"].data
        >>> run = jax.shard_map(
        ...     grad_of_w, mesh=plan.mesh, in_specs=(zerojax.manual.param_specs(plan), P("data")),
        ...     out_specs=P("data"), check_vma=False)
        >>> print(run({"w": jnp.ones((64, 16))}, jnp.ones((8, 64)))[0, 0])  # of all 8 rows
        8.0
    """
    check_plan(plan, "shards(params, plan)")
    if not plan.groups.params:
        raise ValueError(
            "zerojax.manual.shards needs a plan of stage 3 over several devices, this one is of "
            f"stage {plan.stage} over {plan.size}. Make one: zerojax.plan(state, stage=3)."
        )
    if any(leaf.is_on_host for leaf in plan.params):
        raise ValueError(
            "zerojax.manual.shards takes parameters that are on the devices, and this plan has "
            "some in host memory. Leave 'params' out of offload=, or use zerojax.train_step."
        )
    how = how_on(plan.mesh, regather=True, prefetch="auto")
    by_hand = set(jax.sharding.get_abstract_mesh().manual_axes)  # XLA shards nothing over these

    def marked(value: Array, leaf: LeafPlan) -> Array | Sharded:
        if leaf.rest.dim is None:
            return value
        axes, padding = leaf.rest.axes, leaf.rest.padding
        precision = precision_of(plan, None)
        replicas, near = beyond(plan.batch_axes, axes), leaf.near.axes
        gathered = codec_of(leaf, precision.gather, plan.mesh)
        reduced = sum_codec_of(leaf, precision.reduce, plan.mesh, plan.batch_axes)
        reduce = Route(axes, (), replicas, reduced, padding)
        reduce = reduce.coded_over(slow(axes, plan.batch_axes))
        gather = Route(near, beyond(axes, near), (), gathered, padding)
        cut = leaf.cut(gather, reduce, value.dtype)
        others = () if names_in(cut.others) & by_hand else cut.others
        return Sharded(value, dataclasses.replace(cut, others=others), how)

    leaves, treedef = jax.tree.flatten(params)
    _check_parts(leaves, treedef, plan)
    pairs = zip(leaves, plan.params, strict=True)
    return treedef.unflatten([marked(value, leaf) for value, leaf in pairs])


def gather(tree: PyTree, dtype: DTypeLike | None = None) -> PyTree:
    """Gathers the full parameters from what `zerojax.manual.shards` returns; other arrays stay.

    Backward reduce-scatters their gradients. With `dtype`, floats are gathered in it, and stay so.

    Example:
        >>> plan = zerojax.plan({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> def full(params):
        ...     return zerojax.manual.gather(zerojax.manual.shards(params, plan), jnp.bfloat16)
        >>> run = jax.shard_map(
        ...     full, mesh=plan.mesh, in_specs=(zerojax.manual.param_specs(plan),),
        ...     out_specs=jax.sharding.PartitionSpec(), check_vma=False)
        >>> print(run({"w": jnp.ones((64, 16))})["w"].aval)
        bfloat16[64,16]
    """

    def full(leaf: PyTree) -> PyTree:
        if not _is_sharded(leaf):
            return leaf
        is_float = jnp.issubdtype(leaf.data.dtype, jnp.floating)
        wanted = dtype if dtype is not None and is_float else leaf.data.dtype
        cut = dataclasses.replace(leaf.cut, dtype=jnp.dtype(wanted))
        return obtain(Held(leaf.data), cut)

    return jax.tree.map(full, tree, is_leaf=_is_sharded)


def scan(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    prefetch: int | str = "auto",
    regather: bool | str | Sequence[str] = True,
) -> tuple[PyTree, PyTree]:
    """Runs `jax.lax.scan` over layers; `body` gets full weights for those marked by `shards`.

    Each layer is gathered for its iteration, and again in backward, and its gradients are
    reduce-scattered in the loop. Without marked weights it is `jax.lax.scan`.

    Arguments:
        body, init, xs, length, reverse, unroll: as in `jax.lax.scan`.
        prefetch, regather: as in `zerojax.train_step`.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> layers = {"w": jnp.ones((4, 64, 64)) / 64}
        >>> plan = zerojax.plan({"params": layers}, stage=3)
        >>> def apply(params, x):
        ...     layer = lambda x, w: (x @ w["w"], None)
        ...     return zerojax.manual.scan(layer, x, zerojax.manual.shards(params, plan))[0]
        >>> run = jax.jit(jax.shard_map(
        ...     apply, mesh=plan.mesh, in_specs=(zerojax.manual.param_specs(plan), P("data")),
        ...     out_specs=P("data"), check_vma=False))
        >>> print(run(layers, jnp.ones((8, 64))).shape, run(layers, jnp.ones((8, 64)))[0, 0])
        (8, 64) 1.0
    """
    if prefetch not in (0, 1, "auto"):
        raise ValueError(f"prefetch must be 0, 1 or 'auto', got {prefetch!r}.")

    leaves, treedef = jax.tree.flatten(xs, is_leaf=_is_sharded)
    marked = list(filter(_is_sharded, leaves))
    if not marked:
        return lax.scan(body, init, xs, length, reverse, unroll)
    if any(leaf.cut.dim == 0 for leaf in marked):
        raise ValueError(
            "a stack of layers is sharded along its layers, so no device has a part of each. Pass "
            "stacked= with its path to zerojax.plan."
        )
    ahead = marked[0].how.prefetch if prefetch == "auto" else int(prefetch)
    # All weights of a plan have the same schedule, so the first tells how the loop runs.
    over = regathered(regather)
    how = dataclasses.replace(marked[0].how, regather=bool(over), prefetch=ahead)
    if not isinstance(over, bool):
        leaves = [_regathering(x, over) if _is_sharded(x) else x for x in leaves]
    loop = functools.partial(lax.scan, body, length=length, reverse=reverse, unroll=unroll)
    return _run(loop, jax.tree.map(jnp.asarray, init), leaves, treedef, how)


def _regathering(leaf: Sharded, axes: Axes) -> Sharded:
    """Returns a parameter that backward gathers over these axes again."""
    gather = leaf.cut.gather
    if unknown := beyond(axes, (*gather.near, *gather.far)):
        raise ValueError(
            f"regather={axes} names {unknown[0]!r}, and {leaf.cut.path} is gathered over "
            f"{(*gather.near, *gather.far)}. Name the first of these: regather={gather.near[0]!r}."
        )
    near = tuple(axis for axis in gather.near if axis in axes)
    if near != gather.near[: len(near)] or not near:
        raise ValueError(
            f"regather={axes}: {leaf.cut.path} is gathered over {gather.near}, from the fastest "
            f"axis on. Name the first of these: regather={gather.near[0]!r}."
        )
    far = (*beyond(gather.near, near), *gather.far)
    gather = dataclasses.replace(gather, near=near, far=far)
    return dataclasses.replace(leaf, cut=dataclasses.replace(leaf.cut, gather=gather))


def _run(
    loop: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    leaves: list[Array | Sharded],
    treedef: TreeDef,
    how: How,
) -> tuple[PyTree, PyTree]:
    """Runs `loop(init, xs)` in the engine, whose one step it is; `leaves` are those of `xs`."""
    # The body is traced with full weights, as `train_step` traces a loss; the engine then finds
    # the loop in the jaxpr. What the body closes over becomes inputs.
    shapes = [leaf.full if _is_sharded(leaf) else leaf for leaf in leaves]
    closed, out_shape = jax.make_jaxpr(loop, return_shape=True)(init, treedef.unflatten(shapes))
    jaxpr, consts = unclosed(closed)
    values = [*jax.tree.leaves(init), *leaves, *consts]
    # A cast by `jax.tree.map` changed the data of a `Sharded` and not its cut.
    inputs: list[Value] = [Held(x.data) if _is_sharded(x) else x for x in values]
    kinds: list[InputKind] = [
        dataclasses.replace(x.cut, dtype=x.data.dtype) if _is_sharded(x) else None for x in values
    ]
    return jax.tree.structure(out_shape).unflatten(SplitLoss(jaxpr, kinds)(inputs, how))


def _check_parts(leaves: list[Array], treedef: TreeDef, plan: Plan) -> None:
    """Raises where these are not one device's shards of the plan's parameters."""
    if treedef != _params_tree(plan):
        raise ValueError(
            f"these parameters are not those of the plan: {treedef} instead of "
            f"{_params_tree(plan)}. Make a plan for them: zerojax.plan(state, stage=3)."
        )
    by_hand = jax.sharding.get_abstract_mesh().manual_axes
    for value, leaf in zip(leaves, plan.params, strict=True):
        # A `shard_map` over axes of the user's own may leave them out of its in_specs.
        specs = leaf.rest.local, leaf.rest.within({*leaf.rest.axes, *by_hand})
        parts = [NamedSharding(plan.mesh, spec).shard_shape(leaf.padded_shape) for spec in specs]
        if value.shape not in parts:
            raise ValueError(
                f"{leaf.path} is {value.shape} here, and a device's part of it is {parts[0]}. Call "
                "zerojax.manual.shards inside jax.shard_map, with "
                "in_specs=zerojax.manual.param_specs(plan)."
            )


def _params_tree(plan: Plan) -> TreeDef:
    """Returns the structure of the parameters alone."""
    numbered = plan.treedef.unflatten(range(len(plan.leaves)))
    return jax.tree.structure(get_params(numbered))
