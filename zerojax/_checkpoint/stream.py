"""Parameters leave a state: full tensors, one after another, in a bounded part of the memory.

Gains, for Llama 3 8B on 8 H100s (compiled, JAX 0.12): an inference engine gets bfloat16 tensors
under Hugging Face's names with 3.2 GiB beside the state, for the two tensors of its vocabulary,
where a whole copy takes 15 GiB. Costs 170 lines of code, and a program for each kind of tensor.

[Note: what a stream has in memory] The loop still holds the last tensor when the next is gathered.
Gathered along another dimension than its first, or brought into another layout, a tensor needs as
much memory again until it is there. So a stream counts the last one once, those that it gathers
ahead twice, with their shards, and gathers ahead while all of these fit into a chunk.
"""

import collections
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from zerojax import _compat
from zerojax._axis_types import auto_axes, auto_mesh, computed_with, typed
from zerojax._checkpoint import files as _files, names as _names
from zerojax._checkpoint.names import FileParam, Names, Source, params_of
from zerojax._declared import checked
from zerojax._kernel.arrays import layer_of
from zerojax._plan.padding import padded_param_shapes, unpadded
from zerojax._plan.plan import Plan
from zerojax._plan.resharding import check_float, check_placed
from zerojax._run import agreement as _agreement
from zerojax._specs import Entry, axes_in, names_in
from zerojax._state import refusals as _refusals, state as _state
from zerojax._state.packed import Coding
from zerojax._types import PyTree

ALIGNMENT = 1024  # bytes that XLA may add to the buffers of a parameter


class Outgoing(NamedTuple):
    """A tensor that leaves: its parts, and its full shape in the dtype in which it leaves."""

    parts: list[Source]
    struct: jax.ShapeDtypeStruct


def outgoing(
    state: PyTree,
    names: Names | None,
    dtype: DTypeLike | None,
    plan: Plan | None,
    verb: str,
    decodes: bool = True,
) -> tuple[dict[str, FileParam], dict[str, Outgoing]]:
    """Returns the parameters by their paths, and the tensors that leave, by their names.

    What rests as codes leaves as the weight or as the codes, as `names` has the path of one or the
    other; if it has neither, as the weight if `decodes`. Floats leave in `dtype`, if there is one.
    """
    check_float(dtype)
    _refusals.check_alive(state)
    named = {} if names is None else names

    def is_weight(codes: str, weight: str) -> bool:
        has_codes, has_weight = (_names.has_entry(named, name) for name in (codes, weight))
        return not has_codes and (decodes or has_weight)

    tree = _state.params_in(state)
    params = params_of(tree, padded_param_shapes(tree, state, plan), is_weight)
    if not params:
        raise ValueError(
            f"there is nothing to {verb}: you passed a {type(state).__name__} without parameters. "
            "Pass a state, or a tree of parameters."
        )
    tensors = {}
    shapes = {name: param.shape for name, param in params.items()}
    for name, parts in _names.sources(named, shapes).items():
        dtypes = {one.leaf: params[one.leaf].dtype for one in parts}
        own, *others = set(dtypes.values())
        if others:
            said = ", ".join(f"{leaf} is {own}" for leaf, own in dtypes.items())
            raise TypeError(f"names= combines dtypes in {name}: {said}. Cast them to one dtype.")
        for one in parts:
            if params[one.leaf].coding and not one.shape:
                raise ValueError(
                    f"names= counts all dimensions of {one.leaf} in {name}, and its rows are "
                    "quantized whole. Leave out the {} that counts the last one."
                )
        is_cast = dtype is not None and jnp.issubdtype(own, jnp.floating)
        new = jnp.dtype(dtype) if is_cast else own
        tensors[name] = Outgoing(parts, jax.ShapeDtypeStruct(parts[0].full, new))
    return params, tensors


def check_bytes(name: str, count: object) -> None:
    if not isinstance(count, int | float | np.number) or not count > 0:
        raise ValueError(f"{name}={count!r} must be a positive number of bytes.")


@checked
def stream(
    state: PyTree,
    *,
    names: Names | None = None,
    dtype: DTypeLike | None = None,
    chunk_bytes: float | None = None,
    plan: Plan | None = None,
) -> Iterator[tuple[str, Array]]:
    """Yields the name and the full tensor of each parameter, gathered as the loop asks for them.

    For an inference engine, a sampler, a file: whatever takes one tensor after another. A device
    has at most `chunk_bytes` more than its state, as long as the loop keeps no tensor but the last.

    Every process iterates, to the end, because all of them take part in each all-gather. Each gets
    every tensor, whole on each of its devices: `tensor.addressable_data(0)` is that of its first
    device, which other libraries take by dlpack, and `np.asarray(tensor)` copies it to the host.
    Tensors are arrays of their own, and outlive the state. Do not train until the loop has ended.

    Arguments:
        state: a placed state, or its parameters.
        names: another library's names and layouts, as in `zerojax.checkpoint.import_safetensors`.
            A stack of layers comes as one tensor unless a `{}` in its name counts them:
            `{"blocks/up": "blocks.{}.up"}`. Without an entry, the name is the path with dots. A
            quantized weight (`zerojax.quantize`) comes decoded; name the path of its bytes, such
            as `"blocks/up/nf4"`, to have these.
        dtype: cast floats to this dtype, on the shards, before they are gathered. Quantized weights
            are gathered as they are, and then decoded to it.
        chunk_bytes: the most that a device may have on top of its state; default, the least that
            suffices: one tensor while the next is gathered. More gathers ahead of the loop.
        plan: the plan, for parameters without their state, and for states that do not carry an
            optimizer (tuples, dicts), if some of these are padded.

    Example:
        >>> params = {"blocks": {"up": jnp.ones((2, 64, 16))}, "head": jnp.ones((16, 8))}
        >>> state = zerojax.shard_train_state({"params": params}, stage=3)
        >>> names = {"blocks/up": ("h.{}.up.weight", "out in -> in out")}
        >>> for name, tensor in zerojax.stream(state, names=names, dtype="bfloat16"):
        ...     print(name, tensor.dtype, tensor.shape)
        head bfloat16 (16, 8)
        h.0.up.weight bfloat16 (16, 64)
        h.1.up.weight bfloat16 (16, 64)
    """
    params, tensors = outgoing(state, names, dtype, plan, "stream")
    check_placed({name: param.value for name, param in params.items()}, "zerojax.stream")
    gathers = {name: _gather_of(one, params) for name, one in tensors.items()}
    # Layer by layer; what is in no stack comes first.
    order = sorted(gathers, key=lambda name: tensors[name].parts[0].index)
    least = _check_chunk(chunk_bytes, [(name, gathers[name]) for name in order])
    most = least if chunk_bytes is None else chunk_bytes
    shown = [f"{name} {gathers[name].dtype} of {gathers[name].parts}" for name in order]
    said = {"the tensors": "\n".join(shown), "chunk_bytes": str(most)}
    mesh = next(iter(params.values())).value.sharding.mesh
    known = _agreement.agree("zerojax.stream", lambda: said, mesh)
    return _streamed(params, {name: (tensors[name], gathers[name]) for name in order}, most, known)


def _streamed(
    params: Mapping[str, FileParam],
    tensors: Mapping[str, tuple[Outgoing, "Gather"]],
    most: float,
    known: _agreement.Known | None,
) -> Iterator[tuple[str, Array]]:
    ahead: collections.deque[tuple[str, Array, int]] = collections.deque()
    counted, held = 0, 0  # bytes of those ahead, and of the one that the loop holds
    for name, (tensor, gather) in tensors.items():
        while ahead and held + counted + gather.most_bytes > most:
            first, array, its_most = ahead.popleft()
            counted, held = counted - its_most, array.nbytes
            yield first, jax.block_until_ready(array)  # what gathering it took is free again
            del array
        values = [params[one.leaf].value for one in tensor.parts]
        _refusals.check_alive({one.leaf: params[one.leaf].value for one in tensor.parts})
        if known is not None:  # a process may train, or leave the loop, before its end
            known()
        array = _gathered(values, [one.index for one in tensor.parts], gather)
        ahead.append((name, array, gather.most_bytes))
        counted += gather.most_bytes
    while ahead:
        first, array, _ = ahead.popleft()
        yield first, jax.block_until_ready(array)
        del array


class Gather(NamedTuple):
    """How a tensor is gathered: what a program is compiled for, without names and layers."""

    # Each with the place of its parameter, and how that is written if it rests as codes.
    parts: tuple[tuple[Source, NamedSharding, Coding | None], ...]
    dtype: np.dtype
    nbytes: int
    most_bytes: int  # while it is gathered


def _gather_of(tensor: Outgoing, params: Mapping[str, FileParam]) -> Gather:
    own, new = params[tensor.parts[0].leaf].dtype, tensor.struct.dtype
    nbytes = _files.nbytes(tensor.struct)
    # See the note; several parts are put together in memory of their own.
    most, parts = nbytes * (1 + (len(tensor.parts) > 1)), []
    for one in tensor.parts:
        value, coding, depth = params[one.leaf].value, params[one.leaf].coding, len(one.index)
        place = value.sharding
        size = math.prod(value.shape[depth:])
        shard = math.prod(place.shard_shape(value.shape)[depth:])
        bytes_sent = new.itemsize if coding is None else 1
        most += size * bytes_sent + shard * (own.itemsize if coding is None else 1) + ALIGNMENT
        if names_in(place.spec[:depth]):  # summed, in 4 bytes at least
            most += 2 * size * max(4, bytes_sent)
        if coding is not None:  # decoded beside its codes
            most += math.prod(one.shape) * new.itemsize
        parts.append((one._replace(tensor="", leaf="", index=()), place, coding))
    return Gather(tuple(parts), new, nbytes, most)


def _check_chunk(chunk_bytes: float | None, gathers: Sequence[tuple[str, Gather]]) -> int:
    """Returns the least chunk in which each tensor can be gathered; raises if it may have less."""
    if chunk_bytes is not None:
        check_bytes("chunk_bytes", chunk_bytes)
    before = [("", 0), *((name, gather.nbytes) for name, gather in gathers)]
    pairs = zip(before, gathers, strict=False)
    needs = [(held + gather.most_bytes, name, last) for (last, held), (name, gather) in pairs]
    least, name, last = max(needs)
    if chunk_bytes is not None and chunk_bytes < least:
        beside = f", beside {last}, which the loop still holds" if last else ""
        raise ValueError(
            f"chunk_bytes={chunk_bytes:g} is too little: it takes {least} bytes to gather {name}"
            f"{beside}. Pass at least that. If it is a stack of layers, a {{}} in its name lets "
            "each come by itself: names={'blocks/up': 'blocks.{}.up'}."
        )
    return least


@functools.partial(jax.jit, static_argnums=2)
@auto_axes()
def _gathered(values: list[Array], indices: list[tuple[Array, ...]], gather: Gather) -> Array:
    """Returns a tensor, whole on each device. Layers are arguments: all have one program."""
    place, specs = gather.parts[0][1], [place.spec for _, place, _ in gather.parts]

    def on_each_device(values: list[Array], indices: list[tuple[Array, ...]]) -> Array:
        tensor = None
        for (part, place, coding), value, index in zip(gather.parts, values, indices, strict=True):
            if coding is None:
                whole = unpadded(_whole(value, index, place.spec, gather.dtype), part.shape)
            else:
                rows = _whole(value, index, place.spec, value.dtype)
                rows = unpadded(rows, (*part.shape[:-1], coding.row))
                whole = coding.weight_of(rows).astype(gather.dtype)
            tensor = part.put(tensor, whole)
        assert tensor is not None
        return tensor

    tensor = jax.shard_map(
        on_each_device,
        mesh=auto_mesh(place),
        in_specs=(specs, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(computed_with(values), indices)
    return typed(tensor, place.update(spec=PartitionSpec()))


def _whole(value: Array, index: Sequence[Array], spec: PartitionSpec, dtype: np.dtype) -> Array:
    """Returns one layer of a parameter, cast and then gathered, from a device's shard."""
    entries: list[Entry] = [*spec, *[None] * (value.ndim - len(spec))]
    owners = []
    for at, entry in zip(index, entries, strict=False):
        if axes := axes_in(entry):  # the layers themselves are sharded: one device has this one
            at -= lax.axis_index(axes) * len(value)
            owners.append((axes, (at >= 0) & (at < len(value))))
            at = jnp.clip(at, 0, len(value) - 1)
        value = layer_of(value, at)
    value = _compat.fetched(value)
    value = value if value.dtype == dtype else value.astype(dtype)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if is_float:  # as bits: a sum with zeros is exact, and CPUs do not widen bfloat16
        value = lax.bitcast_convert_type(value, f"uint{8 * dtype.itemsize}")
    for axes, is_mine in owners:
        value = lax.psum(jnp.where(is_mine, value, 0), axes).astype(value.dtype)  # of booleans too
    for dim, entry in enumerate(entries[len(index) :]):
        if axes := axes_in(entry):
            value = lax.all_gather(value, axes, axis=dim, tiled=True)
    return lax.bitcast_convert_type(value, dtype) if is_float else value
