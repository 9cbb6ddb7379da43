"""The mesh axes that a model's weights are annotated with, in Flax's ways of saying so.

linen boxes a weight with its names (`nn.with_partitioning`, `nn.with_logical_partitioning`); nnx
has them in a variable's metadata. Names may be logical, and rules say what they stand for: the
model's own, or those in force (`nn.logical_axis_rules`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax.core import meta, spmd
from jax.sharding import PartitionSpec

from zerojax._state.state import path_name
from zerojax._types import PyTree
from zerojax._wire.routes import Entry, names_in


class Named(NamedTuple):
    """The axes that a leaf is sharded over beside ZeRO's, and those that the mesh lacks."""

    spec: PartitionSpec
    absent: tuple[str, ...]


def own_axes(state: PyTree, axes: Sequence[str], mesh_axes: Sequence[str]) -> list[Named]:
    """Returns, for each leaf of a state, the axes other than ZeRO's `axes` that it is annotated
    with, or, where these are not in the mesh, that it is placed over already."""
    free = {*mesh_axes} - {*axes}

    def own(value: PyTree, annotation: tuple[Entry, ...]) -> Named:
        placed = tuple(getattr(getattr(value, "sharding", None), "spec", None) or ())
        over = annotation if free.intersection(names_in(annotation)) else placed
        spec = PartitionSpec(*(_within(entry, free) for entry in over[: np.ndim(value)]))
        return Named(spec, tuple(sorted(names_in(annotation) - {*mesh_axes})))

    return [own(*pair) for pair in annotated(state)]


def _within(entry: Entry, axes: set[str]) -> Entry:
    names = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(name for name in names if name in axes)


def annotated(state: PyTree) -> list[tuple[PyTree, tuple[Entry, ...]]]:
    """Returns each leaf of a state with the entries of its annotation; none where it has none."""
    specs: dict[str, PartitionSpec] = getattr(state, "annotations", {})
    return [
        (value, tuple(None if e is PartitionSpec.UNCONSTRAINED else e for e in spec or ()))
        for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_box)[0]
        for spec in [spec_of(node) if is_box(node) else specs.get(path_name(path))]
        for value in jax.tree.leaves(node)
    ]


def is_box(node: object) -> bool:
    return isinstance(node, meta.AxisMetadata)


def spec_of(box: PyTree) -> PartitionSpec | None:
    """Returns the axes that linen's box names, as the rules have them."""
    names: PyTree = getattr(box, "get_partition_spec", lambda: None)()
    if names is None or not hasattr(box, "rules"):
        return names
    rules = box.rules or spmd.get_logical_axis_rules()
    if not rules:
        return names
    from flax.linen.spmd import logical_to_mesh_axes  # which made the box

    return logical_to_mesh_axes(names, rules)


def axes_of_rules() -> set[str]:
    """Returns the mesh axes that the rules in force name."""
    return names_in(axes for _, axes in spmd.get_logical_axis_rules())
