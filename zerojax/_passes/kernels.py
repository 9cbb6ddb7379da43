"""The rule for Pallas kernels: each device runs its share of one axis of the grid.

Maps of indices say which block of each array a kernel has at each place of its grid. Where blocks
move along with an axis of the grid, such as heads or rows of tokens, that axis may be cut.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportPrivateImportUsage=false

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from zerojax import _compat
from zerojax._jaxprs import Eqn, inferred, primitives, type_of, unclosed, with_params
from zerojax._passes.block_runner import KEYS, BlockRunner, Ruled, Tracked
from zerojax._passes.blocks import Blocks, with_
from zerojax._types import PyTree, Shape

KERNEL = "pallas_call"
# What asks where in the grid it runs, or how large that is.
OF_A_PLACE = primitives("program_id num_programs")
WRITES = "WriteEffect", "AccumEffect"  # of a kernel, into an array
CutDims = list[int | None]  # which dimension of each operand and result an axis of the grid cuts


class _UncutError(Exception):
    """Places along an axis of a grid do not do the same to blocks that follow each other."""


def shared(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], _: Blocks) -> Ruled:
    """A kernel, along the axis of its grid for which the least travels."""
    natural, size = list(map(s.natural, operands)), s.axis.size
    if not all(at is None or at.is_plain for at in natural):
        return None
    tokens = {at.length(v.shape) for v, at in zip(operands, natural, strict=True) if at}
    cuts = list[tuple[float, int, CutDims]]()
    for axis in range(len(Eqn(eqn).grid_mapping.grid)):
        try:
            dims = _dims(eqn, axis, size)
        except _UncutError:
            continue
        triples = zip(operands, natural, dims, strict=False)
        moved = [(v, dim) for v, at, dim in triples if at and at.dim != dim]
        sent = sum(v.nbytes / (1 if dim is None else size) for v, dim in moved)
        cuts.append((sent, axis, dims))
    if not cuts:
        return None
    axis, dims = min(cuts, key=lambda cut: cut[0])[1:]

    def place(dim: int | None, shape: Shape) -> Blocks | None:
        if dim is None:
            return None
        home = next((Blocks(d) for d, n in enumerate(shape) if n in tokens), None)
        return Blocks(dim, home=None if shape[dim] in tokens else home)

    shapes = [type_of(v).shape for v in (*eqn.invars, *eqn.outvars)]
    places = list(map(place, dims, shapes))
    count, share = len(operands), _on_share(eqn, axis, dims, size)
    return s.bound(share, operands, places[:count], places[count:], KEYS)


def _dims(eqn: JaxprEqn, axis: int, size: int) -> CutDims:
    """Returns what an axis of a kernel's grid cuts; raises where devices cannot share that axis."""
    params, (jaxpr, _) = Eqn(eqn), _compat.inner_jaxpr(eqn)
    mapping = params.grid_mapping
    count, numbers = mapping.grid[axis], range(len(mapping.grid))
    in_kernel = [k for k in numbers if k not in mapping.vmapped_dims]
    asks = (e for e in _compat.every_eqn(jaxpr) if e.primitive.name in OF_A_PLACE)
    asked = {in_kernel[Eqn(e).axis] for e in asks}
    is_even = all(isinstance(n, int) for n in mapping.grid) and count % size == 0
    is_other = mapping.num_index_operands or mapping.grid_names or params.mesh
    if axis in asked or not is_even or is_other:
        raise _UncutError
    # Scratch memory has at each place what the one before left there.
    semantics = getattr(params.compiler_params, "dimension_semantics", None) or ()
    kinds = map(str, semantics if len(semantics) == len(in_kernel) else ())
    parallel = {k for k, kind in zip(in_kernel, kinds, strict=False) if "parallel" in kind.lower()}
    if mapping.scratch_avals and axis not in parallel.union(mapping.vmapped_dims):
        raise _UncutError
    dims = [_dim(block, axis, count, size) for block in mapping.block_mappings]
    inputs, outputs = dims[: mapping.num_inputs], dims[mapping.num_inputs :]
    names = zip(jaxpr.invars, inputs, strict=False)
    written = {e.input for e in jaxpr.effects if type(e).__name__ in WRITES}  # type: ignore
    # Each place adds to the same array.
    if None in (*outputs, *(dim for name, dim in names if name in written)):
        raise _UncutError
    if any(inputs[k] != outputs[n] for k, n in params.input_output_aliases):
        raise _UncutError
    return dims


def _dim(block: PyTree, axis: int, count: int, size: int) -> int | None:
    """Returns which dimension of an array moves along an axis of the grid, if one does. A Pallas
    `BlockMapping` says how the kernel sees the array."""
    jaxpr, consts = unclosed(block.index_map_jaxpr)

    def union(_: JaxprEqn, facts: Iterable[frozenset[int]]) -> list[frozenset[int]]:
        return [frozenset[int]().union(*facts)]

    inputs = [frozenset({k}) for k, _ in enumerate(jaxpr.invars)]
    reads = inferred(jaxpr, inputs, frozenset[int](), union)
    moving = [dim for dim, axes in enumerate(reads) if axis in axes]
    if not moving:
        return None
    dim, kind = moving[0], block.block_shape[moving[0]]
    width = {"Squeezed": 1, "Blocked": getattr(kind, "block_size", 1)}.get(type(kind).__name__)
    if len(moving) > 1 or len(reads[dim]) > 1 or consts or block.transforms or not width:
        raise _UncutError

    def number(place: jax.Array) -> jax.Array:
        places = [place if k == axis else 0 for k, _ in enumerate(jaxpr.invars)]
        return _compat.run_jaxpr(jaxpr, places)[dim]

    with jax.ensure_compile_time_eval():
        numbers = np.asarray(jax.vmap(number)(jnp.arange(count)))
    blocks, rest = divmod(block.array_aval.shape[dim], width * size)
    first, starts = numbers[: count // size], blocks * np.arange(size)[:, None]
    follow = numbers.reshape(size, -1) == first + starts
    if rest or not follow.all() or not ((first >= 0) & (first < blocks)).all():
        raise _UncutError
    return dim


def _on_share(eqn: JaxprEqn, axis: int, dims: CutDims, size: int) -> JaxprEqn:
    """Returns a kernel for one device's share of an axis of its grid."""

    def cut(aval: ShapedArray, dim: int | None) -> ShapedArray:
        if dim is None:
            return aval
        return aval.update(shape=with_(aval.shape, dim, aval.shape[dim] // size))

    mapping, outs = Eqn(eqn).grid_mapping, map(type_of, eqn.outvars)
    pairs = zip(mapping.block_mappings, dims, strict=True)
    blocks = [dataclasses.replace(b, array_aval=cut(b.array_aval, dim)) for b, dim in pairs]
    grid = with_(mapping.grid, axis, mapping.grid[axis] // size)
    mapping = dataclasses.replace(mapping, grid=grid, block_mappings=tuple(blocks))
    out_avals = tuple(map(cut, outs, dims[mapping.num_inputs :]))
    return with_params(eqn, grid_mapping=mapping, out_avals=out_avals)
