"""ZeRO-3 written by hand, inside the user's own `shard_map`: `gather` and `scan`.

They say what `zerojax.train_step` finds in a loss by itself: where to gather each weight, and which
loop is over layers. The gradients of shards are sums over the devices.
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
from zerojax._kernel.places import LeafPlan, beyond, slow
from zerojax._kernel.travel import Cut, Held, Route, names_in, obtain
from zerojax._plan.plan import Plan, check_plan
from zerojax._state.state import get_params
from zerojax._step.step_options import GradOptions, how_on, precision_of
from zerojax._types import PyTree, TreeDef
from zerojax._wire.codecs import codec_of, sum_codec_of


@functools.partial(register_dataclass, data_fields=["data"], meta_fields=["leaf", "plan"])
@dataclasses.dataclass(frozen=True)
class Sharded:
    """This device's shard of a parameter."""

    data: Array
    leaf: LeafPlan
    plan: Plan

    @property
    def dim(self) -> int | None:
        """The sharded dimension."""
        return self.leaf.rest.dim

    @property
    def cut(self) -> Cut:
        """How it travels, in the dtype of the shard."""
        leaf, plan = self.leaf, self.plan
        axes, near, padding = leaf.rest.axes, leaf.near.axes, leaf.rest.padding
        precision, replicas = precision_of(plan, None), beyond(plan.batch_axes, axes)
        gathered = codec_of(leaf, precision.gather, plan.mesh)
        reduced = sum_codec_of(leaf, precision.reduce, plan.mesh, plan.batch_axes)
        reduce = Route(axes, (), replicas, reduced, padding)
        reduce = reduce.coded_over(slow(axes, plan.batch_axes))
        gather = Route(near, beyond(axes, near), (), gathered, padding)
        cut = leaf.cut(gather, reduce, self.data.dtype)
        by_hand = set(jax.sharding.get_abstract_mesh().manual_axes)  # XLA shards nothing over these
        return dataclasses.replace(cut, others=()) if names_in(cut.others) & by_hand else cut

    @property
    def full(self) -> jax.ShapeDtypeStruct:
        """The full parameter without padding, as a shape."""
        size = lax.axis_size(self.leaf.rest.axes)
        shape = [
            n * size - self.leaf.rest.padding if d == self.dim else n
            for d, n in enumerate(self.data.shape)
        ]
        return jax.ShapeDtypeStruct(shape, self.data.dtype)


def _is_sharded(leaf: PyTree) -> TypeGuard[Sharded]:
    return isinstance(leaf, Sharded)


def param_specs(plan: Plan, axis_names: Collection[str] = ()) -> PyTree:
    """Returns the parameters' `PartitionSpec`s, for `in_specs` and `out_specs` of `jax.shard_map`.

    Pass placed parameters: `jax.shard_map` takes no others where the plan pads some. Their
    gradients come out padded too; inside `jax.jit`, `plan.logical_grads` drops the padding.

    With `axis_names`, mesh axes of your own, a device gets its part over these too, such as the
    layers of a pipeline's stage; `zerojax.manual.gather` still gathers over ZeRO's axes only.

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
    """Marks the device's shards of the parameters as such, inside `jax.shard_map`.

    Differentiate by the result. Parameters that the plan replicates stay plain arrays, and their
    gradients are the device's own: sum those with `jax.lax.psum`.

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
            "zerojax.manual.shards needs a plan of stage 3 over several devices, and this one is "
            f"of stage {plan.stage} over {plan.size}. Make one: zerojax.plan(state, stage=3)."
        )
    if any(leaf.is_on_host for leaf in plan.params):
        raise ValueError(
            "zerojax.manual.shards takes parameters that rest on the devices, and this plan has "
            "some in host memory. Leave 'params' out of offload=, or use zerojax.train_step."
        )
    leaves, treedef = jax.tree.flatten(params)
    _check_parts(leaves, treedef, plan)
    pairs = zip(leaves, plan.params, strict=True)
    return treedef.unflatten(
        value if leaf.rest.dim is None else Sharded(value, leaf, plan) for value, leaf in pairs
    )


def gather(tree: PyTree, dtype: DTypeLike | None = None) -> PyTree:
    """Gathers full parameters from shards that `zerojax.manual.shards` marked; other arrays stay.

    Backward reduce-scatters their gradients. With `dtype`, floats are gathered in it and keep it.

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
    options = GradOptions(prefetch=prefetch, regather=regather)
    leaves, treedef = jax.tree.flatten(xs, is_leaf=_is_sharded)
    marked = list(filter(_is_sharded, leaves))
    if not marked:
        return lax.scan(body, init, xs, length, reverse, unroll)
    if any(leaf.dim == 0 for leaf in marked):
        raise ValueError(
            "a stack of layers is sharded along its layers, so no device has a part of each. Pass "
            "stacked= with its path to zerojax.plan."
        )
    plans = {x.plan: x.plan.regathering(options.regather) for x in marked}
    again = {(old, leaf.path): leaf for old, new in plans.items() for leaf in new.params}
    leaves = [
        Sharded(x.data, again[x.plan, x.leaf.path], plans[x.plan]) if _is_sharded(x) else x
        for x in leaves
    ]
    how = how_on(marked[0].plan.mesh, regather=bool(options.regather), prefetch=options.prefetch)
    loop = functools.partial(lax.scan, body, length=length, reverse=reverse, unroll=unroll)
    return _run(loop, jax.tree.map(jnp.asarray, init), leaves, treedef, how)


def _run(
    loop: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    leaves: list[Array | Sharded],
    treedef: TreeDef,
    how: How,
) -> tuple[PyTree, PyTree]:
    """Runs `loop(init, xs)` in the engine, where `leaves` are those of `xs`."""
    # Trace the body with full weights, as `train_step` traces a loss; the engine then finds the
    # loop in the jaxpr. Arrays that the body closes over become inputs.
    shapes = [leaf.full if _is_sharded(leaf) else leaf for leaf in leaves]
    closed, out_shape = jax.make_jaxpr(loop, return_shape=True)(init, treedef.unflatten(shapes))
    jaxpr, consts = unclosed(closed)
    values = [*jax.tree.leaves(init), *leaves, *consts]
    inputs: list[Value] = [Held(x.data) if _is_sharded(x) else x for x in values]
    kinds: list[InputKind] = [x.cut if _is_sharded(x) else None for x in values]
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
        # The `in_specs` of a `shard_map` over axes of the user's own may leave these out.
        specs = leaf.rest.local, leaf.rest.within({*leaf.rest.axes, *by_hand})
        parts = [NamedSharding(plan.mesh, spec).shard_shape(leaf.padded_shape) for spec in specs]
        if value.shape not in parts:
            raise ValueError(
                f"{leaf.path} is {value.shape} here, and a device's part of it is {parts[0]}. Call "
                "zerojax.manual.shards inside jax.shard_map, with "
                "in_specs=zerojax.manual.param_specs(plan)."
            )


def _params_tree(plan: Plan) -> TreeDef:
    """Returns the structure of the parameters."""
    numbered = plan.treedef.unflatten(range(len(plan.leaves)))
    return jax.tree.structure(get_params(numbered))
