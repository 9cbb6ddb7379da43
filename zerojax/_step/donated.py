"""A jitted step that donates its state, and writes nothing over what it needs to the end.

`jax.jit` donates whole arguments, and XLA may write over what is donated. So here each leaf is an
argument. Those leaves are not donated but deleted: JAX frees them when the program has ended.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from zerojax._types import PyTree


class PartlyDonated:
    """Like `jax.jit(function, donate_argnums=0)`; the leaves at `kept` are read to the end."""

    def __init__(
        self, function: Callable[..., PyTree], kept: Collection[int], options: Any
    ) -> None:
        self.function, self.kept, self.options = function, kept, options
        self.whole: Any = jax.jit(function, compiler_options=options)
        self.by_tree: dict[Any, tuple[Any, list[int]]] = {}

    def _flat(self, args: tuple, named: dict[str, PyTree]) -> tuple[PyTree, list[int], list]:
        """Returns the function of leaves, which of them it keeps, and the leaves."""
        leaves, treedef = jax.tree.flatten((args, named))
        if treedef not in self.by_tree:

            def flat(*leaves: Any) -> PyTree:
                args, named = treedef.unflatten(leaves)
                return self.function(*args, **named)

            args, named = treedef.unflatten(range(len(leaves)))
            bound = inspect.signature(self.function).bind(*args, **named).arguments
            paths = jax.tree_util.tree_leaves_with_path(dict(bound))
            names = {at: path[0].key + jax.tree_util.keystr(path[1:]) for path, at in paths}
            flat.__name__ = self.function.__name__
            _name_arguments(flat, [names[at] for at in range(len(leaves))])
            state = jax.tree.leaves(next(iter(bound.values())))
            kept = [state[k] for k in self.kept]
            donated = [at for at in state if at not in kept]
            jitted = jax.jit(flat, donate_argnums=donated, compiler_options=self.options)
            self.by_tree[treedef] = jitted, kept
        return *self.by_tree[treedef], leaves

    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        jitted, kept, leaves = self._flat(args, named)
        results = jitted(*leaves)
        for at in kept:
            leaves[at].delete()
        return results

    def lower(self, *args: PyTree, **named: PyTree) -> jax.stages.Lowered:
        """Lowers it. Compiled, it takes the arguments as this function does."""
        jitted, _, leaves = self._flat(args, named)
        lowered = jitted.lower(*leaves)
        infos = jax.tree.leaves(lowered.args_info)
        lowered.args_info = jax.tree.structure((args, named)).unflatten(infos)
        return lowered

    def trace(self, *args: PyTree, **named: PyTree) -> jax.stages.Traced:
        return self.whole.trace(*args, **named)

    def clear_cache(self) -> None:
        for jitted in (self.whole, *(jitted for jitted, _ in self.by_tree.values())):
            jitted.clear_cache()

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted, _ in self.by_tree.values())


class Named(inspect.Signature):
    """The signature of a function of any arguments, which JAX calls by these names."""

    names: Sequence[str]

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        bound = super().bind(*args, **kwargs)
        bound.arguments = dict(zip(self.names, args, strict=True))
        return bound


def _name_arguments(function: Callable[..., PyTree], names: Sequence[str]) -> None:
    """Names the arguments of a function `(*args)` in its programs, by which an audit knows them."""
    signature = Named([*inspect.signature(function).parameters.values()])
    signature.names = names
    function.__signature__ = signature  # type: ignore
