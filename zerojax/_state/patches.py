"""What zerojax changes in objects of others, each where users lose something without it.

[Note: what a made state keeps] A function that makes a state is traced, so that its arrays are
sharded from the start. The static fields of the state, its optimizer and `apply_fn`, outlive that
trace. Functions in them may close over arrays that `make_state` computes, such as a rate
`jnp.float32(0.1)` or the table of a schedule. These are tracers, which mean nothing after the
trace, and JAX cannot list the closure of a function. So `replaced` looks for them where Python
objects keep others, and puts their values in their place.

[Note: the class of a variable] When zerojax shards a model, its variables stay the same objects:
users hold them, optimizers and tied layers share them. Padded ones must show the user's shapes, in
attributes too (`kernel.T`), which the hooks of nnx do not see: `set_class`.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

# Objects that lead to no tracer, or to all modules.
_ENDS = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, jax.Array)
_ENDS += (type, types.ModuleType)
# Where objects keep others. Instances do so in `__dict__`, which also has `__wrapped__`.
_KEEPING = {
    types.CellType: ["cell_contents"],
    types.FunctionType: ["__closure__", "__defaults__", "__kwdefaults__", "__dict__"],
    types.MethodType: ["__self__", "__func__"],
}


def tracers_in(fields: Any) -> list[Tracer]:
    """Returns the tracers that Python objects keep, in a fixed order."""
    tracers: dict[int, Tracer] = {}
    with contextlib.suppress(RecursionError):  # if deep data has tracers, JAX names them
        replaced(fields, lambda tracer: tracers.setdefault(id(tracer), tracer))
    return list(tracers.values())


def replaced(node: Any, value_of: Callable[[Tracer], Any], seen: dict | None = None) -> Any:
    """Returns an object with values in place of the tracers that it leads to.

    It changes mutable objects in place, because others may keep the same object. No code of the
    user's classes runs. `seen` holds the visited objects, which keeps their ids.
    """
    if isinstance(node, Tracer):
        return value_of(node)
    seen = {} if seen is None else seen
    if isinstance(node, _ENDS) or id(node) in seen:
        return seen.get(id(node), (node, node))[1]
    seen[id(node)] = node, node  # it may lead to itself
    over = functools.partial(replaced, value_of=value_of, seen=seen)
    new = node
    if isinstance(node, tuple):
        items = list(map(over, node))
        if any(item is not old for item, old in zip(items, node, strict=True)):
            new = getattr(node, "_make", type(node))(items)
    elif isinstance(node, functools.partial):  # its arguments cannot be changed
        parts = (node.func, node.args, node.keywords)
        func, args, named = items = over(parts)
        new = node if items is parts else functools.partial(func, *args, **named)
    elif isinstance(node, dict | list):
        for key, old in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if (item := over(old)) is not old:
                node[key] = item
    seen[id(node)] = node, new
    if type(node) not in (dict, list, tuple):
        slots = (vars(kind).get("__slots__", ()) for kind in type(node).__mro__)
        names = (name for of in slots for name in ((of,) if isinstance(of, str) else of))
        for name in (*_KEEPING.get(type(node), ["__dict__"]), *names):
            try:
                old = object.__getattribute__(node, name)
            except (AttributeError, ValueError):  # ValueError: of an empty cell
                continue
            if (item := over(old)) is not old:
                with contextlib.suppress(AttributeError, TypeError):  # a method's object
                    object.__setattr__(node, name, item)  # of a frozen dataclass too
    return new


def set_class(value: Any, kind: type) -> None:
    value.__class__ = kind
