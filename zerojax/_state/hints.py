"""Hints that the parameters of a state give: annotated mesh axes, and stacks of layers.

linen boxes a weight with its axes (`nn.with_partitioning`, `nn.with_logical_partitioning`); nnx
has them in a variable's metadata. Names may be logical. The model's own rules translate them, or
those in force (`nn.logical_axis_rules`).
"""

import collections
from collections.abc import Collection, Sequence

import jax
import numpy as np
from flax.core import meta, spmd
from jax.sharding import PartitionSpec

from zerojax._specs import Entry, axes_in, names_in
from zerojax._state.state import PARAMS, Leaf, finds, leaves_with_paths, matching, path_name
from zerojax._types import PyTree, Shape

MOST_LAYERS = 256  # a longer first dimension counts something else


def own_axes(
    state: PyTree, axes: Sequence[str], mesh_axes: Sequence[str]
) -> list[tuple[PartitionSpec, tuple[str, ...], tuple[str, ...]]]:
    """Returns the axes of each leaf of a state beside ZeRO's `axes`, those that the mesh lacks, and
    those that are ZeRO's too.

    The axes are those of its annotation or, if the mesh has none of these, of its placement. The
    last are some of several: what names all of them, or the only one, is sharded as ZeRO does.
    """
    free, own = {*mesh_axes} - {*axes}, []
    specs: dict[str, PartitionSpec] = getattr(state, "annotations", {})

    def free_in(entry: Entry) -> Entry:
        return tuple(name for name in axes_in(entry) if name in free)

    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_box)[0]:
        names = _spec_of(node) if _is_box(node) else specs.get(path_name(path))
        annotation = [None if e is PartitionSpec.UNCONSTRAINED else e for e in names or ()]
        for value in jax.tree.leaves(node):
            placed = tuple(getattr(getattr(value, "sharding", None), "spec", None) or ())
            over = annotation if free.intersection(names_in(annotation)) else placed
            spec = PartitionSpec(*map(free_in, over[: np.ndim(value)]))
            taken = names_in(annotation).intersection(axes)
            taken = taken if len(taken) < len(axes) else ()
            absent = names_in(annotation) - {*mesh_axes}
            own.append((spec, tuple(sorted(absent)), tuple(sorted(taken))))
    return own


def _is_box(node: object) -> bool:
    return isinstance(node, meta.AxisMetadata)


def _spec_of(box: PyTree) -> PartitionSpec | None:
    """Returns the axes that linen's box names, translated by the rules."""
    names: PyTree = getattr(box, "get_partition_spec", lambda: None)()
    rules = getattr(box, "rules", None) or spmd.get_logical_axis_rules()
    if names is None or not hasattr(box, "rules") or not rules:
        return names
    from flax.linen.spmd import logical_to_mesh_axes  # which made the box

    return logical_to_mesh_axes(names, rules)


def axes_of_rules() -> set[str]:
    """Returns the mesh axes in the rules in force."""
    return names_in(axes for _, axes in spmd.get_logical_axis_rules())


# -- stacks of layers


def layer_dims(
    params: PyTree, pattern: str | tuple[()] | None, experts: Collection[tuple] = ()
) -> dict[tuple, int]:
    """Returns, by path, how many leading dimensions count layers.

    It is 1 for the stack of a `scan` over layers, 2 for loops within loops. The loss is not known
    yet, so only shapes can tell: a stack is a subtree of at least two leaves with the same leading
    size, one of them at least a stacked matrix. A weight of `experts` has a dimension more, and so
    counts as one without its last. If there is a `pattern`, it decides; () is that of no leaf. A
    wrong guess only moves the shard to the next dimension.
    """
    if isinstance(pattern, tuple) and not pattern:
        return {}
    leaves = leaves_with_paths(params)
    if pattern is not None:
        finds(pattern, "", "stacked=")  # raises for a wrong pattern
        names = {leaf.path: leaf.name for leaf in leaves}
        pattern = pattern.removeprefix(f"{PARAMS}/")  # with which messages write paths
        return dict.fromkeys(matching(pattern, names, "stacked="), 1)
    dims: dict[tuple, int] = {}
    # Flax's `nn.scan` has boxed a leaf with a layer's name for dimension 0.
    for path, node in jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_box)[0]:
        names = getattr(node, "names", None) if _is_box(node) else None
        if names and isinstance(names[0], str) and "layer" in names[0]:
            dims |= {(*path, *leaf.path): 1 for leaf in leaves_with_paths(node)}

    def walk(depth: int, group: list[Leaf]) -> None:
        shapes = [np.shape(x.value)[: -1 if x.path in experts else None] for x in group]
        if len(group) >= 2 and _is_stack(shapes):
            both = _is_stack([shape[1:] for shape in shapes])
            dims.update(dict.fromkeys((leaf.path for leaf in group), 1 + both))
            return
        # By name: Haiku has all modules of a stack at one level, 'stack/norm' and 'stack/linear'.
        children: dict[str, list[Leaf]] = collections.defaultdict(list)
        for leaf in group:
            for part in leaf.name.split("/")[depth : depth + 1]:
                children[part].append(leaf)
        for child in children.values():
            walk(depth + 1, child)

    walk(0, leaves)
    return dims


def _is_stack(shapes: list[Shape]) -> bool:
    if not all(shapes) or max(map(len, shapes)) < 3:
        return False
    return len({s[0] for s in shapes}) == 1 and 1 < shapes[0][0] <= MOST_LAYERS


def is_of_some(leaf: Leaf, params: Collection[tuple]) -> bool:
    """Whether a leaf of a state is one of these parameters, or follows one."""
    path = leaf.path[1:]
    if leaf.kind == PARAMS:
        return path in params
    return any(path[-len(param) :] == param for param in params)
