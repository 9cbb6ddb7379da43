"""Which parameters are stacks of layers, read off their shapes."""

from typing import Any

import jax
import numpy as np

from zerojax._state.state import is_box, matching, path_name

MOST_LAYERS = 256  # a longer first dimension counts something else


def layer_dims(params: Any, pattern: str | None) -> dict[tuple, int]:
    """By path, how many first dimensions count layers, as `scan` over layers wants: 1, or 2 for
    loops within loops.

    Nobody has seen the loss yet, so this reads shapes only: a subtree of at least two leaves
    that share their leading size, one of them at least a stacked matrix. `pattern` decides
    instead where given. A wrong guess only moves the shard to the next dimension.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    if pattern is not None:
        names = {p: path_name(p) for p, _ in leaves}
        return dict.fromkeys(matching(pattern, names, "stacked="), 1)
    found = dict.fromkeys(_boxed_layers(params), 1)

    # By name: Haiku has all the modules of a stack side by side, 'stack/norm', 'stack/linear'.
    parts = {path: path_name(path).split("/") for path, _ in leaves}

    def walk(depth: int, group: list[tuple[tuple, Any]]) -> None:
        shapes = [np.shape(v) if not hasattr(v, "shape") else v.shape for _, v in group]
        if len(group) >= 2 and _is_stack(shapes):
            dims = 2 if _is_stack([s[1:] for s in shapes]) else 1
            found.update(dict.fromkeys((p for p, _ in group), dims))
            return
        children: dict[str, list] = {}
        for path, value in group:
            if len(parts[path]) > depth:
                children.setdefault(parts[path][depth], []).append((path, value))
        for child in children.values():
            walk(depth + 1, child)

    walk(0, leaves)
    return found


def _is_stack(shapes: list[tuple[int, ...]]) -> bool:
    if not all(shapes) or max(map(len, shapes)) < 3:
        return False
    return len({s[0] for s in shapes}) == 1 and 1 < shapes[0][0] <= MOST_LAYERS


def _boxed_layers(params: Any) -> set[tuple]:
    """The leaves in whose boxes flax's `nn.scan` wrote that dimension 0 counts layers."""
    found = set()
    for path, node in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_box)[0]:
        names = getattr(node, "names", None) if is_box(node) else None
        if names and isinstance(names[0], str) and "layer" in names[0]:
            found |= {(*path, *p) for p, _ in jax.tree_util.tree_flatten_with_path(node)[0]}
    return found
