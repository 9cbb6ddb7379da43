"""Trips of rows that are sorted by expert, as `ragged_dot` takes them.

A device has a *room* for rows of each other device. Where a room is too small, which all learn
before anything is computed, the trip is repeated for the rows that are left: in as many rounds as
it takes, no row is dropped. Where they arrive, rows are sorted by expert, each in whole blocks:
XLA's own `ragged_dot` on GPUs multiplies each row by each expert.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn

from zerojax import _compat
from zerojax._jaxprs import RAGGED, Eqn, type_of, unclosed
from zerojax._passes.block_runner import BlockRunner, Layouts, TokenRule, Tracked
from zerojax._passes.blocks import Axis, Blocks
from zerojax._passes.trips import ROWS, Cargo, Here, Trip
from zerojax._types import PyTree, is_float

T = TypeVar("T")

# Blocks for each expert, if all are as busy: more waste fewer rows, and copy more weights.
BLOCKS = 4


def for_ragged(eqn: JaxprEqn, operands: Sequence[Tracked]) -> Layouts | None:
    """Returns the blocks of operands of a `ragged_dot` of rows by experts; None for another."""
    numbers, weights = Eqn(eqn).ragged_dot_dimension_numbers, operands[1].at
    groups, rows = list(numbers.rhs_group_dimensions), list(numbers.lhs_ragged_dimensions)
    (contract, _), (batch, _) = Eqn(eqn).factors
    if weights is None or groups != [weights.dim] or rows != [0] or 0 in contract or batch:
        return None
    return [Blocks(0), weights, None]


@dataclasses.dataclass(frozen=True)
class Sorted(Axis):
    """An axis whose devices have so many rows, in an order of their own."""

    rows: int = 0

    def block(self, length: int) -> int:
        return self.rows


class Seats(NamedTuple):
    """Where rows go in a round of a trip."""

    row: Array  # of each seat: some row, if it is free
    is_taken: Array
    seat: Array  # of each row
    travels: Array  # in this round
    order: (
        Array  # which seat of those that arrived has each place in the blocks; some, if it is free
    )
    is_filled: Array
    place: Array  # of each seat that arrived
    expert: Array  # of each place; their number, if it has none


class Rooms(Trip):
    """A trip of rows that are sorted by expert."""

    def __init__(self, keeper: PyTree, sizes: Tracked, rows: Tracked) -> None:
        super().__init__(keeper)
        self.key, self.rows, size = sizes, rows.shape[0], keeper.axis.size
        self.experts = keeper.axis.block(sizes.shape[0])
        self.room = min(self.rows, math.ceil(keeper.room * self.rows / size))
        arriving = size * self.room
        self.block = arriving if self.experts == 1 else -(-arriving // (BLOCKS * self.experts))
        blocks = 1 if self.experts == 1 else BLOCKS * self.experts + self.experts
        self.axis = Sorted(keeper.axis.name, size, blocks * self.block)

    def takes(self, key: Tracked | None, operands: Sequence[Tracked]) -> bool:
        is_ragged = key is self.key
        return is_ragged or (key is None and not any(map(self.keeper.natural, operands)))

    def carries(self, eqn: JaxprEqn, leaves: Iterable[Cargo]) -> bool:
        """Rows are in another order there, and as many as there are seats."""
        is_row = [type_of(v).shape[:1] == (self.rows,) for v in eqn.outvars]
        return (
            all(is_row)
            and all(at == Blocks(0) for _, at in leaves)
            and eqn.primitive.name != "custom_vjp_call"
        )

    def returns(self, result: tuple[jax.ShapeDtypeStruct, Blocks | None]) -> bool:
        return result[1] == Blocks(0)

    def rule_of(self, name: str, mixes: bool) -> TokenRule | None:
        return _multiplied if name == RAGGED else None

    # -- what travels

    def stays(self, value: Tracked, at: Blocks | None) -> bool:
        is_kept = at is None or bool(value.at)
        return value is self.key or (is_kept and self.keeper.is_same(value))

    def before(self, value: Tracked, at: Blocks | None) -> Layouts | None:
        if value.eqn is None or not value.operands:
            return None
        maps = self.keeper.before(value.eqn, at)
        pairs = zip(value.operands, maps or (), strict=False)
        return maps if maps and all(m or self.keeper.is_same(v) for v, m in pairs) else None

    def known(self) -> Here:
        expert = jnp.zeros(self.axis.rows, jnp.int32)
        return {self.key: Tracked(self.key.shape, (expert, self.experts))}

    def run(self, outputs: Sequence[Tracked], eqn: JaxprEqn) -> tuple[list[Array], Sequence[Array]]:
        leaves = list(self.leaves)
        rows = [self.keeper.array(value, None, eqn) for value, _ in leaves]
        sizes = self.keeper.array(self.key, None, eqn)

        def in_round(number: Array, sizes: Array, *rows: Array) -> list[Array]:
            seats = self.seats(sizes, number)
            here: Here = {self.key: Tracked(self.key.shape, (seats.expert, self.experts))}
            for leaf, x in zip(leaves, rows, strict=True):
                here[leaf] = Tracked(leaf[0].shape, self.there(x, seats), Blocks(0))
            return [self.back(x, seats) for x in self.ran_all(here, outputs)]

        with self.keeper.sending(ROWS, eqn, self.nbytes(leaves, outputs)):
            sizes = lax.all_gather(self.sizes_of(sizes), self.axis.name)
            inputs = [sizes, *rows]
            jaxpr, fixed = unclosed(jax.make_jaxpr(in_round)(jnp.int32(0), *inputs))
            first = _compat.run_jaxpr(jaxpr, [jnp.int32(0), *inputs, *fixed])
            count, load = -(-self.rows // self.room), jnp.max(jnp.sum(sizes, 2))
            outs = _with_rest(jaxpr, count, load > self.room, first, [*inputs, *fixed])
        share = load * self.axis.size / self.rows
        return outs, [jnp.stack([share, load > self.room])]

    def cost(self, value: Tracked, is_whole: bool) -> int:
        nbytes = math.prod(value.shape) * self.type_of(value).itemsize
        return nbytes * self.room * (self.axis.size - 1) // self.rows

    # -- which row goes where

    def sizes_of(self, sizes: Array) -> Array:
        """Returns how many rows there are for each expert of each device, and at last for none of
        them: the last device takes these."""
        more = self.experts * self.axis.size - sizes.shape[0]
        each = jnp.pad(sizes.astype(jnp.int32), (0, more)).reshape(self.axis.size, -1)
        return jnp.pad(each, ((0, 0), (0, 1))).at[-1, -1].add(self.rows - each.sum())

    def seats(self, sizes: Array, number: Array) -> Seats:
        """Returns where rows go, given the sizes of all devices for all."""
        counts = sizes[self.axis.index].sum(1)
        ends, first = jnp.cumsum(counts), number * self.room
        device, seat = jnp.divmod(jnp.arange(self.axis.size * self.room), self.room)
        is_taken = first + seat < counts[device]
        row = jnp.clip((ends - counts)[device] + first + seat, 0, self.rows - 1)
        rows = jnp.arange(self.rows)
        device = _group_of(rows, ends)
        rank = rows - (ends - counts)[device] - first
        travels = (rank >= 0) & (rank < self.room)
        own_seat = device * self.room + jnp.clip(rank, 0, self.room - 1)

        last = jnp.clip(jnp.cumsum(sizes[:, self.axis.index], 1) - first, 0, self.room)
        expert = jax.vmap(_group_of, (None, 0))(jnp.arange(self.room), last).reshape(-1)
        seated, expert = expert, jnp.minimum(expert, self.experts)
        if self.experts == 1:
            order = jnp.arange(len(expert))
            return Seats(row, is_taken, own_seat, travels, order, order >= 0, order, seated)
        groups = jnp.bincount(expert, length=self.experts + 1)
        blocks = -(-groups // self.block)
        sort = jnp.argsort(expert, stable=True)
        rank = jnp.argsort(sort) - (jnp.cumsum(groups) - groups)[expert]
        place = (jnp.cumsum(blocks) - blocks)[expert] * self.block + rank
        order = jnp.full(self.axis.rows, -1).at[place].set(jnp.arange(len(expert)))
        which = _group_of(jnp.arange(self.axis.rows) // self.block, jnp.cumsum(blocks))
        filled = jnp.maximum(order, 0), order >= 0
        free = self.experts + 1  # neither of an expert nor a row
        row_of_none = jnp.where(filled[1], seated[filled[0]], free)
        which = jnp.where(which < self.experts, which, row_of_none)
        return Seats(row, is_taken, own_seat, travels, *filled, place, which)

    def there(self, rows: Array, seats: Seats) -> Array:
        seated = taken(rows, seats.row, seats.seat, seats.travels)
        arrived = lax.all_to_all(seated, self.axis.name, 0, 0, tiled=True)
        return taken(arrived, seats.order, seats.place, None)

    def back(self, rows: Array, seats: Seats) -> Array:
        rows = taken(rows, seats.place, seats.order, seats.is_filled)
        seated = lax.all_to_all(rows, self.axis.name, 0, 0, tiled=True)
        rows = taken(seated, seats.seat, seats.row, seats.is_taken)
        return jnp.where(_like(seats.travels, rows), rows, 0)


def _group_of(numbers: Array, ends: Array) -> Array:
    """Returns in which of the groups that end there each number is."""
    return jnp.searchsorted(ends, numbers, side="right", method="compare_all")


def _like(mask: Array, rows: Array) -> Array:
    return mask.reshape(-1, *[1] * (rows.ndim - 1))


@jax.custom_vjp
def taken(x: Array, index: Array, back: Array, counts: Array | None) -> Array:
    """Returns rows of `x`. Gradients of those that count are taken `back`: XLA would add."""
    return jnp.take(x, index, axis=0, mode="clip")


def _taken_fwd(x: Array, index: Array, back: Array, counts: Array | None) -> tuple[Array, PyTree]:
    return taken(x, index, back, counts), (back, counts)


def _taken_bwd(residuals: PyTree, grad: Array) -> tuple[Array, None, None, None]:
    back, counts = residuals
    grad = jnp.take(grad, back, axis=0, mode="clip")
    return grad if counts is None else jnp.where(_like(counts, grad), grad, 0), None, None, None


taken.defvjp(_taken_fwd, _taken_bwd)


# -- experts in blocks


def _multiplied(
    s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked], at: Blocks
) -> list[Tracked]:
    rows, weights, sizes = operands
    (contract, of_weights), group = Eqn(eqn).factors[0], weights.at.dim if weights.at else 0
    x, (expert, experts), options = s.array(rows, at, eqn), sizes.array, Eqn(eqn).options
    if experts == 1:
        dims = [d - (d > group) for d in of_weights]
        w = lax.squeeze(weights.array, (group,))
        out = lax.dot_general(x, w, ((contract, dims), ((), ())), **options)
    else:
        number = -(-len(expert) // _block(expert, experts))
        x = x.reshape(number, -1, *x.shape[1:])
        which = expert.reshape(number, -1)[:, 0]
        w = _for_blocks(weights.array, which, experts, group)
        dims = [d + 1 for d in contract], list(of_weights)
        out = lax.dot_general(x, w, (dims, ((0,), (group,))), **options)
        out = out.reshape(-1, *out.shape[2:])
    # What is free has numbers like any other: zeros may have no derivative.
    out = jnp.where(_like(expert == experts, out), 0, out)
    return [Tracked(type_of(eqn.outvars[0]).shape, out, at)]


def _block(expert: Array, experts: int) -> int:
    return len(expert) // (BLOCKS * experts + experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _for_blocks(weights: Array, which: Array, experts: int, group: int) -> Array:
    """Returns the expert of each block."""
    return jnp.take(weights, which, axis=group, mode="clip")


def _for_blocks_fwd(weights: Array, which: Array, experts: int, group: int) -> tuple[Array, Array]:
    return _for_blocks(weights, which, experts, group), which


def _for_blocks_bwd(experts: int, group: int, which: Array, grad: Array) -> tuple[Array, None]:
    hot = jax.nn.one_hot(which, experts, dtype=grad.dtype)
    total = jnp.tensordot(hot, grad, ((0,), (group,)))
    return jnp.moveaxis(total, 0, group), None


_for_blocks.defvjp(_for_blocks_fwd, _for_blocks_bwd)


# -- what a room has no seat for


@jax.named_scope("left_over")  # by which audits know that it seldom runs
def _rounds(add: Callable[..., PyTree], total: T, count: int) -> T:
    """Adds the rounds after the first."""
    return lax.scan(add, total, jnp.arange(1, count, dtype=jnp.int32))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_rest(
    jaxpr: Jaxpr, count: int, is_more: Array, first: list[Array], inputs: list[Array]
) -> list[Array]:
    """Adds what rounds after the first return, if some device needs them."""

    def more(first: list[Array], inputs: list[Array]) -> list[Array]:
        def add(total: list[Array], number: Array) -> tuple[list[Array], None]:
            outs = _compat.run_jaxpr(jaxpr, [number, *inputs])
            return list(map(jnp.add, total, outs)), None

        return _rounds(add, first, count)

    return lax.cond(is_more, more, lambda first, _: first, first, inputs) if count > 1 else first


def _with_rest_fwd(
    jaxpr: Jaxpr, count: int, is_more: Array, first: list[Array], inputs: list[Array]
) -> tuple[list[Array], PyTree]:
    return _with_rest(jaxpr, count, is_more, first, inputs), (is_more, inputs)


def _with_rest_bwd(
    jaxpr: Jaxpr, count: int, residuals: PyTree, grads: list[Array]
) -> tuple[None, list[Array], list[Array | None]]:
    """Runs the rounds again: what they would keep is as much as that of all rows."""
    (is_more, inputs) = residuals
    floats = {k: x for k, x in enumerate(inputs) if is_float(x)}

    def none(*_: PyTree) -> dict[int, Array]:
        return jax.tree.map(jnp.zeros_like, floats)

    def more(inputs: list[Array], grads: list[Array]) -> dict[int, Array]:
        def run(floats: dict[int, Array], number: Array) -> list[Array]:
            each = [floats.get(k, x) for k, x in enumerate(inputs)]
            return _compat.run_jaxpr(jaxpr, [number, *each])

        def add(total: dict[int, Array], number: Array) -> tuple[dict[int, Array], None]:
            here = {k: inputs[k] for k in floats}
            _, vjp = jax.vjp(functools.partial(run, number=number), here)
            return jax.tree.map(jnp.add, total, *vjp(grads)), None

        return _rounds(add, none(), count)

    more_grads = lax.cond(is_more, more, none, inputs, grads) if count > 1 else none()
    return None, grads, [more_grads.get(k) for k in range(len(inputs))]


_with_rest.defvjp(_with_rest_fwd, _with_rest_bwd)
