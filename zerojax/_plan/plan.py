"""The plan of a state: it places the state, keeps it there, checks it and prints itself."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from zerojax import _compat, _fingerprint
from zerojax._kernel import device as _device
from zerojax._kernel.places import LeafPlan
from zerojax._plan import mesh as _mesh, move as _move, padding as _padding, show as _show
from zerojax._plan.layout import Layout
from zerojax._plan.padding import logical_leaves, on_host, padded, padded_shapes
from zerojax._plan.precision import stored_with
from zerojax._run import agreement as _agreement
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.state import state_of
from zerojax._types import PyTree, TreeDef
from zerojax._update import offload as _offload


class Plan(Layout):
    """The place of every leaf of a state. Made by `zerojax.plan`; print it to see.

    `place` moves a state there, `constrain` keeps it there inside `jax.jit`, `abstract` gives
    the same state as shapes with shardings, for lowering without any array. `plot` draws what each
    device has, `show` prints it for one leaf. `leaves` has the `path`, `shape` and `dtype` of each
    leaf, its `spec`, and the `dim` that is sharded or the `reason` why none is.

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
            for leaf, sharding in zip(self.leaves, self.shardings, strict=True)
        ]
        return _carried.carry_plan(self.treedef.unflatten(structs), self)

    def place(self, state: PyTree) -> PyTree:
        """Moves a state to where the plan has it. A function that makes one makes it there.

        Where the plan has a precision, the state is first stored in its dtypes. The arrays passed
        in stay valid and untouched: a step may donate what comes out.
        """
        _mesh.check_runs(self.mesh)
        if self.offloads and _compat.is_gpu(self.mesh.devices.flat[0]):
            local = len(self.mesh.local_devices)
            _offload.check_pool(local * sum(self.host_bytes_per_device().values()), local)
        _refusals.check_state_function(state)
        if _state.is_state_function(state):
            made: list[TreeDef] = []
            make = self.born_sharded(state, made.append)
            self._agree(lambda: {"how it is made": _fingerprint.of_program(make.trace().jaxpr)})
            leaves = make()  # before `made[0]` is read
            born = made[0].unflatten(leaves)
            _padding.tell_of_padding(born, self)
            return born
        _refusals.check_alive(state)
        state = stored_with(_carried.without_plan(on_host(state)), self.precision)
        leaves, treedef = jax.tree.flatten(state)
        self.check_structure(state)
        values = list(map(_as_array, leaves, self.leaves))
        paths = [leaf.path for leaf in self.leaves]
        self._agree(lambda: _fingerprint.of_values(zip(paths, values, strict=True)))
        placed = [
            _move.moved(padded(value, leaf.padded_shape), sharding)
            for value, leaf, sharding in zip(values, self.leaves, self.shardings, strict=True)
        ]
        state = _carried.carry_plan(treedef.unflatten(placed), self)
        _padding.tell_of_padding(state, self)
        return state

    def _agree(self, state: Callable[[], dict[str, str]]) -> None:
        """Raises where processes have different states, programs that make them, or plans."""
        _agreement.agree("placing a state", lambda: fingerprint(self) | state(), self.mesh)

    def born_sharded(
        self, make_state: Callable[[], PyTree], tell_treedef: Callable[[TreeDef], object] = id
    ) -> jax.stages.Wrapped:
        """Returns a jitted function that makes the state's leaves, sharded from the start.

        It returns leaves because static fields, a new optimizer for instance, may differ from call
        to call; `tell_treedef` gets the structure of the call that was compiled.
        """

        def make() -> list[Array]:
            state = stored_with(state_of(make_state), self.precision)
            self.check_structure(state)
            leaves, treedef = jax.tree.flatten(_carried.carry_plan(state, self))
            tell_treedef(treedef)
            pairs = zip(leaves, self.leaves, strict=True)
            return [padded(value, leaf.padded_shape) for value, leaf in pairs]

        return jax.jit(make, out_shardings=self.shardings)

    def constrain(
        self, state: PyTree, *, into: PyTree = None, resting: Container[int] = ()
    ) -> PyTree:
        """Constrains a computed state, inside `jax.jit`, to the plan's shardings, and pads it.

        Each leaf goes first to where the optimizer worked, then to where it rests. In that order a
        parameter of stage 1 or 2 is updated on shards and gathered once, in its own dtype.
        Give the donated old state as `into`, and stacks of layers are gathered into its memory
        one layer at a time instead of beside it. Leaves whose positions are in `resting` are where
        they rest.
        """
        self.check_structure(state)
        values, treedef = jax.tree.flatten(state)
        old = [None] * len(values) if into is None else jax.tree.leaves(into)
        old = [  # parameters that a user replaced may have no padding
            value if np.shape(value) == leaf.padded_shape else None
            for value, leaf in zip(old, self.leaves, strict=True)
        ]
        rested = _device.rested(
            values, self.leaves, self.mesh, self.batch_axes, into=old, resting=resting
        )
        return treedef.unflatten(rested)

    def unpad(self, state: PyTree) -> PyTree:
        """Returns a state of this plan without its padding, inside `jax.jit` or outside.

        Inside it stays sharded; outside JAX has no such arrays, and what was padded is replicated.
        """
        shapes = padded_shapes(state, self)
        if not shapes:
            return state
        at = {leaf.path: i for i, leaf in enumerate(self.leaves)}
        leaves = _state.leaves_with_paths(state)
        longer = {at[leaf.name]: leaf.value for leaf in leaves if leaf.name in shapes}
        found = logical_leaves(longer, self)
        return jax.tree.structure(state).unflatten(
            found[at[leaf.name]] if leaf.name in shapes else leaf.value for leaf in leaves
        )

    def pad_params(self, params: PyTree) -> PyTree:
        """Pads parameters as they rest, where they are not."""
        leaves, treedef = jax.tree.flatten(params)
        pairs = zip(leaves, self.params, strict=True)
        return treedef.unflatten(padded(v, leaf.padded_shape) for v, leaf in pairs)

    # Methods, for packages that this one builds upon.
    logical_part, padded_part = _padding.logical_part, _padding.padded_part
    cleared = _padding.cleared

    def scatter(self, state: PyTree) -> PyTree:
        """Constrains a state, inside `jax.jit`, to where the optimizer updates it.

        Its leaves then have no padding, and shards of different sizes where they do not divide.
        """
        leaves, treedef = jax.tree.flatten(state)
        return treedef.unflatten(map(self.scattered, leaves, self.leaves))

    def logical_grads(self, grads: PyTree) -> PyTree:
        """Drops the padding of gradients, inside `jax.jit`."""
        leaves, treedef = jax.tree.flatten(grads)
        return treedef.unflatten(self.like_params(leaves, [leaf.shape for leaf in self.params]))

    def like_params(
        self, grads: Sequence[Array | None], shapes: Sequence[tuple[int, ...]]
    ) -> list[Array | None]:
        """Drops the padding of gradients that have more than these shapes, inside `jax.jit`.

        None stands for the gradient of a parameter that is updated already.
        """
        return [
            grad if grad is None or grad.shape == shape else self.scattered(grad, leaf)
            for grad, leaf, shape in zip(grads, self.params, shapes, strict=True)
        ]

    def scattered(self, value: Array, leaf: LeafPlan) -> Array:
        """Constrains one leaf, or its gradient, to where the optimizer updates it."""
        return _device.scattered(value, leaf, self.mesh)

    def updated(self, value: Array, leaf: LeafPlan) -> Array:
        """Constrains a new leaf, inside `jax.jit`, to where the optimizer made it, and pads it."""
        return _device.updated(value, leaf, self.mesh)

    def at_rest(self, value: Array, leaf: LeafPlan) -> Array:
        """Constrains a padded leaf, inside `jax.jit`, to where it is between steps."""
        return _device.at_rest(value, leaf, self.mesh)

    def check_structure(self, state: PyTree) -> None:
        """Raises where `state` is not the tree that this plan was made for."""
        have = {leaf.name: leaf.value for leaf in _state.leaves_of(state)}
        _check_same(have, {leaf.path: leaf for leaf in self.leaves})

    def check_params(self, params: PyTree) -> None:
        """Raises where `params` are not the parameters that this plan was made for."""
        _refusals.check_functional(params)
        have = {leaf.name: leaf.value for leaf in _state.leaves_of({_state.PARAMS: params})}
        paths = (leaf.path.partition("/") for leaf in self.params)  # "0/w" of a tuple's
        names = [f"{_state.PARAMS}{slash}{rest}" for _, slash, rest in paths]
        _check_same(have, dict(zip(names, self.params, strict=True)))

    def plot(self, path: str | None = None) -> Any:
        """Draws with matplotlib what each device has, the largest leaves first; saves to `path`."""
        return _show.plot(self, _show.plan_title(self), path)

    def show(self, path: str) -> None:
        """Prints which part of one leaf, such as "params/dense/kernel", each device has."""
        print(_show.leaf_text(self, path))

    def __repr__(self) -> str:
        return f"<Plan of {len(self.leaves)} leaves: {_show.plan_title(self)}>"

    def __str__(self) -> str:
        return str(_show.plan_table(self))

    def _repr_html_(self) -> str:
        return _show.plan_table(self)._repr_html_()


def _check_same(have: Mapping[str, PyTree], want: Mapping[str, LeafPlan]) -> None:
    """Raises for the first leaf that is not the plan's, by path, shape or dtype."""
    remedy = "Make a plan for this state: zerojax.plan(state, stage=...)."
    for path in [*want, *have]:
        if path not in have or path not in want:
            where = "missing from the state" if path in want else "not in the plan"
            raise ValueError(f"state leaf {path} is {where}. {remedy}")
        got, leaf = _state.shape_dtype(have[path]), want[path]
        if got.dtype != leaf.dtype or got.shape not in (leaf.shape, leaf.padded_shape):
            raise ValueError(
                f"state leaf {path} is {got.dtype}{list(got.shape)} and the plan was made for "
                f"{leaf.dtype}{list(leaf.shape)}. {remedy} Of a leaf that rests padded, pass what "
                "zerojax.unpad(state) has."
            )


def _as_array(value: PyTree, leaf: LeafPlan) -> Array | np.ndarray:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"state leaf {leaf.path} is the shape {value}, without values to place. Pass the "
            "function that makes the state, zerojax.shard_train_state(make_state); the shapes of "
            "a placed state are zerojax.plan(state).abstract()."
        )
    return value if isinstance(value, jax.Array) else np.asarray(value, leaf.dtype)


def check_plan(plan: object, what: str) -> None:
    """Raises where `what` was given something other than a plan."""
    if not isinstance(plan, Plan):
        is_tree = not jax.tree_util.all_leaves([plan])
        got = f"a {type(plan).__name__}" if is_tree else repr(plan)
        raise TypeError(f"{what} takes a plan, got {got}. Make one: zerojax.plan(state, stage=3).")


def fingerprint(plan: Layout) -> dict[str, str]:
    """Returns what must be the same in every process, each with its name."""
    leaves = [
        f"{leaf.path} {leaf.dtype}{list(leaf.shape)} {leaf.rest} {leaf.near} {leaf.grad} "
        f"{leaf.update}"
        for leaf in plan.leaves
    ]
    return {
        "the stage": str(plan.stage),
        "the mesh": _fingerprint.show(plan.mesh),
        "the axis": str(plan.batch_axes),
        "the devices": " ".join(str(device.id) for device in plan.mesh.devices.flat),
        "the precision of the state": str(plan.precision),
        "the state": "\n".join(leaves),
    }
