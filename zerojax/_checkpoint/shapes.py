"""Keeps padding out of files: which leaves are padded, and how what Orbax wrote loses its padding.

[Note: padding in files]
Orbax writes each device's shard as chunks of a zarr array, padding and all. A zarr array may end in
the middle of a chunk, so once all is written the padding is dropped by writing a shorter shape into
the array's header. No data moves. Chunks of nothing but padding are removed.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
import tensorstore as ts  # which Orbax writes with
from etils import epath

from zerojax._plan.layout import Layout, LeafPlan
from zerojax._plan.plan import Plan, check_plan
from zerojax._state import carried as _carried, state as _state
from zerojax._state.state import Leaf
from zerojax._types import PyTree

Shape: TypeAlias = tuple[int, ...]

HEADER = ".zarray"
SHARDINGS = "_sharding"  # Orbax's file of where each leaf was, for those who restore without `like`


def padded_leaves(tree: PyTree, plan: Plan | None = None) -> dict[str, Shape]:
    """Returns the logical shapes of the padded leaves of a tree, by name.

    The states in the tree carry their plans; `plan` is for a tree that is a state without one.
    """
    if plan is not None and not _has_plan(tree):
        check_plan(plan, "plan=")
        plan.check_structure(tree)
        return _padded(_state.leaves_with_paths(tree), _planned(plan.leaves))
    found: dict[str, Shape] = {}
    for path, part in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_plan)[0]:
        if _has_plan(part):
            planned = _planned(_carried.carried_plan(part).leaves)
            named = _padded(_state.leaves_with_paths(part), planned)
            prefix = f"{_state.path_name(path)}/" if path else ""
            found |= {prefix + name: shape for name, shape in named.items()}
    return found


def padded_params(params: PyTree, state: PyTree, plan: Plan | None = None) -> dict[str, Shape]:
    """Returns the logical shapes of the padded parameters of a state, by their names among these.

    `plan` is for a state without one, or for parameters in place of a state.
    """
    layout: Layout | None = _carried.carried_plan(state)
    if layout is None and plan is not None:
        check_plan(plan, "plan=")
        plan.check_params(params)
        layout = plan
    if layout is None:
        return {}
    planned = {name.partition("/")[2]: leaf for name, leaf in _planned(layout.params).items()}
    return _padded(_state.leaves_with_paths(params), planned)


def _has_plan(node: object) -> bool:
    return _carried.carried_plan(node) is not None


def _planned(leaves: Iterable[LeafPlan]) -> dict[str, LeafPlan]:
    """Returns, by name, the leaves that rest padded."""
    return {leaf.path: leaf for leaf in leaves if leaf.rest.padding}


def _padded(leaves: list[Leaf], planned: Mapping[str, LeafPlan]) -> dict[str, Shape]:
    """Returns the logical shapes of leaves that a plan pads.

    A state may carry its plan and have other leaves by now, or leaves without their padding.
    """
    pairs = ((leaf, planned.get(leaf.name)) for leaf in leaves)
    return {
        leaf.name: plan.shape
        for leaf, plan in pairs
        if plan is not None and np.shape(leaf.value) == plan.padded_shape
    }


def drop_padding(directory: epath.Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Gives arrays that Orbax wrote their logical shapes, by their names in its files."""
    if not shapes:
        return
    where = str(directory)
    base = f"{where}/" if "://" in where else {"driver": "file", "path": f"{where}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    dims: dict[str, int] = {}
    with ts.Transaction(atomic=True) as all_at_once:  # one by one, each would write the index
        edited = store.with_transaction(all_at_once)
        for name, shape in shapes.items():
            header = json.loads(store[f"{name}/{HEADER}"])
            dims[name] = _differs(header["shape"], shape)
            for key in _chunks_beyond(store, name, header["chunks"], shape):
                del edited[key]
            edited[f"{name}/{HEADER}"] = json.dumps({**header, "shape": list(shape)}).encode()
    _replicate(directory / SHARDINGS, dims)


def _differs(padded: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the dimension that is padded."""
    return next(d for d, (have, want) in enumerate(zip(padded, shape, strict=True)) if have != want)


def _chunks_beyond(
    store: ts.KvStore, name: str, chunk: Sequence[int], shape: Sequence[int]
) -> list[str]:
    """Returns the keys of an array's chunks that start where its logical shape has ended."""
    prefix, after = f"{name}/", f"{name}0"  # "0" is what follows "/"
    keys = store.list(ts.KvStore.KeyRange(prefix, after), len(prefix)).result()
    chunks = [key.decode() for key in keys if key.decode() != HEADER]
    return [
        prefix + key
        for key in chunks
        if any(int(i) * c >= n for i, c, n in zip(key.split("."), chunk, shape, strict=True))
    ]


def _replicate(file: epath.Path, dims: Mapping[str, int]) -> None:
    """Has Orbax, where it is told no sharding, replicate dimensions that no longer divide.

    It would otherwise ask JAX for the sharding that the padded array had, which JAX refuses.
    """
    noted = json.loads(file.read_text())
    for name, dim in dims.items():
        key = base64.urlsafe_b64encode(name.encode()).decode()
        sharding = json.loads(noted[key])
        sharding["partition_spec"][dim] = None
        noted[key] = json.dumps(sharding)
    file.write_text(json.dumps(noted))
