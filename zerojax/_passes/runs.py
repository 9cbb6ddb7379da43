"""Finds layers in a loss: runs of equations that repeat, each with weights of its own."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import DropVar, Jaxpr, JaxprEqn

from zerojax import _compat
from zerojax._jaxprs import Atom, Inliner, Keys, Var, is_checkpoint, is_var, reads, running, type_of
from zerojax._kernel.places import LeafPlan
from zerojax._kernel.travel import Codec

LEAST = 3  # layers of a loop: two are as fast without one
# What is tried, so that the search takes less time than a trace: the most frequent periods, the
# starts of one where the fewest bytes pass, the distances to so many alike equations.
PERIODS, STARTS, NEXT = 64, 4, 16
SLICES = frozenset({"slice", "squeeze"})  # how JAX reads `x[2]`

Codecs = tuple[Codec, Codec]  # in which a weight is gathered, and its gradient reduced


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Layers that are alike: `count` times `period` equations from `start` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    def layer(self, number: int) -> slice:
        first = self.start + number * self.period
        return slice(first, first + self.period)


Place = tuple[int, int]  # of a value in its layer: which equation makes it, and which output it is


class Operand(NamedTuple):
    """What an operand in a layer is: made `ago` layers before, or from outside (None)."""

    ago: int | None = None
    place: Place | None = None
    weights: int | None = None  # a number that alike weights share


OUTSIDE = Operand()


class Repeats:
    """The equations of a loss, whose first inputs are parameters with these plans, which travel in
    these codecs."""

    def __init__(self, loss: Jaxpr, leaves: Sequence[LeafPlan], codecs: Sequence[Codecs]) -> None:
        self.loss, self.leaves, self.codecs = loss, leaves, codecs
        self.params = {v: at for at, v in enumerate(loss.invars[: len(leaves)])}
        self.inliner = Inliner()
        flat = list(map(self.without_passed_on, self.inliner.flat_of(loss.eqns, self.params)))
        self.eqns = self.rows_first(list(map(self.inliner.resolved, flat)))
        self.outvars = [self.inliner.named(v) for v in loss.outvars]
        self.made = {v: (i, k) for i, eqn in enumerate(self.eqns) for k, v in made_by(eqn)}
        self.last_read = {v: i for i, eqn in enumerate(self.eqns) for v in reads(eqn)}
        self.last_read |= {v: len(self.eqns) for v in self.outvars if is_var(v)}
        self.numbers = Keys()
        # The positions of the parameters that a value comes from, if it comes from them only.
        self.sources = {v: frozenset([at]) for v, at in self.params.items()}

    def without_passed_on(self, eqn: JaxprEqn) -> JaxprEqn:
        """Returns a `jax.checkpoint` without outputs that are its inputs, which readers then read:
        what all layers pass on (T5's bias) is no carry, and the last layer is like the others."""
        if not is_checkpoint(eqn):
            return eqn
        jaxpr, _ = _compat.inner_jaxpr(eqn)
        given = dict(zip(jaxpr.invars, eqn.invars, strict=True))
        outs = dict(zip(eqn.outvars, jaxpr.outvars, strict=True))
        passed = {out: given[v] for out, v in outs.items() if is_var(v) and v in given}
        if not passed:
            return eqn
        self.inliner.aliases |= passed
        kept = [out for out in outs if out not in passed]
        jaxpr = _compat.make_jaxpr(jaxpr.eqns, jaxpr.invars, [outs[out] for out in kept])
        return running(eqn, jaxpr).replace(outvars=kept)

    def rows_first(self, eqns: list[JaxprEqn]) -> list[JaxprEqn]:
        """Returns the equations, with slices of what is no weight's (`masks[number]`) right behind
        what they slice: no two are alike, and in a layer they would make it unlike the others."""
        there = dict.fromkeys([*self.loss.invars[len(self.leaves) :], *self.inliner.constants], -1)
        places = []
        for i, eqn in enumerate(eqns):
            read = reads(eqn)
            known = there.keys() >= {*read}
            moves = known and eqn.primitive.name in SLICES
            places.append(max((there[v] for v in read), default=i) if moves else i)
            there |= {v: places[i] for v in eqn.outvars if known}
        return [eqns[i] for i in sorted(range(len(eqns)), key=places.__getitem__)]

    @functools.cached_property
    def keys(self) -> np.ndarray:
        """A number for each equation, which alike ones share."""
        return np.array([self.numbers.of(eqn) for eqn in self.eqns], int)

    @functools.cached_property
    def weights(self) -> dict[Var, int]:
        """What comes from weights only, each with a number that alike ones share."""
        number = self.numbers.number
        weights = {
            v: number(_stackable(self.leaves[at], self.codecs[at]) or v)
            for v, at in self.params.items()
        }
        for i, eqn in enumerate(self.eqns):
            read = reads(eqn)
            if read and weights.keys() >= {*read} and not _compat.has_side_effects(eqn):
                sources = tuple(weights[v] for v in read)
                weights |= {v: number((self.keys[i], k, sources)) for k, v in made_by(eqn)}
                params = frozenset().union(*(self.sources[v] for v in read))
                self.sources |= {v: params for _, v in made_by(eqn)}
        return weights

    def reads_weights(self, eqn: JaxprEqn) -> bool:
        return not self.weights.keys().isdisjoint(reads(eqn))

    def runs(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yields runs between two equations, in their order."""
        run: Stretch | None = None
        for first, last, period in self.repeats(start, stop):
            if run is not None and last - first <= run.stop - run.start:
                break
            one = self.fitted(first, last, period)
            if one is not None and (run is None or one.stop - one.start > run.stop - run.start):
                run = one
        if run is not None:
            yield from self.runs(start, run.start)
            yield run
            yield from self.runs(run.stop, stop)

    def repeats(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns stretches of equations that are alike to the one a period later, with the period:
        the longest first, with short periods first."""
        keys, found = self.keys[start:stop], []
        for period in self.periods(start, stop):
            same = np.flatnonzero(np.diff(np.r_[0, keys[:-period] == keys[period:], 0]))
            for first, last in same.reshape(-1, 2).tolist():
                if last - first >= (LEAST - 1) * period:
                    found.append((start + first, start + last + period, period))
        return sorted(found, key=lambda one: (one[0] - one[1], one[2]))

    def periods(self, start: int, stop: int) -> list[int]:
        """Returns how far apart equations that read weights, and are alike, often are."""
        places = defaultdict(list)
        for i in range(start, stop):
            if self.reads_weights(self.eqns[i]):
                places[self.keys[i]].append(i)
        apart = Counter(
            b - a for p in places.values() for k, a in enumerate(p) for b in p[k + 1 : k + 1 + NEXT]
        )
        often = [period for period, _ in apart.most_common(PERIODS)]
        return [period for period in often if period * LEAST <= stop - start]

    def fitted(self, start: int, stop: int, period: int) -> Stretch | None:
        """Returns the longest run of layers between two equations that a loop can run."""
        passed = self.bytes_passed(start, stop)
        middle = (stop - start) // period // 2 * period
        starts = sorted(range(period), key=lambda k: (passed[middle + k], k))[:STARTS]
        runs = [
            self.longest(Stretch(start + k, period, (stop - start - k) // period)) for k in starts
        ]
        return max(filter(None, runs), key=lambda run: run.count, default=None)

    def bytes_passed(self, start: int, stop: int) -> np.ndarray:
        """Returns, for each equation and the end, the bytes that equations before it pass to it
        and those after it."""
        passed = np.zeros(stop - start + 1, np.int64)
        for i in range(start, stop):
            for v in self.eqns[i].outvars:
                last = min(self.last_read.get(v, i), stop)
                if i < last < stop:
                    size = type_of(v).size * type_of(v).dtype.itemsize + 1
                    passed[i + 1 - start] += size
                    passed[last + 1 - start] -= size
        return np.cumsum(passed)

    def longest(self, run: Stretch) -> Stretch | None:
        """Returns the longest part of a run whose layers have operands of the same kinds."""
        operands = [self.operands(run, k) for k in range(run.count)]
        latest = [self.latest(run, k) for k in range(run.count)]
        first, count = 0, 0
        for a in range(run.count - 1):
            if run.count - a <= count:
                break
            if not _begins(operands[a], operands[a + 1]):
                continue
            b, start = a + 1, run.layer(a).start
            while b < run.count and operands[b] == operands[a + 1] and latest[b] < start:
                b += 1
            if b - a > count:
                first, count = a, b - a
        best = Stretch(run.layer(first).start, run.period, count)
        return best if count >= LEAST and self.own_weights(best) else None

    def own_weights(self, run: Stretch) -> bool:
        """Whether each weight is read by one layer, or by all: a loop would gather what only some
        read in each of their turns."""
        layers = [self.eqns[run.layer(k)] for k in range(run.count)]
        read = [{v for eqn in eqns for v in reads(eqn)} for eqns in layers]
        sources = [[self.sources[v] for v in vs if v in self.sources] for vs in read]
        times = Counter(at for each in sources for at in set().union(*each))
        return {*times.values()} <= {1, run.count}

    def operands(self, run: Stretch, layer: int) -> list[Operand]:
        """Returns the operands of a layer, one equation after another."""
        return [
            self.operand(run, layer, v) for eqn in self.eqns[run.layer(layer)] for v in eqn.invars
        ]

    def operand(self, run: Stretch, layer: int, atom: Atom) -> Operand:
        if not is_var(atom):
            return OUTSIDE
        if atom in self.weights:
            return Operand(weights=self.weights[atom])
        if atom not in self.made or self.made[atom][0] < run.start:
            return OUTSIDE
        i, k = self.made[atom]
        number, place = divmod(i - run.start, run.period)
        return Operand(layer - number, (place, k)) if layer - number <= 1 else OUTSIDE

    def latest(self, run: Stretch, layer: int) -> int:
        """Returns the last equation, neither in a layer nor in the one before, that it reads."""
        return max(
            (
                self.made[v][0]
                for eqn in self.eqns[run.layer(layer)]
                for v in reads(eqn)
                if v in self.made and v not in self.weights
                if self.operand(run, layer, v) == OUTSIDE
            ),
            default=-1,
        )


def _begins(first: list[Operand], second: list[Operand]) -> bool:
    """Whether a layer with operands `first` can be the first of all, before one with `second`."""
    pairs = zip(first, second, strict=True)
    return all(a.ago != 0 if b.ago == 1 else a == b for a, b in pairs)


def made_by(eqn: JaxprEqn) -> Iterator[tuple[int, Var]]:
    """Yields what an equation makes, with its place among the outputs."""
    return ((k, v) for k, v in enumerate(eqn.outvars) if not isinstance(v, DropVar))


def _stackable(leaf: LeafPlan, codecs: Codecs) -> Hashable | None:
    """Returns a key that leaves share which one stack may hold; None for one that none may."""
    if leaf.is_on_host:
        return None
    return dataclasses.replace(leaf, path="", reason=None, stays=None), codecs
