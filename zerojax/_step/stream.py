"""The optimizer's update of state in host memory: fetched, updated and written back in parts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax import _compat
from zerojax._kernel.arrays import Index, sliced, written
from zerojax._kernel.places import LeafPlan, by_layer
from zerojax._plan.padding import padded, unpadded
from zerojax._plan.plan import Plan
from zerojax._state.state import get_params
from zerojax._step import host_slices as _slices
from zerojax._types import PyTree
from zerojax._update import parts as _parts
from zerojax._update.parts import Flat, Part, Update


def updated(
    update: Callable[[PyTree, PyTree], PyTree],
    plan: Plan,
    state: PyTree,
    grads: Sequence[Array | None],
    done: dict[int, Array],
) -> PyTree:
    """Returns `update(state, gradients)`, inside `jax.jit`, for a state as it rests.

    From stage 1 on the update sees shards of everything, so XLA updates shards only. What rests in
    host memory comes back there; all else is where the update made it. Leaves in `done` are there
    already, and where a gradient is None, nothing else reads it.
    """
    of_grads = jax.tree.structure(get_params(state))
    if not plan.offloads and not done:
        return update(plan.scatter(state), of_grads.unflatten(grads))
    treedef = jax.tree.structure(state)

    def flat(values: list) -> list:
        count = len(grads)
        new = update(treedef.unflatten(values[count:]), of_grads.unflatten(values[:count]))
        return jax.tree.leaves(new)

    return treedef.unflatten(_Streamed(flat, plan, state, grads, done).run())


class _Streamed:
    """An update of a state of which some rests in host memory.

    Values are the update's inputs: gradients, then the leaves of the state, those in host memory
    padded as they rest there. Results are the leaves of the new state.
    """

    def __init__(
        self,
        update: Callable[[list], list],
        plan: Plan,
        state: PyTree,
        grads: Sequence[Array | None],
        done: dict[int, Array],
    ) -> None:
        self.plan, self.first = plan, len(grads)  # the first value that is a leaf of the state
        self.leaves: list[LeafPlan] = [*plan.params, *plan.leaves]
        self.values: list[Any] = [*grads]
        for leaf, value in zip(plan.leaves, jax.tree.leaves(state), strict=True):
            # A user may have moved some of it to the devices.
            rests_there = leaf.is_on_host and _compat.is_on_host(value)
            self.values.append(value if rests_there else plan.scattered(value, leaf))
        streamed = list(map(_compat.is_on_host, self.values))
        shapes = list(map(_shape, self.values, self.leaves))
        self.update = Update(update, shapes, streamed, list(map(by_layer, self.leaves)))
        self.results = dict(done)

    def run(self) -> list[Array]:
        """Returns the leaves of the new state; first those that read nothing in host memory."""
        free = [k for k in self.update.free if k not in self.results]
        done = _parts.run(self.update.beforehand(free), self.values)
        before = done[len(free) :]
        parts = [part for part in self.update.parts if part.outputs[0] not in self.results]
        parts.sort(key=self.nbytes, reverse=True)
        self.results.update(zip(free, done, strict=False))
        made: list[Array] = []
        for part in parts:
            if not part.by_layer:
                made = self.at_once(part, made)
        for length in {part.length for part in parts if part.by_layer}:
            self.layer_by_layer([part for part in parts if part.length == length], length, before)
        return [self.results[k] for k in range(len(self.plan.leaves))]

    def nbytes(self, part: Part) -> int:
        return sum(self.leaves[at].bytes_per_device(self.plan.mesh) for at in part.inputs)

    def at_once(self, part: Part, made: list[Array]) -> list[Array]:
        """Updates one part, whose state is fetched once `made` is there."""
        values, held = self.fetched(part, self.values, made)
        new = self.updated(self.update.whole(part), part, values, held, _whole)
        self.results.update(zip(part.outputs, new, strict=True))
        return _on_device(new)

    def layer_by_layer(self, parts: Sequence[Part], length: int, before: list[Array]) -> None:
        """Updates parts in a loop over the layers of their stacks.

        Each is fetched while the one before it is written back; the first, which is the largest,
        while the last one of the layer before is, where XLA finds its slice.
        """
        # Each part has a program of its own: one for all of them would need all of their state.
        programs = [self.update.of_layer([part]) for part in parts]
        places = [self.first + k for part in parts for k in part.outputs]

        def turn(i: Index, stacks: list[Array], held: list[Array]) -> tuple[list, list[Array]]:
            """Updates layer `i`; `held` is the state of its first part."""
            values, made = self.with_stacks(places, stacks), []
            for part, program in zip(parts, programs, strict=True):
                if part is not parts[0]:
                    values, held = self.fetched(part, values, made, i)
                shown = [*self.shown(program, values, i), *before]
                new = self.updated(program, part, shown, held, _one_layer)
                self.write(part, new, i, values)
                made = _on_device(new)
            return values, made

        def early(i: Index, carry: tuple[list[Array], list[Array]]) -> tuple[list, list]:
            values, made = turn(i, *carry)
            values, held = self.fetched(parts[0], values, made, i + 1)
            return [values[at] for at in places], held

        def late(i: Index, stacks: list[Array]) -> list[Array]:
            values, held = self.fetched(parts[0], self.with_stacks(places, stacks), [], i)
            values, _ = turn(i, [values[at] for at in places], held)
            return [values[at] for at in places]

        values = self.values
        stacks = [values[at] for at in places]
        # The last layer's turn stands outside of the loop: there is none after it to fetch.
        if _slices.are_found(self.plan.mesh.devices.flat[0]):
            values, held = self.fetched(parts[0], values, [], 0)
            carry = [values[at] for at in places], held
            values, _ = turn(length - 1, *lax.fori_loop(0, length - 1, early, carry))
            stacks = [values[at] for at in places]
        else:
            stacks = lax.fori_loop(0, length, late, stacks)
        self.results.update(zip((at - self.first for at in places), stacks, strict=True))

    def write(self, part: Part, layers: Sequence[Array], i: Index, values: list[Array]) -> None:
        """Writes layer `i` of a part's results into their stacks, among the values."""
        for k, layer in zip(part.outputs, layers, strict=True):
            stack = written(values[self.first + k], layer, i)
            # Where weights rest whole, XLA would carry the shards that were updated.
            values[self.first + k] = self.plan.at_rest(stack, self.plan.leaves[k])

    def with_stacks(self, places: Sequence[int], stacks: Sequence[Array]) -> list[Any]:
        values = list(self.values)
        for at, stack in zip(places, stacks, strict=True):
            values[at] = stack
        return values

    def shown(self, program: Flat, values: list[Any], i: Index) -> list[Any]:
        """Returns the inputs of an update of layer `i`: stacks on the devices as that layer."""
        read = _parts.inputs_of(program)
        return [
            sliced(value, i)
            if at in read and self.update.stacked[at] and not self.update.streamed[at]
            else value
            for at, value in enumerate(values)
        ]

    def fetched(
        self, part: Part, values: list[Any], made: list[Array], i: Index | None = None
    ) -> tuple[list[Any], list[Array]]:
        """Fetches the state of a part, or layer `i` of it, once `made` is there.

        Returns the values to go on with, and that state.
        """
        resting, _ = lax.optimization_barrier(([values[at] for at in part.inputs], made))
        values, held = list(values), []
        for at, value in zip(part.inputs, resting, strict=True):
            values[at], leaf = value, self.leaves[at]
            if i is not None:
                value, leaf = self.plan.at_rest(sliced(value, i), leaf), _one_layer(leaf)
            if leaf.rest.on_device != leaf.update:
                # XLA would slice in host memory what a device updates of it, and by a kernel.
                value = lax.optimization_barrier(_compat.fetched(value))
                value = _compat.constrained(value, leaf.rest.on_device.sharding(self.plan.mesh))
            held.append(self.plan.scattered(value, leaf))
        return values, held

    def updated(
        self,
        program: Flat,
        part: Part,
        inputs: list[Any],
        held: list[Array],
        part_of: Callable[[LeafPlan], LeafPlan],
    ) -> list[Array]:
        """Updates a part, whose state is `held`, and returns its results where they rest."""
        inputs = list(inputs)
        for at, value in zip(part.inputs, held, strict=True):
            inputs[at] = value
        leaves = [part_of(self.plan.leaves[k]) for k in part.outputs]
        done = map(jnp.asarray, _parts.run(program, inputs))
        return [self.stored(value, leaf) for value, leaf in zip(done, leaves, strict=True)]

    def stored(self, value: Array, leaf: LeafPlan) -> Array:
        """Returns a new leaf in host memory, if it rests there."""
        if not leaf.is_on_host:
            return value
        value = self.plan.updated(value, leaf)
        if value.shape != leaf.padded_shape:  # padded as it was updated
            value = padded(unpadded(value, leaf.shape), leaf.padded_shape)
        return self.plan.at_rest(value, leaf)


def _shape(value: Any, leaf: LeafPlan) -> Any:
    """Returns the shape that an input has on the devices, without padding."""
    if value is None or _compat.is_on_host(value):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if not isinstance(value, Array):  # a key's gradient
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type)


def _on_device(values: Sequence[Array]) -> list[Array]:
    """Returns one of the arrays that are on the devices, if any is."""
    return [value for value in values if not _compat.is_on_host(value)][:1]


def _whole(leaf: LeafPlan) -> LeafPlan:
    return leaf


def _one_layer(leaf: LeafPlan) -> LeafPlan:
    return dataclasses.replace(leaf, shape=(1, *leaf.shape[1:]))
