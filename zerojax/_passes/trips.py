"""Trips of rows to the devices of their experts."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from zerojax._jaxprs import type_of
from zerojax._passes.block_runner import BlockRunner, Layouts, Received, TokenRule, Tracked
from zerojax._passes.blocks import Axis, Blocks, lengthened
from zerojax._passes.control import CONTROL
from zerojax._passes.sequences import rule_of
from zerojax._types import Shape, is_key, wide

ROWS, TRIPS = "rows for their experts", "trips"


@dataclasses.dataclass(frozen=True, eq=False)
class Leg:
    """An equation of a trip."""

    eqn: JaxprEqn
    operands: Sequence[Tracked]
    wanted: Layouts  # of operands
    results: Sequence[Tracked]
    is_sum: bool = False  # devices return their shares of one


Types: TypeAlias = "list[tuple[jax.ShapeDtypeStruct, Blocks | None]]"
Cargo: TypeAlias = tuple[Tracked, Blocks | None]  # rows that travel, in blocks of experts, or whole
Here: TypeAlias = dict[Tracked | Cargo, Tracked]


class Unsummed(Axis):
    """An axis of devices that leave their sums to be summed where they return."""

    def summed(self, value: Array) -> Array:
        return value


class Trip:
    """What runs, for this device's experts, on the rows of all devices of the axis."""

    def __init__(self, keeper: Any) -> None:
        self.keeper, self.axis, self.key = keeper, keeper.axis, None
        self.steps = list[Leg]()
        self.types = dict[Tracked, tuple[jax.ShapeDtypeStruct, Blocks | None]]()
        self.leaves = dict[Cargo, None]()

    def takes(self, key: Tracked | None, operands: Sequence[Tracked]) -> bool:
        """Whether an equation may be part of it: none that reads a sum, which returns first."""
        return key is self.key and all(self.types.get(v, (0, 0))[1] is not None for v in operands)

    def carries(self, eqn: JaxprEqn, leaves: Iterable[Cargo]) -> bool:
        """Whether it can bring these leaves, and return what an equation makes of them."""
        return True

    def returns(self, result: tuple[jax.ShapeDtypeStruct, Blocks | None]) -> bool:
        return result[1] is None or result[1].is_plain

    def runner(self, axis: Axis) -> BlockRunner:
        runner = BlockRunner(axis, CONTROL, self.rule_of, math.inf, TRIPS)
        runner.callers, runner.all_readers = self.keeper.callers, self.keeper.all_readers
        return runner

    def rule_of(self, name: str, mixes: bool) -> TokenRule | None:
        return rule_of(name, mixes)

    def leaves_of(self, value: Tracked, at: Blocks | None) -> list[Cargo]:
        """Returns what must travel for a value that is not the trip's."""
        if value in self.types or self.stays(value, at):
            return []
        if (maps := self.before(value, at)) is None:
            return [(value, at)]
        pairs = zip(value.operands, maps, strict=True)
        return [leaf for pair in pairs for leaf in self.leaves_of(*pair)]

    def stays(self, value: Tracked, at: Blocks | None) -> bool:
        """Whether all devices have a value, in the blocks in which the trip needs it."""
        return self.keeper.is_same(value)

    def before(self, value: Tracked, at: Blocks | None) -> Layouts | None:
        """Returns the blocks of operands for a value that waits; None if the value itself goes."""
        if value.eqn is None:
            return None
        if value.eqn.primitive.name in ("iota", "random_bits"):
            return [None] * len(value.operands)
        return self.keeper.before(value.eqn, at)

    def arrived(self, value: Tracked, at: Blocks | None, here: Here) -> Tracked:
        """Returns a value as a trip has it."""
        if value in here or self.stays(value, at):
            return here.get(value, value)
        if (maps := self.before(value, at)) is None:
            return here[value, at]
        pairs = zip(value.operands, maps, strict=True)
        operands = tuple(self.arrived(*pair, here) for pair in pairs)
        return dataclasses.replace(value, operands=operands)

    def ran(self, runner: BlockRunner, step: Leg, here: Here) -> list[Tracked]:
        pairs = zip(step.operands, step.wanted, strict=True)
        operands = [self.arrived(*pair, here) for pair in pairs]
        outs = runner.results(step.eqn, operands)
        return [runner.settled(v, step.eqn) for v in outs]

    def tried(self, step: Leg, leaves: Sequence[Cargo]) -> tuple[Types, list[Received]]:
        """Returns the types of this device's results of a step, and what it would send."""
        runner, places = self.runner(self.axis), list[Blocks | None]()
        known = [v for v in step.operands if v in self.types]
        structs = [self.types[v][0] for v in known]
        for value, at in leaves:
            shape = self.axis.local(value.shape, at)
            structs.append(jax.ShapeDtypeStruct(shape, self.type_of(value)))

        def code(*arrays: Array) -> list[Array]:
            here = self.known()
            for v, x in zip(known, arrays, strict=False):
                here[v] = Tracked(v.shape, x, self.types[v][1])
            for leaf, x in zip(leaves, arrays[len(known) :], strict=True):
                here[leaf] = Tracked(leaf[0].shape, x, leaf[1])
            outs = self.ran(runner, step, here)
            places[:] = [v.at for v in outs]
            return [jnp.asarray(v.array) for v in outs]

        structs = jax.eval_shape(code, *structs)
        return list(zip(structs, places, strict=True)), runner.regions[0].sent

    def known(self) -> Here:
        """Returns what a trip knows of its own before any rows travel."""
        return {}

    # -- there and back

    def run(self, outputs: Sequence[Tracked], eqn: JaxprEqn) -> tuple[list[Array], Sequence[Array]]:
        """Returns results of the trip, as own values, and how full its rooms were."""
        leaves = list(self.leaves)
        arrays = [self.keeper.array(value, None, eqn) for value, _ in leaves]
        with self.keeper.sending(ROWS, eqn, self.nbytes(leaves, outputs)):
            sent = [self.sent(x, at) for x, (_, at) in zip(arrays, leaves, strict=True)]
            into = [0 if at is None else at.dim for _, at in leaves]
            places = [self.types[v][1] for v in outputs]
            out = [0 if at is None else at.dim for at in places]
            ys = jax.vmap(functools.partial(self.inside, leaves, outputs), into, out)(*sent)
            sums = {v for step in self.steps if step.is_sum for v in step.results}
            triples = zip(ys, places, outputs, strict=True)
            return [self.returned(y, at, v.shape, v in sums) for y, at, v in triples], ()

    def inside(
        self, leaves: Sequence[Cargo], outputs: Sequence[Tracked], *arrays: Array
    ) -> list[Array]:
        pairs = zip(leaves, arrays, strict=True)
        return self.ran_all(
            {leaf: Tracked(leaf[0].shape, x, leaf[1]) for leaf, x in pairs}, outputs
        )

    def ran_all(self, here: Here, outputs: Sequence[Tracked]) -> list[Array]:
        runner = self.runner(self.axis)
        summing = self.runner(Unsummed(self.axis.name, self.axis.size))
        for step in self.steps:
            outs = self.ran(summing if step.is_sum else runner, step, here)
            here.update(zip(step.results, outs, strict=True))
        return [here[v].array for v in outputs]

    def sent(self, value: Array, at: Blocks | None) -> Array:
        """Returns the rows of all devices: a dimension more, before that of the experts, if any."""
        if at is None:
            words = jax.random.key_data(value) if is_key(value) else value
            rows = lax.all_gather(words, self.axis.name)
            impl = jax.random.key_impl(value) if is_key(value) else None
            return jax.random.wrap_key_data(rows, impl=impl) if is_key(value) else rows
        size, dim = self.axis.size, at.dim
        block = self.axis.block(value.shape[dim])
        value = lengthened(value, dim, block * size)
        value = lax.all_to_all(value, self.axis.name, dim, dim, tiled=True)
        return value.reshape(*value.shape[:dim], size, block, *value.shape[dim + 1 :])

    def returned(self, value: Array, at: Blocks | None, shape: Shape, is_sum: bool) -> Array:
        if is_sum:
            total = value.astype(wide(value.dtype))
            return lax.psum_scatter(total, self.axis.name).astype(value.dtype)
        if at is None:
            return lax.dynamic_index_in_dim(value, self.axis.index, keepdims=False)
        value = value.reshape(*shape[: at.dim], -1, *shape[at.dim + 1 :])
        value = lax.all_to_all(value, self.axis.name, at.dim, at.dim, tiled=True)
        return lax.slice_in_dim(value, 0, shape[at.dim], axis=at.dim)

    # -- what it costs

    def nbytes(self, leaves: Iterable[Cargo], outputs: Sequence[Tracked]) -> int:
        """Returns the bytes that a device receives for these rows, there and back."""
        sums = {v for step in self.steps if step.is_sum for v in step.results}
        back = sum(self.cost(v, v in sums) for v in outputs)
        return back + sum(self.cost(v, at is None) for v, at in leaves)

    def cost(self, value: Tracked, is_whole: bool) -> int:
        nbytes = math.prod(value.shape) * self.type_of(value).itemsize
        nbytes = nbytes if value in self.types else value.nbytes  # of less, if it waits
        return nbytes * (self.axis.size - 1) // (1 if is_whole else self.axis.size)

    def type_of(self, value: Tracked) -> np.dtype:
        if value in self.types:
            return self.types[value][0].dtype
        return type_of(value.eqn.outvars[0]).dtype if value.eqn else jnp.result_type(value.array)

    def is_dear(self, outputs: Sequence[Tracked]) -> bool:
        """Whether rows are more bytes than the experts that they travel to."""
        operands = {v for step in self.steps for v in step.operands if v not in self.types}
        experts = sum(v.nbytes for v in operands if self.keeper.natural(v))
        others = self.axis.size - 1
        return self.nbytes(self.leaves, outputs) > experts * others // self.axis.size

    def is_dearer(self, step: Leg, types: Types, leaves: Iterable[Cargo]) -> bool:
        """Whether to send a sum and the new rows for it is more than to send what it sums."""
        new = [leaf for leaf in leaves if leaf not in self.leaves]
        sums = sum(math.prod(x.shape) * x.dtype.itemsize for x, _ in types)
        more = sums * (self.axis.size - 1) + self.nbytes(new, ())
        return more > self.nbytes((), [v for v in step.operands if v in self.types])
