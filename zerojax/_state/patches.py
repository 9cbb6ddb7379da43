"""What zerojax changes in objects that others made, each where users lose something without it.

[Note: what a made state keeps] A function that makes a state is traced, so that its arrays are
made where they rest. The static fields of the state, its optimizer and `apply_fn`, outlive that
trace. Functions in them may close over arrays that `make_state` has computed, such as a rate
`jnp.float32(0.1)` or the table of a schedule. These are tracers, which mean nothing after the
trace, and JAX has no way to ask a function for what it closes over. So they are looked for where
Python objects keep them, and their values are put in their place: `replaced`.

[Note: the class of a variable] A model's variables stay the same objects when it is sharded: users
hold them, optimizers and tied layers share them. Those that rest padded must show what the user
wrote, in attributes too (`kernel.T`), which the hooks of nnx do not see: `set_class`.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

# What leads to no tracer, or to all modules.
_ENDS = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, jax.Array)
_ENDS += (type, types.ModuleType)
# Where objects keep others; instances do so in `__dict__`, and `__wrapped__` is there too.
_KEEPING = {
    types.CellType: ["cell_contents"],
    types.FunctionType: ["__closure__", "__defaults__", "__kwdefaults__", "__dict__"],
    types.MethodType: ["__self__", "__func__"],
}


def tracers_in(fields: Any) -> list[Tracer]:
    """Returns the tracers that Python objects keep, in an order of their own."""
    tracers: dict[int, Tracer] = {}
    with contextlib.suppress(RecursionError):  # deep data: where it has tracers, JAX names them
        replaced(fields, lambda tracer: tracers.setdefault(id(tracer), tracer))
    return list(tracers.values())


def replaced(node: Any, value_of: Callable[[Tracer], Any], seen: dict | None = None) -> Any:
    """Returns an object with other values in the place of tracers, in all that it leads to.

    What can be changed is changed where it is: others may keep the same object. Code of the user's
    classes does not run. `seen` has the objects that were met, which keeps their ids.
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
