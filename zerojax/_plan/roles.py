"""What the leaves of an optimizer state are, where it is kept in 8 bits."""

import jax
import optax

from zerojax._plan.kept import CodedState, MasterState, SplitState
from zerojax._plan.precision import is_float
from zerojax._types import PyTree

MASTER, CORRECTION, CODED, SCALES, WIDE = "master", "correction", "codes", "scales", "wide"


def roles_of(tree: PyTree) -> list[str]:
    """Returns, for each leaf, what it is of an optimizer state in 8 bits: one of these roles.

    It is WIDE if it is a float array beside codes, and "" if it is none of these.
    """
    kinds = MasterState, SplitState, CodedState
    roles = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds)):
        if not isinstance(node, kinds):
            roles.append("")
        elif isinstance(node, CodedState):
            inner, treedef = jax.tree.flatten(node.inner)
            scales = treedef.flatten_up_to(node.scales)
            own = zip(inner, roles_of(node.inner), scales, strict=True)
            roles += ["", *(role or _role(leaf, scale) for leaf, role, scale in own)]
            roles += [SCALES] * len(jax.tree.leaves(node.scales))
        else:
            kept = [MASTER] * len(jax.tree.leaves(node[-2]))
            if isinstance(node, SplitState):
                kept = ["", *[CORRECTION] * len(kept)]
            roles += [*kept, *roles_of(node.inner)]
    return roles


def _role(leaf: PyTree, scale: PyTree) -> str:
    if not isinstance(scale, optax.MaskedNode):
        return CODED
    return WIDE if is_float(leaf) and leaf.shape else ""
