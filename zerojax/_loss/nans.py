"""Finds the first bad value of a step under `jax_debug_nans` and `jax_debug_infs`.

After a bad result, JAX runs a jitted function again without `jit`, on values, until an operation
fails. It cannot do so with a `shard_map` whose inputs are bad (it recurses until Python stops it),
nor with a loss that was traced already.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from zerojax._loss import batch as _batch
from zerojax._plan.plan import Plan
from zerojax._state.packed import weights_of
from zerojax._state.state import PARAMS, leaves_with_paths
from zerojax._types import PyTree


def run(
    function: Callable[..., PyTree], inputs: Sequence[PyTree], explain: Callable[[], None]
) -> PyTree:
    """Returns `function(*inputs)`, and calls `explain` if it has a value that JAX looks for."""
    if not any(_sought()) or any(isinstance(v, Tracer) for v in jax.tree.leaves(inputs)):
        return function(*inputs)
    with jax.debug_nans(False), jax.debug_infs(False):
        outputs = function(*inputs)
    if _bad_leaves(outputs):
        explain()
    return outputs


def _sought() -> tuple[bool, bool]:
    """Returns whether JAX looks for NaNs, and for infinities."""
    return jax.config.jax_debug_nans, jax.config.jax_debug_infs  # pyright: ignore


def _bad_leaves(tree: PyTree) -> list[str]:
    """Returns the paths of leaves with values that JAX looks for."""
    nans, infs = _sought()

    def is_bad(value: PyTree) -> bool:
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            return False
        parts = [shard.data for shard in getattr(value, "addressable_shards", ())] or [value]
        arrays = [np.asarray(part).astype(np.complex128) for part in parts]
        return any((nans and np.isnan(a).any()) or (infs and np.isinf(a).any()) for a in arrays)

    return [leaf.name for leaf in leaves_with_paths(tree) if is_bad(leaf.value)]


def explain(
    loss_fn: Callable[..., PyTree],
    plan: Plan,
    params: PyTree,
    args: Sequence[PyTree],
    roles: Sequence[_batch.Role],
) -> None:
    """Raises for bad inputs; otherwise runs the loss op by op, as it was written."""
    params = weights_of(plan._logical_part(params, PARAMS))
    named = {PARAMS: params, "batch": args[0]}
    if bad := _bad_leaves(named | {f"argument {i}": a for i, a in enumerate(args[1:], 3)}):
        raise FloatingPointError(
            f"the step got values that are not finite, in {', '.join(bad[:3])}, and its results "
            "are not finite either. Look at the batch, or at the step before; with this check "
            "off, skip_nonfinite=True skips such steps."
        )
    if plan.mesh.is_multi_process:  # the others may have found nothing, and continue
        raise FloatingPointError(
            "the step has results that are not finite in this process. Run it in one process, "
            "which runs the loss again op by op to find the line."
        )
    specs = [_batch.spec(role._replace(tokens=None), plan._splits) for role in roles]
    jax.shard_map(
        lambda params, args: jax.tree.leaves(loss_fn(params, *args))[0],
        mesh=plan.mesh,
        in_specs=(PartitionSpec(), jax.tree.structure(tuple(args)).unflatten(specs)),
        out_specs=PartitionSpec(),
        axis_names=set(plan.batch_axes),
        check_vma=False,
    )(params, tuple(args))
    raise FloatingPointError(
        "a value that is not finite appears in the derivatives of the loss, whose own operations "
        "are all fine. Look for square roots, norms, divisions and powers at 0."
    )
