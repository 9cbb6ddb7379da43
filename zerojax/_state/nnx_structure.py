"""Takes a nnx model and its optimizer apart for a step, once for each structure of the two.

[Note: what a step looks at]
`nnx.split` walks through all objects in Python: 20 ms for 100 layers, more than JAX needs to start
the step. From call to call, only arrays in variables change. So the first call splits the objects,
and remembers what was where in them: attributes, items, variables and their metadata. Later calls
compare these, which C code does: objects by identity, metadata by value. A layer more, another
variable or a switch to evaluation is another object in one of these places, and has the step split
everything again. An equal object in place of another costs a split, and changes nothing.

What is remembered lives no longer than the model and the optimizer.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import jax
from flax import nnx
from jax.core import Tracer

from zerojax._state import nnx_state as _nnx_state
from zerojax._state.nnx_state import State
from zerojax._state.packed import is_packed
from zerojax._types import PyTree, kinds_of

# The slots of a variable, or else its methods. These copy the metadata, and ask each time whether
# the variable is of this trace: 1 ms for 600 variables.
_SLOTS = vars(nnx.Variable)
_put = getattr(_SLOTS.get("_raw_value"), "__set__", nnx.Variable.set_raw_value)
_metadata = getattr(_SLOTS.get("_var_metadata"), "__get__", nnx.Variable.get_metadata)
_END = object()


class Structure:
    """Does what `state` and `update` do, faster for objects of the structure that it last saw."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self, _: object = None) -> None:
        self.places: Places | None = None
        self.variables: list[nnx.Variable] = []  # of the state's leaves, in their order
        self.is_new = True

    def state(self, model: nnx.Module, optimizer: nnx.Optimizer) -> State:
        """Returns the arrays of a model and its optimizer as one state."""
        places, owners = self.places, (model, optimizer)
        if places is not None and places.are_of(*owners) and places.are_unchanged():
            return self.treedef.unflatten(map(nnx.Variable.get_raw_value, self.variables))
        self._forget()
        apart = _nnx_state.with_variables(model, optimizer)
        placed = nnx.as_pure(apart)
        leaves, self.treedef = jax.tree.flatten(placed, is_leaf=is_packed)
        variables = jax.tree.leaves(apart, is_leaf=_is_plain)
        # If an optimizer updates only some parameters, the variables of the others have no array.
        variables = [v for v in variables if not _is_plain(v) or jax.tree.leaves(v.get_raw_value())]
        places = Places(owners, self._forget)
        if places.are_all and _hold(variables, leaves):
            self.places, self.variables = places, variables
        return placed

    def update(self, model: nnx.Module, optimizer: nnx.Optimizer, new: State) -> None:
        """Puts the arrays that a step returned into the model and the optimizer that it got."""
        variables, values = self.variables, jax.tree.leaves(new, is_leaf=is_packed)
        is_known = self.places is not None and self.places.are_of(model, optimizer)
        traced = any(issubclass(kind, Tracer) for kind in kinds_of(values))
        if is_known and not self.is_new and not traced:
            for variable, value in zip(variables, values, strict=True):
                _put(variable, value)
            return
        # The first update has padded variables show logical values. nnx refuses leaked tracers.
        _nnx_state.update(model, optimizer, new)
        self.is_new = False


class Places:
    """Where objects have what a split reads, except the arrays of variables; and what is there."""

    def __init__(self, owners: tuple[object, ...], forget: Callable[[object], None]) -> None:
        self.owners = [weakref.ref(owner, forget) for owner in owners]
        self.dicts: list[dict] = []
        self.sequences: list[list | tuple] = []
        self.variables: list[nnx.Variable] = []
        self.are_all = True  # unless some object keeps others in a way that only its class knows
        seen, todo = set[int](), [*owners]
        while todo:
            node = todo.pop()
            if id(node) not in seen:
                seen.add(id(node))
                todo += self._add(node)
        self.names, self.values = list(map(tuple, self.dicts)), list(self._values())
        self.metadata = [dict(_metadata(variable)) for variable in self.variables]

    def _add(self, node: PyTree) -> Iterable[object]:
        """Notes the places of one object, and returns what it leads to."""
        if _is_plain(node):
            self.variables.append(node)
        elif isinstance(node, nnx.Pytree):
            self.dicts.append(vars(node))
            is_data = getattr(node, "_pytree__nodes", {})
            # Flax's own state of an object changes while it is made, and not later.
            unread = {"_pytree__state", *(name for name in is_data if not is_data[name])}
            return [value for name, value in vars(node).items() if name not in unread]
        elif isinstance(node, dict | nnx.State):
            self.dicts.append(inner := node if isinstance(node, dict) else node.raw_mapping)
            return inner.values()
        elif isinstance(node, list | tuple):
            self.sequences.append(node)
            return node
        elif node is not None and not jax.tree_util.all_leaves([node]):
            self.are_all = False
        return ()

    def are_of(self, *owners: object) -> bool:
        return all(ref() is owner for ref, owner in zip(self.owners, owners, strict=True))

    def are_unchanged(self) -> bool:
        """Whether each object is still where it was."""
        return (
            list(map(tuple, self.dicts)) == self.names
            and list(map(_metadata, self.variables)) == self.metadata
            # `_END` differs from what else one of the two has in its place.
            and all(map(operator.is_, self._values(), self.values))
        )

    def _values(self) -> Iterator[object]:
        items = chain(map(dict.values, self.dicts), self.sequences)
        return chain(chain.from_iterable(items), (_END,))


def _is_plain(value: object) -> bool:
    """Whether a value is a variable itself; a hijax variable in a trace only says that it is."""
    return issubclass(type(value), nnx.Variable)


def _hold(variables: list[PyTree], leaves: list[PyTree]) -> bool:
    """Whether the leaves of a state are just the raw values of these variables."""
    if len(variables) != len(leaves) or not all(map(_is_plain, variables)):
        return False
    both = [variable.get_raw_value() for variable in variables], leaves
    # Codes come in another node.
    return all(map(operator.is_, *([x.rows if is_packed(x) else x for x in each] for each in both)))
