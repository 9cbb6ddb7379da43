"""What an update of layers reads of all gradients, and whether a step can guess it.

An update divides at its sums over gradients. What a sum adds up follows from the gradient and the
state of one stack, so layers add up their parts while they are updated. Numbers follow from all the
sums, such as a norm and whether it is small enough. Layers read the numbers. So a step may guess
these, update a layer before other gradients are there, and look later whether the guess was right.

The guess is what the numbers are if all sums are zero, or next to it. It must be the same for both:
whether a norm is small is, and the factor of an update that always divides by the norm is not.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn, Var
from jax.typing import ArrayLike

from zerojax._jaxprs import Atom, alive, is_var, reads, type_of
from zerojax._update.rules import SAME, Flat, is_sum
from zerojax._update.update import InParts

TINY = 1e-12  # of a sum over gradients; its square root is a normal number too
SHAPED = "broadcast_in_dim squeeze reshape copy optimization_barrier"


def sums_of(program: Flat, grads: int, leaves: int) -> list[int]:
    """Returns the sums at which an update divides: equations, by their positions.

    A sum adds up what follows from gradients, which are the first inputs, from the state, which
    ends at `leaves`, and from other sums, such as the norm of a clip before it.
    """
    sums = [k for k, eqn in enumerate(program.eqns) if is_sum(eqn)]
    origins = program.divided(sums).origins(dict(enumerate(program.invars)))
    inputs = {k: origins.get(program.eqns[k].invars[0], (leaves,)) for k in sums}
    return [k for k in sums if min(inputs[k]) < grads and max(inputs[k]) < leaves]


class Guess:
    """The numbers that updates of layers read.

    They follow from `sums` alone, which has the variable of each sum by its position. `unknown` are
    values that follow from all gradients in another way, so that no layer may read them. `origins`
    says from which inputs or sums, which come after them, each variable follows.
    """

    def __init__(self, parts: InParts) -> None:
        self.full = full = parts.full
        results = [v for v, value in full.constants.items() if value is None]
        self.sums, count = dict(zip(parts.sums, results, strict=True)), len(full.invars)
        self.origins = full.origins(dict(enumerate([*full.invars, *results])))
        depths: list[int] = []
        for added in full.outvars[len(full.outvars) - len(results) :]:
            depths.append(1 + self._depth(added, depths))
        alone = [v for eqn in full.eqns if len(eqn.outvars) == 1 for v in eqn.outvars]
        follows = {v for v in results + alone if min(self.origins.get(v, (0,))) >= count}
        scalars = {v for v in follows if parts.labels.get(v) == SAME and type_of(v).shape == ()}
        readers = [eqn for eqn in full.eqns if not scalars.issuperset(eqn.outvars)]
        read = dict.fromkeys(v for eqn in readers for v in reads(eqn) if v in scalars)
        self.numbers = list(read)
        self.unknown = [v for v, _ in parts.before if v not in read]
        # A pass with the numbers of the one before it is right about sums that follow from these.
        self.passes = 1 + max((self._depth(v, depths) for v in read), default=0)

    def _depth(self, value: Atom, depths: Sequence[int]) -> int:
        """Returns how many sums follow one from another before this value does."""
        sums = (i - len(self.full.invars) for i in self.origins[value])
        return max((depths[j] for j in sums if j >= 0), default=0)

    @functools.cached_property
    def usual(self) -> dict[Var, np.ndarray]:
        """The numbers that have a usual value."""
        pairs = zip(self.numbers, self.at(0.0), self.at(TINY), strict=True)
        return {v: a for v, a, b in pairs if a == b and a.dtype == b.dtype}

    @property
    def values(self) -> list[np.ndarray]:
        """The guess. What decides nothing may be anything; a number keeps NaNs out."""
        return [self.usual.get(v, np.ones((), type_of(v).dtype)) for v in self.numbers]

    def at(self, total: float) -> list[np.ndarray]:
        """Returns the numbers where each sum is `total` or next to it, and nothing is true of any
        gradient. No two sums are equal: their ratio has no usual value."""
        is_float = [jnp.issubdtype(type_of(v).dtype, jnp.floating) for v in self.sums.values()]
        totals = [total * (1 + j) * each for j, each in enumerate(is_float)]
        with jax.ensure_compile_time_eval():
            return list(map(np.asarray, self.following(dict(zip(self.sums, totals, strict=True)))))

    def following(self, totals: Mapping[int, ArrayLike]) -> list[Array]:
        """Returns the numbers that follow from the results of all sums."""
        program = self.knowing(totals).cut([*self.numbers])
        return list(map(jnp.asarray, program([None] * len(self.full.invars))))

    def added(self, k: int, totals: Mapping[int, ArrayLike]) -> Flat:
        """Returns the program for what a sum adds up, from the results of those before it."""
        at = list(self.sums).index(k) - len(self.sums)
        return self.knowing(totals).cut([self.full.outvars[at]])

    def knowing(self, totals: Mapping[int, ArrayLike]) -> Flat:
        known = {self.sums[k]: total for k, total in totals.items()}
        return self.full.knowing({v: jnp.asarray(x, type_of(v).dtype) for v, x in known.items()})

    def decides(self, program: Flat, numbers: Sequence[Var]) -> frozenset[int] | None:
        """Returns which of the numbers decide what a program computes, where the others are as they
        are guessed; None if one of those has no usual value."""
        usual = zip(numbers, map(self.usual.get, self.numbers), strict=True)
        known: dict[Atom, bool] = {
            v: bool(x) for v, x in usual if x is not None and x.dtype == bool
        }

        def is_known(eqn: JaxprEqn) -> bool:
            return is_var(eqn.invars[0]) and eqn.invars[0] in known  # no literal has a hash

        for eqn in program.eqns:
            if eqn.primitive.name in SHAPED.split() and is_known(eqn):
                known[eqn.outvars[0]] = known[eqn.invars[0]]

        def chosen(eqn: JaxprEqn) -> list[Var]:
            if eqn.primitive.name != "select_n" or not is_known(eqn):
                return reads(eqn)
            which, *cases = eqn.invars
            return list(filter(is_var, (which, cases[known[which]])))

        eqns = alive(program.eqns, program.outvars, chosen)
        live = {v for eqn in eqns for v in chosen(eqn)} | set(filter(is_var, program.outvars))
        needed = frozenset(j for j, v in enumerate(numbers) if v in live)
        return needed if all(self.numbers[j] in self.usual for j in needed) else None

    def is_wrong(self, actual: Sequence[Array], needed: frozenset[int]) -> Array:
        """Returns whether a number that decides is not as it was guessed."""
        # NaN is not equal to anything.
        return jnp.any(jnp.stack([actual[j] != self.values[j] for j in sorted(needed)]))
