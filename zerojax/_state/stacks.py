"""Finds the parameters that are stacks of layers, by their shapes."""

import re
from collections import Counter
from collections.abc import Mapping

import jax
import numpy as np

from zerojax._state.annotations import is_box
from zerojax._state.state import (
    PARAMS,
    Leaf,
    check_is_pattern,
    leaves_with_paths,
    matching,
)
from zerojax._types import PyTree

NUMBER = re.compile(r"\d+(?=/|$)")  # at the end of a part of a path
MOST_LAYERS = 256  # a longer first dimension counts something else


def layer_dims(params: PyTree, pattern: str | None) -> dict[tuple, int]:
    """Returns, by path, how many leading dimensions count layers.

    It is 1 for what a `scan` over layers runs over, 2 for loops within loops. The loss is not
    known yet, so only shapes can tell: a stack is a subtree of at least two leaves that share their
    leading size, one of them at least a stacked matrix. Where `pattern` is given, it decides. A
    wrong guess only moves the shard to the next dimension.
    """
    leaves = leaves_with_paths(params)
    if pattern is not None:
        names = {leaf.path: leaf.name for leaf in leaves}
        check_is_pattern(pattern, "stacked=")
        pattern = pattern.removeprefix(f"{PARAMS}/")  # as messages write paths
        return dict.fromkeys(matching(pattern, names, "stacked="), 1)
    found = dict.fromkeys(_boxed_layers(params), 1)

    # By name: Haiku has all modules of a stack at one level, 'stack/norm' and 'stack/linear'.
    parts = {leaf.path: leaf.name.split("/") for leaf in leaves}

    def walk(depth: int, group: list[Leaf]) -> None:
        shapes = [np.shape(leaf.value) for leaf in group]
        if len(group) >= 2 and _is_stack(shapes):
            dims = 2 if _is_stack([shape[1:] for shape in shapes]) else 1
            found.update(dict.fromkeys((leaf.path for leaf in group), dims))
            return
        children: dict[str, list[Leaf]] = {}
        for leaf in group:
            if len(parts[leaf.path]) > depth:
                children.setdefault(parts[leaf.path][depth], []).append(leaf)
        for child in children.values():
            walk(depth + 1, child)

    walk(0, leaves)
    return found


def in_a_python_loop(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns how many layers have matrices of their own, by the paths of these: as many as differ
    in one number alone."""
    found: Counter[tuple] = Counter()
    for path, shape in shapes.items():
        for number in NUMBER.finditer(path) if len(shape) >= 2 else ():
            found[path[: number.start()], path[number.end() :], shape] += 1
    return max(found.values(), default=0)


def _is_stack(shapes: list[tuple[int, ...]]) -> bool:
    if not all(shapes) or max(map(len, shapes)) < 3:
        return False
    return len({s[0] for s in shapes}) == 1 and 1 < shapes[0][0] <= MOST_LAYERS


def is_stack(leaf: Leaf, stacks: Mapping[tuple, int]) -> bool:
    """Whether a leaf of a state is one of these stacks of layers, or follows such a parameter."""
    path = leaf.path[1:]
    if leaf.kind == PARAMS:
        return path in stacks
    return any(path[-len(stack) :] == stack for stack in stacks)


def _boxed_layers(params: PyTree) -> set[tuple]:
    """Returns the leaves that flax's `nn.scan` has boxed with a name for layers at dimension 0."""
    found = set()
    for path, node in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_box)[0]:
        names = getattr(node, "names", None) if is_box(node) else None
        if names and isinstance(names[0], str) and "layer" in names[0]:
            found |= {(*path, *leaf.path) for leaf in leaves_with_paths(node)}
    return found
