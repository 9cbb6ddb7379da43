"""A state that a function makes while it is traced.

[Note: what a made state keeps] The function is traced so that its arrays are made where they rest.
The static fields of the state, its optimizer and `apply_fn`, outlive that trace. Functions in them
may close over arrays that `make_state` has computed, such as a rate `jnp.float32(0.1)` or the table
of a schedule. These are tracers, which mean nothing after the trace. They are found wherever Python
objects keep them, computed at once by a program of nothing else, and their values are put in their
place. Of the state's own arrays, one device has those alone that its static fields keep too.
"""

import contextlib
import functools
import gc
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from zerojax._state.state import shape_dtype
from zerojax._types import PyTree

Replace = Callable[[Tracer], Any]

# What leads to all modules, or to nothing that outlives a trace.
_CLOSED = (type, types.ModuleType, types.FrameType, types.TracebackType, types.GeneratorType)


def state_of(make_state: Callable[[], PyTree]) -> PyTree:
    """Returns the state that a function makes, without tracers in its static fields.

    The function is called once, in a trace of its own: what it caches, or sets on an object, has
    tracers of this call, and those of another would not be the same.
    """
    made: list[tuple[PyTree, list[bool], list[int]]] = []

    def arrays() -> tuple[list[Tracer], list[Tracer]]:
        state = make_state()
        leaves, fields = jax.tree.leaves(state), _static(state)
        kept = _kept(fields)
        # Not the leaves, which must not outlive this trace.
        made.append((fields, [isinstance(x, Tracer) for x in leaves], list(map(id, kept))))
        return [x for x in leaves if isinstance(x, Tracer)], kept

    run = jaxpr_as_fun(jax.make_jaxpr(arrays)())
    fields, traced, kept = made[0]
    if kept:
        # XLA leaves out what they do not need. Compiled first, it runs now, not in the outer trace.
        values = jax.jit(lambda: run()[-len(kept) :]).lower().compile()()
        known = dict(zip(kept, values, strict=True))
        fields = _Replacing(lambda tracer: known[id(tracer)]).over(fields)
    leaves, treedef = jax.tree.flatten(fields)
    # A constant comes out as JAX's own literal, which in 0.10 may have no shape.
    found, pairs = map(jnp.asarray, run()), zip(leaves, traced, strict=True)
    return treedef.unflatten(next(found) if is_traced else leaf for leaf, is_traced in pairs)


def _kept(fields: PyTree) -> list[Tracer]:
    """Returns the tracers that the static fields of a state keep, in an order of their own."""
    found: dict[int, Tracer] = {}
    if _reaches_tracer(fields):
        _Replacing(lambda tracer: found.setdefault(id(tracer), tracer)).over(fields)
    return list(found.values())


def _reaches_tracer(fields: PyTree) -> bool:
    """Whether a tracer is found by following references, at the garbage collector's speed.

    Most states keep none, and may lead to a data set, or to objects that run code when they are
    asked for an attribute.
    """
    seen, found = set[int](), [fields]
    while found:
        if any(isinstance(node, Tracer) for node in found):
            return True
        new = {id(node): node for node in found if gc.is_tracked(node) and id(node) not in seen}
        seen.update(new)
        found = gc.get_referents(*map(_inside_of, new.values()))
    return False


def _inside_of(node: Any) -> Any:
    if isinstance(node, _CLOSED):
        return None
    if isinstance(node, types.FunctionType):  # its globals are those of a module
        return [node.__closure__, node.__defaults__, node.__kwdefaults__, node.__dict__]
    return node


def _static(state: PyTree) -> PyTree:
    """Returns a state with shapes in the place of its arrays, which are tracers themselves."""
    return jax.tree.map(lambda x: shape_dtype(x) if isinstance(x, Tracer) else x, state)


class _Replacing:
    """Puts other values in the place of tracers, in all that a Python object leads to.

    What can be changed is changed where it is: others may keep the same object.
    """

    def __init__(self, replace: Replace) -> None:
        self.replace = replace
        self.seen: dict[int, tuple[Any, Any]] = {}  # with what was there, which keeps its id

    def over(self, node: Any) -> Any:
        if isinstance(node, Tracer):
            return self.replace(node)
        if isinstance(node, jax.Array | type | types.ModuleType | str):
            return node
        if id(node) not in self.seen:
            self.seen[id(node)] = node, node  # it may lead to itself
            self.seen[id(node)] = node, self._inside(node)
        return self.seen[id(node)][1]

    def _inside(self, node: Any) -> Any:
        if isinstance(node, tuple):
            items = list(map(self.over, node))
            is_same = all(new is old for new, old in zip(items, node, strict=True))
            return node if is_same else getattr(node, "_make", type(node))(items)
        if isinstance(node, types.MethodType):
            self.over((node.__self__, node.__func__))
        elif isinstance(node, types.CellType):
            self._attributes(node, ["cell_contents"])
        elif isinstance(node, types.FunctionType):
            self.over(node.__closure__)
            self._attributes(node, ["__defaults__", "__kwdefaults__"])
        elif isinstance(node, functools.partial):
            parts = (node.func, node.args, node.keywords)
            func, args, keywords = new = self.over(parts)
            if new is not parts:  # its arguments cannot be changed
                return functools.partial(func, *args, **keywords)
        if isinstance(node, dict | list):
            self._items(node)
        self._items(getattr(node, "__dict__", {}))  # `__wrapped__` is there too
        self._attributes(node, _slots(type(node)))
        return node

    def _items(self, items: Any) -> None:
        for key, old in list(items.items() if isinstance(items, dict) else enumerate(items)):
            if (new := self.over(old)) is not old:
                items[key] = new

    def _attributes(self, node: Any, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(ValueError, AttributeError):  # of a cell or slot that is empty
                old = getattr(node, name)
                if (new := self.over(old)) is not old:
                    object.__setattr__(node, name, new)  # of a frozen dataclass too


def _slots(kind: type) -> Iterable[str]:
    for one in kind.__mro__:
        names = vars(one).get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names
