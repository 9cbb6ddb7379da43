"""Keeps experts where they are: rows travel to the devices of their experts, and back.

Devices of a mesh axis have other rows and other experts. What is computed of weights alone runs on
a device's experts. Where rows meet them, a *trip* begins: the rows of all devices for these experts
are exchanged, what follows runs on them, one copy for each device they came from, and results
return. What can not be part of a trip gathers its experts, which is exact, and is reported.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import contextlib
import dataclasses
import math
from collections.abc import Generator, Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._jaxprs import RAGGED, Eqn, type_of
from zerojax._passes.block_runner import (
    OTHERS,
    TOTALS,
    BlockRunner,
    Layouts,
    Received,
    Tracked,
)
from zerojax._passes.blocks import Axis, Blocks
from zerojax._passes.control import CONTROL
from zerojax._passes.loss import Loss
from zerojax._passes.rooms import Rooms, for_ragged
from zerojax._passes.sequences import rule_of, run_on_blocks
from zerojax._passes.trips import ROWS, TRIPS, Leg, Trip


def keep_experts(
    loss: Loss,
    axis: str,
    size: int,
    dims: Sequence[int | None],
    room: float,
    axes: Sequence[str],
) -> Loss:
    """Returns a loss of which each device of a mesh axis has its block of the experts.

    `dims` says which dimension of each parameter counts experts; None has none. The last block may
    end with experts that do not count. Sorted rows have `room` times an equal share of a device's.
    The metrics have the fullest room of the devices along `axes`.
    """
    runner = Keeper(Axis(axis, size), room, len(loss.params))
    places = [None if dim is None else Blocks(dim) for dim in dims]
    count, metrics = len(loss.jaxpr.outvars), list[str]()

    def returned(outs: list[Tracked]) -> list[Array]:
        results = [runner.array(v, None, loss.jaxpr.eqns[-1]) for v in outs[:count]]
        metrics[:] = METRICS if outs[count:] else ()
        if not metrics:
            return results
        load, overflows = _worst(jnp.stack([v.array for v in outs[count:]]))
        return [*results, lax.pmax(lax.stop_gradient(load), tuple(axes)), overflows]

    result = run_on_blocks(runner, loss, places, returned)
    return dataclasses.replace(result, metrics=(*loss.metrics, *metrics))


# Code that may have experts of its own. No other equation knows both experts and rows.
DESCENDED = (*_compat.CALLS, *_compat.REMAT, "scan", "cond")
# How full the fullest room is, and how many trips, a layer's each, needed more than one round.
METRICS = "expert_load", "expert_overflows"


def _worst(loads: Array) -> Array:
    """Returns the metrics of several trips as those of one."""
    return jnp.stack([jnp.max(loads[..., 0]), jnp.sum(loads[..., 1])])


class Keeper(BlockRunner):
    """Runs a jaxpr of all experts on this device's rows, and on its block of the experts.

    A value in `Blocks` is computed of experts' weights alone. Any other is this device's own; or,
    if it is the `same` on all devices of the axis, computed of parameters alone. A value that is
    `away` is a result of a trip, which has not run yet.
    """

    def __init__(self, axis: Axis, room: float, params: int) -> None:
        super().__init__(axis, CONTROL, rule_of, math.inf, TRIPS)
        self.room, self.params, self.same = room, params, set[Tracked]()
        self.away = dict[Tracked, Trip]()
        self.home = dict[Tracked, Tracked]()
        self.open = [dict[Tracked | None, Trip]()]  # in this scope of JAX's and those around it
        self.callers_of = list[tuple[JaxprEqn, Sequence[Tracked]]]()
        self.loads = [list[Tracked]()]  # of each jaxpr that runs

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[ArrayLike],
        inputs: Sequence[Tracked],
        caller: JaxprEqn | None = None,
    ) -> list[Tracked]:
        name = caller.primitive.name if caller else ""
        if len(self.loads) == 1:
            self.same.update(inputs[: self.params])
        if caller is not None and self.callers_of[-1][0] is caller:
            pairs = list(zip(self.callers_of[-1][1], inputs, strict=False))
            if name == "scan":
                fixed, _, rows = Eqn(caller).parts(pairs)
                pairs = fixed + rows
            self.same.update(inside for v, inside in pairs if self.is_same(v))
        self.loads.append([])
        outs = super().run(jaxpr, consts, inputs, caller)
        loads = self.loads.pop()
        returns = len(self.loads) == 1 or name in (*_compat.CALLS, *_compat.REMAT, "scan")
        return [*outs, *loads] if returns else outs

    @contextlib.contextmanager
    def scope(self, times: int = 1) -> Generator[None]:
        self.open.append({})
        try:
            with super().scope(times):
                yield
        finally:
            self.open.pop()

    def check_axes(self, eqn: JaxprEqn) -> None:
        """A loss may speak over the axis: its devices have rows of their own."""

    def said(self, each: Received) -> str:
        return each.what if each.what == ROWS else f"experts, gathered for {each.place}"

    def is_same(self, value: Tracked) -> bool:
        if value.eqn is not None:
            return all(map(self.is_same, value.operands))
        if value in self.away:
            return False
        return value in self.same or bool(value.at) or not isinstance(value.array, Tracer)

    def results(self, eqn: JaxprEqn, operands: list[Tracked]) -> list[Tracked]:
        """Returns what an equation makes of values, some of which may be in a trip."""
        name = eqn.primitive.name
        is_same = all(map(self.is_same, operands)) and not _compat.names_an_axis(eqn)
        if not _is_inlined(eqn) and not is_same:
            if any(v in self.away or self.natural(v) for v in operands):
                if (results := self.joined(eqn, operands)) is not None:
                    return results
                back = [self.returned(v, eqn) for v in operands]
                if back != operands and (results := self.joined(eqn, back)) is not None:
                    return results
                operands = back
            # Of devices whose rows decide what they run, all must have what it needs.
            is_own_way = name == "cond" and not self.is_same(operands[0])
            scans = name == "scan" and _scans_experts(eqn, operands)
            if name not in DESCENDED or is_own_way or scans:
                operands = [self.gathered(v, eqn) for v in operands]
        return self.ran(eqn, operands, is_same)

    def ran(self, eqn: JaxprEqn, operands: list[Tracked], is_same: bool) -> list[Tracked]:
        """Runs an equation on this device, on its experts where these suffice."""
        name = eqn.primitive.name
        # A rule of a user's may be linear in nothing, and runs as it is wherever it can.
        is_rule = name in ("custom_jvp_call", "custom_vjp_call")
        runs_whole = is_rule or (name in self.control and not _is_inlined(eqn) and not is_same)
        if runs_whole and not any(map(self.natural, operands)):
            results = self.whole(eqn, operands)
            self.same.update(results if is_same else ())
            return results
        self.callers_of.append((eqn, operands))
        sent, before = self.regions[-1].sent, len(self.regions[-1].sent)
        results = super().results(eqn, operands)
        self.callers_of.pop()
        gathers = any(each.what == OTHERS for each in sent[before:])
        fixed = len(Eqn(eqn).parts(operands)[0]) if name == "scan" else 0
        if gathers and any(map(self.natural, operands[:fixed])):  # each turn would
            del sent[before:]
            once = [self.gathered(v, eqn) for v in operands[:fixed]]
            return self.results(eqn, [*once, *operands[fixed:]])
        results, loads = results[: len(eqn.outvars)], results[len(eqn.outvars) :]
        if loads:
            worst = _worst(jnp.stack([jnp.asarray(v.array) for v in loads]))
            self.loads[-1].append(Tracked(worst.shape, worst))
        if is_same:
            self.same.update(results)
        return results

    def whole(self, eqn: JaxprEqn, operands: Sequence[Tracked]) -> list[Tracked]:
        """Runs an equation as it is."""
        return self.bound(eqn, operands, [None] * len(operands), [None] * len(eqn.outvars))

    def gathered(self, value: Tracked, eqn: JaxprEqn) -> Tracked:
        """Returns a value of all experts."""
        if not self.natural(value):
            return value
        result = Tracked(value.shape, self.array(value, None, eqn))
        self.same.add(result)
        return result

    def array(self, value: Tracked, at: Blocks | None, eqn: JaxprEqn, what: str = OTHERS) -> Array:
        return super().array(self.returned(value, eqn), at, eqn, what)

    def settled(self, value: Tracked, eqn: JaxprEqn) -> Tracked:
        return super().settled(self.returned(value, eqn), eqn)

    # -- trips

    def returned(self, value: Tracked, eqn: JaxprEqn) -> Tracked:
        """Returns a value that is back from its trip."""
        if value not in self.away:
            return value
        if value not in self.home:
            trip = self.away[value]
            read = {v for step in trip.steps for v in step.operands}
            ends = [v for v in trip.types if v not in read or v is value]
            if trip.is_dear(ends):
                arrays = self.stayed(trip, ends)
            else:
                arrays, loads = trip.run(ends, eqn)
                self.loads[-1] += [Tracked(x.shape, x) for x in loads]
            for end, array in zip(ends, arrays, strict=True):
                self.home[end] = Tracked(end.shape, array)
            self.open[-1] = {k: other for k, other in self.open[-1].items() if other is not trip}
        return self.home[value]

    def stayed(self, trip: Trip, ends: Sequence[Tracked]) -> list[Array]:
        """Returns what a trip would, of this device's rows and all experts."""
        here = dict[Tracked, Tracked]()
        for step in trip.steps:
            operands = [here.get(v) or self.gathered(v, step.eqn) for v in step.operands]
            here.update(zip(step.results, self.whole(step.eqn, operands), strict=True))
        return [self.array(here[v], None, trip.steps[-1].eqn) for v in ends]

    def joined(self, eqn: JaxprEqn, operands: Sequence[Tracked]) -> list[Tracked] | None:
        """Returns the results of an equation in a trip; None if it can not be part of one."""
        trips = {self.away[v]: None for v in operands if v in self.away}
        if len(trips) > 1 or any(v in self.home for v in operands):
            return None
        key, operands = None, list(operands)
        if eqn.primitive.name == RAGGED:
            key, operands[1] = operands[2], self.settled(operands[1], eqn)
        trip = next(iter(trips), None) or self.open[-1].get(key)
        if trip is None:
            trip = Trip(self) if key is None else Rooms(self, key, operands[0])
        places = [trip.types[v][1] if v in trip.types else self.natural(v) for v in operands]
        wanted = self.wanted(eqn, operands, places, trip) if trip.takes(key, operands) else None
        if wanted is None:
            return None
        pairs = zip(operands, wanted, strict=True)
        leaves = dict.fromkeys(leaf for pair in pairs for leaf in trip.leaves_of(*pair))
        if not trip.carries(eqn, leaves):
            return None
        results = [Tracked(type_of(v).shape) for v in eqn.outvars]
        step = Leg(eqn, operands, wanted, results)
        types, sent = trip.tried(step, list(leaves))
        if any(each.what != TOTALS for each in sent) or not all(map(trip.returns, types)):
            return None
        if sent and trips and trip.is_dearer(step, types, leaves):
            return None
        is_sum = bool(sent) and eqn.primitive.name in ("dot_general", "reduce_sum")
        trip.steps.append(dataclasses.replace(step, is_sum=is_sum))
        trip.leaves.update(leaves)
        trip.types.update(zip(results, types, strict=True))
        self.away.update(dict.fromkeys(results, trip))
        self.open[-1][trip.key] = trip
        return results

    def wanted(
        self, eqn: JaxprEqn, operands: Sequence[Tracked], places: Layouts, trip: Trip
    ) -> Layouts | None:
        """Returns the blocks in which a trip needs operands; None if it can not run this."""
        name, is_start = eqn.primitive.name, all(v not in trip.types for v in operands)
        if name == RAGGED:
            return for_ragged(eqn, operands)
        if name == "dot_general":
            return _for_matmul(eqn, places, is_start)
        if name == "scan":
            return places if _scans_experts(eqn, operands) else None
        if is_start or name in (*_compat.REMAT, *_compat.CALLS, "while", "cond"):
            return None
        shapes = {v.shape: at for v, at in zip(operands, places, strict=True) if at}
        if name in self.control:
            return [shapes.get(v.shape) for v in operands]
        outs = (self.after(eqn, k, at) for k, at in enumerate(places) if at)
        if (out := next(filter(None, outs), None)) is None:
            return places
        before = self.before(eqn, out)
        return before and [at or new for at, new in zip(places, before, strict=True)]


def _is_inlined(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _compat.CALLS and not Eqn(eqn).name.startswith("zerojax_")


def _scans_experts(eqn: JaxprEqn, operands: Sequence[Tracked]) -> bool:
    return any(v.at and v.at.dim == 0 for v in Eqn(eqn).parts(operands)[2])


def _for_matmul(eqn: JaxprEqn, places: Layouts, is_start: bool) -> Layouts | None:
    (contract, batch), wanted = Eqn(eqn).factors, list(places)
    for k, at in enumerate(places):
        for dims in (batch, contract):
            if at and at.dim in dims[k] and wanted[1 - k] is None:
                wanted[1 - k] = Blocks(dims[1 - k][list(dims[k]).index(at.dim)])
        if at and is_start and at.dim in contract[k]:
            return None
    return wanted
