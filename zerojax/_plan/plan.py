"""The plan of a state: places the state, keeps it there, checks it, and prints itself."""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from zerojax import _compat, _fingerprint
from zerojax._axis_types import auto_axes, computed_with, typed
from zerojax._kernel import device as _device
from zerojax._kernel.places import LeafPlan
from zerojax._plan import (
    mesh as _mesh,
    move as _move,
    offload as _offload,
    padding as _padding,
    show as _show,
)
from zerojax._plan.kept import stored_with
from zerojax._plan.layout import Layout
from zerojax._plan.padding import on_host, padded
from zerojax._run import agreement as _agreement
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.state import state_of
from zerojax._types import PyTree, TreeDef


class Plan(Layout):
    """The place of every leaf of a state. Made by `zerojax.plan`; print it to see.

    `place` moves a state there, `constrain` keeps it there inside `jax.jit`, and `abstract` returns
    its shapes with their shardings, to lower programs without any array. A loop that updates by
    itself calls `scatter`, `logical_grads` and `unpad`. `plot` draws what each device has, `show`
    prints it for one leaf, `bytes_per_device` and `host_bytes_per_device` count it. `leaves` has
    the `path`, `shape`, `dtype` and `spec` of each leaf, and the `dim` that is sharded or the
    `reason` why none is; `params` has those of parameters. `stage`, `mesh`, `groups` and
    `precision` are as in `zerojax.plan`, and `size` devices along `batch_axes` split the batch,
    with `sequence` both rows and sequences; with `experts`, those are apart over one of these axes.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((1024, 8), "float32"), "b": jnp.zeros(8)}
        >>> plan = zerojax.plan((params, ()), stage=3)
        >>> print(plan.size, plan.bytes_per_device()["params"])
        8 4128
        >>> plan.show("0/b")
        0/b: float32[8], 32 B of 32 B on each device, replicated: smaller than min_shard_size=128
          [:]  devices 0, 1, 2, 3, 4, 5, 6, 7
    """

    def abstract(self) -> PyTree:
        """Returns the state as `jax.ShapeDtypeStruct`s that carry their shardings."""
        structs = [
            jax.ShapeDtypeStruct(leaf.padded_shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(self.leaves, self._shardings, strict=True)
        ]
        return _carried.carry_plan(self._treedef.unflatten(structs), self)

    def place(self, state: PyTree) -> PyTree:
        """Moves a state to where the plan has it; compiles a function to make its state there.

        A plan with a precision first stores the state in its dtypes. The arrays that you pass stay
        valid: a step may donate those that this returns.
        """
        _mesh.check_runs(self.mesh)
        if self._offloads and _compat.is_gpu(self.mesh.devices.flat[0]):
            local = len(self.mesh.local_devices)
            _offload.check_pool(local * sum(self.host_bytes_per_device().values()), local)
        _refusals.check_state_function(state)
        if _state.is_state_function(state):
            treedefs: list[TreeDef] = []
            make = self._born_sharded(state, treedefs.append)
            self._agree(lambda: {"how it is made": _fingerprint.of_program(make.trace().jaxpr)})
            leaves = make()  # which appends the structure
            placed = treedefs[0].unflatten(leaves)
        else:
            _refusals.check_alive(state)
            self._agree(lambda: {"the leaves": _fingerprint.of_shapes(state)})
            state = stored_with(_carried.without_plan(on_host(state)), self.precision)
            leaves, treedef = jax.tree.flatten(state)
            self._check_structure(state)
            values = list(map(_as_array, leaves, self.leaves))
            paths = [leaf.path for leaf in self.leaves]
            self._agree(lambda: _fingerprint.of_values(zip(paths, values, strict=True)))
            arrays = [
                _move.moved(padded(value, leaf.padded_shape), sharding)
                for value, leaf, sharding in zip(values, self.leaves, self._shardings, strict=True)
            ]
            placed = _carried.carry_plan(treedef.unflatten(arrays), self)
        _padding.remember_state(placed, self)
        _padding.warn_of_padding(placed, self)
        return placed

    def _brought_back(self, state: PyTree) -> PyTree:
        """Returns a state with arrays that a user has put in place of others moved to where the
        plan has them; the state itself, if there are none. Anywhere else, they would have `jax.jit`
        compile a step once more."""
        leaves, treedef = jax.tree.flatten(state)
        if len(leaves) != len(self.leaves):
            return state
        pairs = enumerate(zip(leaves, self._shardings, strict=True))
        odd = [at for at, (x, place) in pairs if getattr(x, "sharding", None) != place]
        self._compare_new([leaves[at] for at in odd], [self.leaves[at] for at in odd])
        back = {}
        for at, value, leaf in ((at, leaves[at], self.leaves[at]) for at in odd):
            if not _move.is_elsewhere(value, self._shardings[at]):
                continue
            if value.dtype == leaf.dtype and value.shape in (leaf.shape, leaf.padded_shape):
                value = padded(value, leaf.padded_shape)
                back[at] = _move.moved(value, self._shardings[at])
        new = [back.get(at, leaf) for at, leaf in enumerate(leaves)]
        return treedef.unflatten(new) if back else state

    def _compare_new(
        self, leaves: Sequence[PyTree], planned: Sequence[LeafPlan] | None = None
    ) -> None:
        """Raises if processes have put other values into their states, such as learning rates."""
        if not self.mesh.is_multi_process:
            return
        places = {getattr(leaf, "sharding", None) for leaf in leaves}
        if not any(place is None or place.is_fully_addressable for place in places):
            return
        new = {
            leaf.path: value
            for leaf, value in zip(planned or self.leaves, leaves, strict=False)
            if not isinstance(value, jax.Array) or value.is_fully_addressable
        }
        if new:
            values = functools.partial(_fingerprint.of_values, new.items())
            _agreement.agree(f"new values of {', '.join(new)}", values, self.mesh)

    def _agree(self, state: Callable[[], dict[str, str]]) -> None:
        """Raises if processes have different states, programs that make them, or plans."""
        _agreement.agree("placing a state", lambda: fingerprint(self) | state(), self.mesh)

    def _born_sharded(
        self, make_state: Callable[[], PyTree], tell_treedef: Callable[[TreeDef], object] = id
    ) -> jax.stages.Wrapped:
        """Returns a jitted function that makes the state's leaves, sharded from the start.

        It returns leaves because static fields, such as a new optimizer, may differ from call to
        call; `tell_treedef` is called with the structure of the call that JAX compiles.
        """

        def make() -> list[Array]:
            state = stored_with(state_of(make_state), self.precision)
            self._check_structure(state)
            leaves, treedef = jax.tree.flatten(_carried.carry_plan(state, self))
            tell_treedef(treedef)
            pairs = zip(leaves, self.leaves, strict=True)
            return [padded(value, leaf.padded_shape) for value, leaf in pairs]

        return jax.jit(make, out_shardings=self._shardings)

    def constrain(
        self, state: PyTree, *, into: PyTree = None, resting: Container[int] = ()
    ) -> PyTree:
        """Constrains a computed state, inside `jax.jit`, to the plan's shardings, and pads it.

        Each leaf goes first to where the optimizer worked, then to where it is stored. So a
        parameter of stage 1 or 2 is updated on shards and gathered once, in its own dtype. Pass the
        donated old state as `into` to gather stacks of layers into its memory, one layer at a time.
        Leaves whose positions are in `resting` are already where they are stored.
        """
        self._check_structure(state)
        values, treedef = jax.tree.flatten(state)
        old = [None] * len(values) if into is None else jax.tree.leaves(into)
        old = [  # parameters that a user replaced may lack the padding
            value if np.shape(value) == leaf.padded_shape else None
            for value, leaf in zip(old, self.leaves, strict=True)
        ]
        values, old = computed_with((values, old))
        with auto_axes():
            rested = _device.rested(
                values, self.leaves, self.mesh, self.batch_axes, into=old, resting=resting
            )
        return treedef.unflatten(map(typed, rested, self._shardings))

    def unpad(self, state: PyTree) -> PyTree:
        """Returns a state of this plan without its padding, inside `jax.jit` or outside.

        Inside it stays sharded. Outside JAX has no arrays with such shards, and replicates them.
        """
        if _carried.carried_plan(state) is None:
            self._check_structure(state)
        return self._logical_part(state)

    def _pad_params(self, params: PyTree) -> PyTree:
        """Pads parameters as they are stored, unless they are padded."""
        leaves, treedef = jax.tree.flatten(params)
        pairs = zip(leaves, self.params, strict=True)
        return treedef.unflatten(padded(v, leaf.padded_shape) for v, leaf in pairs)

    # Methods, for `_state`, which this package imports.
    _logical_part, _padded_part = _padding.logical_part, _padding.padded_part

    def scatter(self, state: PyTree) -> PyTree:
        """Constrains a state, inside `jax.jit`, to where the optimizer updates it, unpadded.

        Shards then differ in size where the devices do not divide a leaf.
        """
        leaves, treedef = jax.tree.flatten(computed_with(state))
        with auto_axes():
            pairs = zip(leaves, self.leaves, strict=True)
            return treedef.unflatten([_device.scattered(*pair, self.mesh) for pair in pairs])

    def logical_grads(self, grads: PyTree) -> PyTree:
        """Drops the padding of gradients, inside `jax.jit`."""
        leaves, treedef = jax.tree.flatten(computed_with(grads))
        with auto_axes():
            grads = self._like_params(leaves, [leaf.shape for leaf in self.params])
        return treedef.unflatten(grads)

    def _like_params(
        self, grads: Sequence[Array | None], shapes: Sequence[tuple[int, ...]]
    ) -> list[Array | None]:
        """Drops the padding of gradients that have more than these shapes, inside `jax.jit`.

        The gradient of a parameter that backward has updated is None.
        """
        return [
            grad
            if grad is None or grad.shape == shape
            else padded(_device.scattered(grad, leaf, self.mesh), shape)
            for grad, leaf, shape in zip(grads, self.params, shapes, strict=True)
        ]

    def _check_structure(self, state: PyTree) -> None:
        """Raises if `state` is not the tree that this plan was made for."""
        have = {leaf.name: leaf.value for leaf in _state.leaves_of(state)}
        again = getattr(type(state), "plan_again", None)
        _check_same(have, {leaf.path: leaf for leaf in self.leaves}, again)

    def _check_params(self, params: PyTree) -> None:
        """Raises if `params` are not the parameters that this plan was made for."""
        _refusals.check_functional(params)
        have = {leaf.name: leaf.value for leaf in _state.leaves_of({_state.PARAMS: params})}
        paths = (leaf.path.partition("/") for leaf in self.params)  # "0/w" of a tuple's
        names = [f"{_state.PARAMS}{slash}{rest}" for _, slash, rest in paths]
        _check_same(have, dict(zip(names, self.params, strict=True)), _if_a_part(have, names))

    def plot(self, path: str | None = None) -> Any:
        """Draws with matplotlib what each device has, the largest leaves first; saves to `path`."""
        return _show.plot(self, path)

    def show(self, path: str) -> None:
        """Prints which part of one leaf, such as "params/dense/kernel", each device has."""
        print(_show.leaf_text(self, path))

    def __repr__(self) -> str:
        return f"<Plan of {len(self.leaves)} leaves: {_show.plan_title(self)}>"

    def __str__(self) -> str:
        return str(_show.plan_table(self))

    def _repr_html_(self) -> str:
        return _show.plan_table(self)._repr_html_()


def _if_a_part(have: Mapping[str, PyTree], names: Sequence[str]) -> str | None:
    """Returns the remedy if these are the parameters below one path, and not all of them."""
    for part in dict.fromkeys(name.partition("/")[2].partition("/")[0] for name in names):
        if have and {f"params/{part}/{path.partition('/')[2]}" for path in have} <= {*names}:
            return (
                f"These are the parameters in {part}: pass all of them, as the plan has them, and "
                f"have the loss read params.{part}, or params[{part!r}]."
            )
    return None


def _check_same(
    have: Mapping[str, PyTree], want: Mapping[str, LeafPlan], remedy: str | None = None
) -> None:
    """Raises for the first leaf that is not the plan's, by path, shape or dtype."""
    padded = ""
    if remedy is None:
        remedy = "Make a plan for this state: zerojax.plan(state, stage=...)."
        padded = " If the leaf is padded, pass it without the padding, from zerojax.unpad(state)."
    for path in [*want, *have]:
        if path not in have or path not in want:
            where = "missing from the state" if path in want else "not in the plan"
            raise ValueError(f"state leaf {path} is {where}. {remedy}")
        got, leaf = _state.shape_dtype(have[path]), want[path]
        if got.dtype != leaf.dtype or got.shape not in (leaf.shape, leaf.padded_shape):
            raise ValueError(
                f"state leaf {path} is {got.dtype}{list(got.shape)} and the plan was made for "
                f"{leaf.dtype}{list(leaf.shape)}. {remedy}{padded}"
            )


def _as_array(value: PyTree, leaf: LeafPlan) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"state leaf {leaf.path} is the shape {value}, which has no values to place. Pass the "
            "function that makes the state, zerojax.shard_train_state(make_state); if you want the "
            "shapes of a placed state, call zerojax.plan(state).abstract()."
        )
    return value if isinstance(value, jax.Array) else np.asarray(value, leaf.dtype)


def fingerprint(plan: Layout) -> dict[str, str]:
    """Returns, by name, the facts that must be the same in every process."""
    leaves = [
        f"{leaf.path} {leaf.dtype}{list(leaf.shape)} {leaf.rest} {leaf.near} {leaf.grad} "
        f"{leaf.update}"
        for leaf in plan.leaves
    ]
    return {
        "the stage": str(plan.stage),
        "the mesh": _fingerprint.show(plan.mesh),
        "the axis": str(plan.batch_axes),
        "how sequences are split": str(plan.sequence),
        "which experts are apart": str(plan.experts),
        "the devices": " ".join(str(device.id) for device in plan.mesh.devices.flat),
        "the precision of the state": str(plan.precision),
        "the state": "\n".join(leaves),
    }
