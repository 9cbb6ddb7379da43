"""State in host memory: a step fetches, updates and writes it back in parts.

Gains, modelled for 7.5B on 8 H100s at 50 GB/s (JAX 0.12): a peak of 7.8 GiB for 14.7 with the
optimizer state in host memory, and 553 ms for 535; with the parameters 4.4 GiB and 722 ms. The
whole tree, fetched at once, takes 16.8 GiB and 779 ms. Costs 170 lines of code, 100 for what rests
where (`_plan/offload.py`), and 300, which updates in backward need too, for what of an update can
run layer by layer (`_update/rules.py`, `_update/update.py`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from zerojax import _compat
from zerojax._jaxprs import is_var
from zerojax._kernel.arrays import sliced, written
from zerojax._kernel.device import at_rest, scattered, updated
from zerojax._kernel.places import LeafPlan
from zerojax._plan.padding import padded, unpadded
from zerojax._plan.plan import Plan
from zerojax._types import Device
from zerojax._update.rules import Flat, same_values
from zerojax._update.update import InParts, Part, Update
from zerojax._warn import warn

# [Note: slices of host memory]
# The GPU's engines copy a slice of a stack in host memory, beside its kernels, only where XLA sees
# that the index is linear in the counter of the loop. With an `arange`, a clamp, or a negative
# index that wraps around, the copy becomes a kernel, which occupies the GPU. XLA tells the engines
# an address, `offset + stride * iteration`. XLA of JAX 0.10 takes the stride of a layer and no
# offset, even if the index is another one than the counter (the next layer's) or if it has doubled
# the body of the loop. It would copy other layers, and say nothing.
# `tests/units/test_host_slices.py` reads the addresses of the installed JAX.

FINDS_LAYERS = (0, 11)  # the first JAX whose XLA finds any layer


@_compat.device_cache  # so that it warns once
def are_found(device: Device) -> bool:
    """Whether XLA finds other layers than the turn's, and slices of loops that it doubled."""
    found = not _compat.is_gpu(device) or jax.__version_info__ >= FINDS_LAYERS
    if not found:
        warn(
            f"JAX {jax.__version__} miscompiles loops that slice host memory, if it doubles their "
            "body or if they read the next layer. Steps with state there do neither: they copy "
            "gathered weights between layers, and read parameters by kernels. Upgrade JAX to avoid "
            "both costs."
        )
    return found


class Streamed:
    """An update of a state, inside `jax.jit`, of which some rests in host memory, by its parts.

    Values are the update's inputs, the leaves of the state after the gradients, those in host
    memory padded as they rest there. From stage 1 on the update sees shards of everything, so XLA
    updates shards only. Results are the leaves of the new state. What rests in host memory comes
    back there; all else is where the update made it. Leaves in `done` are there already, and where
    a gradient is None, nothing else reads it.
    """

    def __init__(
        self, update: Update, plan: Plan, values: Sequence[Any], done: dict[int, Array]
    ) -> None:
        self.plan, self.first = plan, len(plan.params)  # the first value that is a leaf
        self.leaves, self.values = [*plan.params, *plan.leaves], list(values)
        for at, leaf in enumerate(plan.leaves, self.first):
            # A user may have moved some of it to the devices.
            if not (leaf.is_on_host and _compat.is_on_host(values[at])):
                self.values[at] = scattered(values[at], leaf, plan.mesh)
        shapes = list(map(_shape, self.values, update.shapes))
        streamed = {i for i, value in enumerate(self.values) if _compat.is_on_host(value)}
        streamed -= {at + self.first for at in done}
        self.update = InParts(update, shapes, streamed, plan._stacks)
        self.results = dict(done)
        # What the update leaves as it was, such as frozen parameters, stays where it is.
        full, same = self.update.full, same_values(self.update.full)
        for part in self.update.parts:
            k, *others = part.outputs
            v, at = full.outvars[k], self.first + k
            if not others and at in streamed and is_var(v) and same.get(v) is full.invars[at]:
                self.results.setdefault(k, values[at])

    def run(self) -> list[Array]:
        """Returns the leaves of the new state; first those that read nothing in host memory."""
        # A sum over both may join what is left to what backward has updated.
        left = [[k for k in part.outputs if k not in self.results] for part in self.update.parts]
        parts = [
            dataclasses.replace(part, outputs=tuple(outputs))
            for part, outputs in zip(self.update.parts, left, strict=True)
            if outputs
        ]
        in_parts = {k for part in self.update.parts for k in part.outputs}
        free = [k for k in range(len(self.plan.leaves)) if k not in in_parts | self.results.keys()]
        done = self.update.beforehand(free)(self.values)
        sizes = [leaf.bytes_per_device(self.plan.mesh) for leaf in self.leaves]
        parts.sort(key=lambda part: sum(sizes[at] for at in part.inputs), reverse=True)
        self.results.update(zip(free, done, strict=False))
        new: list[Array] = []
        for part in parts:
            if not part.length:
                values, state = self.fetched(part, self.values, _on_device(new))
                new = self.updated(self.update.whole(part), part, values, state)
                self.results.update(zip(part.outputs, new, strict=True))
        for length in {part.length for part in parts} - {0}:
            same = [part for part in parts if part.length == length]
            self.layer_by_layer(same, length, done[len(free) :])
        return [self.results[k] for k in range(len(self.plan.leaves))]

    def layer_by_layer(self, parts: Sequence[Part], length: int, before: list[Array]) -> None:
        """Updates parts in a loop over the layers of their stacks.

        Each is fetched while the one before it is written back; the first, which is the largest,
        while the last one of the layer before is, where XLA finds its slice.
        """
        # Each part has a program of its own: one for all of them would need all of their state.
        programs = [self.update.of_layer(part.outputs, before) for part in parts]
        places = [self.first + k for part in parts for k in part.outputs]

        def with_stacks(stacks: Sequence[Array]) -> list[Any]:
            values = list(self.values)
            for at, stack in zip(places, stacks, strict=True):
                values[at] = stack
            return values

        def turn(
            i: int | Array, stacks: list[Array], state: list[Array]
        ) -> tuple[list, list[Array]]:
            """Updates layer `i`; `state` is that of its first part."""
            values, new = with_stacks(stacks), []
            for part, program in zip(parts, programs, strict=True):
                if part is not parts[0]:
                    values, state = self.fetched(part, values, _on_device(new), i)
                new = self.updated(program, part, self.layers(program, values, i), state, i)
                for k, layer in zip(part.outputs, new, strict=True):
                    stack = written(values[self.first + k], layer, i)
                    # Where weights rest whole, XLA would carry the shards that were updated.
                    values[self.first + k] = at_rest(stack, self.plan.leaves[k], self.plan.mesh)
            return values, _on_device(new)

        def early(i: int | Array, carry: tuple[list[Array], list[Array]]) -> tuple[list, list]:
            values, new = turn(i, *carry)
            values, state = self.fetched(parts[0], values, new, i + 1)
            return [values[at] for at in places], state

        def late(i: int | Array, stacks: list[Array]) -> list[Array]:
            values, state = self.fetched(parts[0], with_stacks(stacks), [], i)
            values, _ = turn(i, [values[at] for at in places], state)
            return [values[at] for at in places]

        values = self.values
        stacks = [values[at] for at in places]
        # The last layer's turn stands outside of the loop: there is none after it to fetch.
        if are_found(self.plan.mesh.devices.flat[0]):
            values, state = self.fetched(parts[0], values, [], 0)
            carry = [values[at] for at in places], state
            values, _ = turn(length - 1, *lax.fori_loop(0, length - 1, early, carry))
            stacks = [values[at] for at in places]
        else:
            stacks = lax.fori_loop(0, length, late, stacks)
        self.results.update(zip((at - self.first for at in places), stacks, strict=True))

    def layers(self, program: Flat, values: list[Any], i: int | Array) -> list[Any]:
        """Returns the inputs of an update of layer `i`: stacks on the devices as that layer."""
        cut = program.read() & self.plan._stacks - self.update.streamed
        return [sliced(value, i) if at in cut else value for at, value in enumerate(values)]

    def fetched(
        self, part: Part, values: list[Any], after: list[Array], i: int | Array | None = None
    ) -> tuple[list[Any], list[Array]]:
        """Fetches the state of a part, or layer `i` of it, once `after` is there.

        Returns the values to go on with, and that state.
        """
        resting, _ = lax.optimization_barrier(([values[at] for at in part.inputs], after))
        values, state = list(values), []
        for at, value in zip(part.inputs, resting, strict=True):
            values[at], leaf = value, self.leaves[at]
            if i is not None:
                value = at_rest(sliced(value, i), leaf, self.plan.mesh)
                leaf = _one_layer(leaf)
            if leaf.rest.on_device != leaf.update:
                # XLA would slice in host memory what a device updates of it, and by a kernel.
                value = lax.optimization_barrier(_compat.fetched(value))
                value = _compat.constrained(value, leaf.rest.on_device.sharding(self.plan.mesh))
            state.append(scattered(value, leaf, self.plan.mesh))
        return values, state

    def updated(
        self,
        program: Flat,
        part: Part,
        inputs: list[Any],
        state: list[Array],
        i: int | Array | None = None,
    ) -> list[Array]:
        """Updates a part, or layer `i` of it, and returns its results where they rest."""
        inputs = list(inputs)
        for at, value in zip(part.inputs, state, strict=True):
            inputs[at] = value
        results = list(map(jnp.asarray, program(inputs)))
        for n, k in enumerate(part.outputs):
            leaf = self.plan.leaves[k] if i is None else _one_layer(self.plan.leaves[k])
            if leaf.is_on_host:
                value = updated(results[n], leaf, self.plan.mesh)
                if value.shape != leaf.padded_shape:  # padded as it was updated
                    value = padded(unpadded(value, leaf.shape), leaf.padded_shape)
                results[n] = at_rest(value, leaf, self.plan.mesh)
        return results


def _shape(value: Any, planned: Any) -> Any:
    """Returns the shape that an input has on the devices, without padding."""
    if value is None or _compat.is_on_host(value):
        return planned
    if not isinstance(value, Array):  # a key's gradient
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type)


def _on_device(values: Sequence[Array]) -> list[Array]:
    """Returns one of the arrays that are on the devices, if any is."""
    return [value for value in values if not _compat.is_on_host(value)][:1]


def _one_layer(leaf: LeafPlan) -> LeafPlan:
    return dataclasses.replace(leaf, shape=(1, *leaf.shape[1:]))
