"""ZeRO-3 written down by hand, inside a `shard_map` of one's own: `gather` and `scan`.

What `zerojax.train_step` finds in a loss by itself can also be stated: which weights are gathered
where, and which loop is a loop over layers. The gradients of shards are sums over the devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.tree_util import register_dataclass

from zerojax import _compat
from zerojax._collectives import Cut, Held, names_in, obtain, wire_over
from zerojax._engine.body import How
from zerojax._engine.run import evaluate, how_on
from zerojax._plan.layout import LeafPlan
from zerojax._plan.plan import Plan, check_plan
from zerojax._state.state import PARAMS, get_params


@functools.partial(register_dataclass, data_fields=["data"], meta_fields=["cut", "how"])
@dataclasses.dataclass(frozen=True)
class Sharded:
    """This device's part of a parameter, and how loops run that gather it."""

    data: jax.Array
    cut: Cut
    how: How

    @property
    def full(self) -> jax.ShapeDtypeStruct:
        """The shape of the full parameter."""
        size = lax.axis_size(self.how.wire.gather.axes)
        shape = (n * size if d == self.cut.dim else n for d, n in enumerate(self.data.shape))
        return jax.ShapeDtypeStruct(tuple(shape), self.data.dtype)


def param_specs(plan: Plan) -> Any:
    """The parameters' `PartitionSpec`s, for the `in_specs` and `out_specs` of `jax.shard_map`.

    Example:
        >>> plan = zerojax.plan({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> print(zerojax.param_specs(plan))
        {'w': P('data',)}
    """
    check_plan(plan, "param_specs(plan)")
    specs = [leaf.rest.local for leaf in plan.params]
    return _params_tree(plan).unflatten(specs)


def shards(params: Any, plan: Plan) -> Any:
    """Inside of `jax.shard_map`: the device's parts of the parameters, marked as such.

    Take gradients by what this returns. Parameters that the plan does not cut stay plain arrays,
    and their gradients are the device's own: sum those with `jax.lax.psum`.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> plan = zerojax.plan({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> def grad_of_w(params, x):
        ...     loss = lambda parts: jnp.sum(x @ zerojax.gather(parts)["w"])
        ...     return jax.grad(loss)(zerojax.shards(params, plan))["w"].data
        >>> run = jax.shard_map(
        ...     grad_of_w, mesh=plan.mesh, in_specs=(zerojax.param_specs(plan), P("data")),
        ...     out_specs=P("data"), check_vma=False)
        >>> print(run({"w": jnp.ones((64, 16))}, jnp.ones((8, 64)))[0, 0])  # of all 8 rows
        8.0
    """
    check_plan(plan, "shards(params, plan)")
    if not plan.sharded[PARAMS]:
        raise ValueError(
            f"zerojax.shards needs a plan of stage 3 over several devices, this one is of stage "
            f"{plan.stage} over {plan.size}. Make one: zerojax.plan(state, stage=3)."
        )
    how = how_on(plan.mesh, wire_over(plan.batch_axes), regather=True, prefetch="auto")
    by_hand = set(jax.sharding.get_abstract_mesh().manual_axes)  # XLA shards nothing over these

    def marked(value: jax.Array, leaf: LeafPlan) -> Any:
        if leaf.rest.dim is None:
            return value
        others = leaf.rest.others(value.ndim)
        others = () if names_in(others) & by_hand else others
        return Sharded(value, Cut(leaf.rest.dim, value.ndim, value.dtype, others=others), how)

    leaves, treedef = jax.tree.flatten(params)
    _check_parts(leaves, treedef, plan)
    pairs = zip(leaves, plan.params, strict=True)
    return treedef.unflatten([marked(value, leaf) for value, leaf in pairs])


def gather(tree: Any, dtype: Any = None) -> Any:
    """The full parameters, from what `zerojax.shards` returns; other arrays pass as they are.

    Backward reduce-scatters their gradients. With `dtype`, floats travel, and arrive, in it.

    Example:
        >>> plan = zerojax.plan({"params": {"w": jnp.ones((64, 16))}}, stage=3)
        >>> whole = lambda params: zerojax.gather(zerojax.shards(params, plan), jnp.bfloat16)
        >>> run = jax.shard_map(
        ...     whole, mesh=plan.mesh, in_specs=(zerojax.param_specs(plan),),
        ...     out_specs=jax.sharding.PartitionSpec(), check_vma=False)
        >>> print(run({"w": jnp.ones((64, 16))})["w"].aval)
        bfloat16[64,16]
    """

    def full(leaf: Any) -> Any:
        if not isinstance(leaf, Sharded):
            return leaf
        is_float = jnp.issubdtype(leaf.data.dtype, jnp.floating)
        wanted = dtype if dtype is not None and is_float else leaf.data.dtype
        cut = dataclasses.replace(leaf.cut, dtype=jnp.dtype(wanted))
        return obtain(Held(leaf.data), cut, leaf.how.wire)

    return jax.tree.map(full, tree, is_leaf=lambda leaf: isinstance(leaf, Sharded))


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    prefetch: int | str = "auto",
    regather: bool = True,
) -> tuple[Any, Any]:
    """`jax.lax.scan` over layers: weights marked by `zerojax.shards` reach `body` whole.

    Each layer is gathered for its turn, in backward again, and its gradients are reduce-scattered
    in the loop. Without marked weights it is `jax.lax.scan`.

    Arguments:
        body, init, xs, length, reverse, unroll: as in `jax.lax.scan`.
        prefetch, regather: as in `zerojax.train_step`.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> layers = {"w": jnp.ones((4, 64, 64)) / 64}
        >>> plan = zerojax.plan({"params": layers}, stage=3)
        >>> def apply(params, x):
        ...     layer = lambda x, w: (x @ w["w"], None)
        ...     return zerojax.scan(layer, x, zerojax.shards(params, plan))[0]
        >>> run = jax.jit(jax.shard_map(
        ...     apply, mesh=plan.mesh, in_specs=(zerojax.param_specs(plan), P("data")),
        ...     out_specs=P("data"), check_vma=False))
        >>> print(run(layers, jnp.ones((8, 64))).shape, run(layers, jnp.ones((8, 64)))[0, 0])
        (8, 64) 1.0
    """
    if prefetch not in (0, 1, "auto"):
        raise ValueError(f"prefetch must be 0, 1 or 'auto', got {prefetch!r}.")

    def is_shard(leaf: Any) -> TypeGuard[Sharded]:
        return isinstance(leaf, Sharded)

    leaves, treedef = jax.tree.flatten(xs, is_leaf=is_shard)
    marked = [leaf for leaf in leaves if is_shard(leaf)]
    if not marked:
        return lax.scan(body, init, xs, length, reverse, unroll)
    if any(leaf.cut.dim == 0 for leaf in marked):
        raise ValueError(
            "a stack of layers is cut along its layers, so no device has a part of each. Pass "
            "stacked= with its path to zerojax.plan."
        )
    init = jax.tree.map(jnp.asarray, init)
    loop = functools.partial(lax.scan, body, length=length, reverse=reverse, unroll=unroll)
    shapes = [leaf.full if is_shard(leaf) else leaf for leaf in leaves]
    closed, out_shape = jax.make_jaxpr(loop, return_shape=True)(init, treedef.unflatten(shapes))
    jaxpr = _compat.make_jaxpr(
        closed.jaxpr.eqns, [*closed.jaxpr.invars, *closed.jaxpr.constvars], closed.jaxpr.outvars
    )
    plain = jax.tree.leaves(init)
    inputs = [*plain, *(Held(x.data) if is_shard(x) else x for x in leaves), *closed.consts]
    kinds = [
        dataclasses.replace(x.cut, dtype=x.data.dtype) if is_shard(x) else None
        for x in (*plain, *leaves, *closed.consts)
    ]
    ahead = marked[0].how.prefetch if prefetch == "auto" else int(prefetch)
    how = dataclasses.replace(marked[0].how, regather=regather, prefetch=ahead)
    outs = evaluate(jaxpr, inputs, kinds, how)
    return jax.tree.structure(out_shape).unflatten(outs)


def _check_parts(leaves: list[Any], treedef: Any, plan: Plan) -> None:
    """Raises where these are not the parts of the plan's parameters that one device has."""
    if treedef != _params_tree(plan):
        raise ValueError(
            f"these parameters are not those of the plan: {treedef} instead of "
            f"{_params_tree(plan)}. Make a plan for them: zerojax.plan(state, stage=3)."
        )
    for value, leaf in zip(leaves, plan.params, strict=True):
        spec = leaf.rest.local
        part = NamedSharding(plan.mesh, spec).shard_shape(leaf.shape)
        if value.shape != part:
            raise ValueError(
                f"{leaf.path} is {value.shape} here, and a device's part of it is {part}. Call "
                "zerojax.shards inside jax.shard_map, with in_specs=zerojax.param_specs(plan)."
            )


def _params_tree(plan: Plan) -> Any:
    """The structure of the parameters alone."""
    numbered = plan.treedef.unflatten(range(len(plan.leaves)))
    return jax.tree.structure(get_params(numbered))
