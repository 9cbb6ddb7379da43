"""What an update of layers reads of all gradients together, and whether a step can guess it.

`optax.clip_by_global_norm` reads a norm, and whether it is small enough. If it is, the update is
that of an optimizer without the clip. So a step may guess that it is, update a layer before other
gradients are there, and look later whether the guess was right.

The guess is what the update would read if all gradients were zero, or next to it. It must be the
same for both: a clip's is, and the factor of an update that always divides by the norm is not.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn, Var
from jax.typing import ArrayLike

from zerojax._kernel.jaxprs import alive, is_var, reads, type_of
from zerojax._update.rules import SAME, Flat, Label
from zerojax._update.update import TOGETHER, InParts

NEVER_SAME = "the update reads something of all gradients, and that has no usual value"
TINY = 1e-12  # of a sum over gradients; its square root is a normal number too
SHAPED = "broadcast_in_dim squeeze reshape copy optimization_barrier"


@dataclasses.dataclass(frozen=True, eq=False)
class Reads:
    """What the update of a layer has to do with a guess.

    `needed` are the positions of what it reads of the guess, where that decides anything. `sums`
    are the equations whose results are sums over its gradient, and `of_grad` returns them for a
    device's part of a layer.
    """

    needed: frozenset[int]
    sums: tuple[int, ...]
    of_grad: Callable[[Array], list[Array]]


class Guess:
    """The scalars that updates of layers read of all gradients.

    `values` are guessed. `sums` are the equations that sum over one stack's gradient, each with the
    position of that gradient: a device knows such a sum layer by layer.
    """

    def __init__(
        self, parts: InParts, count: int, scalars: list[Var], sums: dict[int, int]
    ) -> None:
        self.full, self.one, self.count, self.scalars = parts.full, parts.one, count, scalars
        self.sums = sums
        # The gradients that must be there to know the scalars, whatever else is known.
        self.wanted = self.full.knowing(dict.fromkeys(sums, 0.0)).cut([*scalars]).read()
        places = {v: k for k, eqn in enumerate(self.full.eqns) for v in eqn.outvars}
        self.places = [places[v] for v in scalars]
        zero, tiny = self._at(0.0), self._at(TINY)
        pairs = zip(zero, tiny, strict=True)
        self.is_usual = [a.tobytes() == b.tobytes() and a == a for a, b in pairs]
        # What the guess decides nothing by may be anything; a number keeps NaNs out.
        pairs = zip(zero, self.is_usual, strict=True)
        self.values = [x if usual else np.ones_like(x) for x, usual in pairs]

    @classmethod
    def of(cls, parts: InParts, count: int) -> "Guess | str":
        """Returns the guess, or why there is none; the first `count` inputs are gradients."""
        if not parts.before:
            return NEVER_SAME
        of_all = {v for v, _ in parts.before}
        for eqn in parts.full.eqns:
            if of_all.intersection(reads(eqn)):
                of_all.update(eqn.outvars)
        alone = {v for eqn in parts.full.eqns if len(eqn.outvars) == 1 for v in eqn.outvars}
        scalars = {
            v
            for v in of_all & alone - parts.sources.keys()
            if parts.labels.get(v) == SAME and type_of(v).shape == ()
        }
        readers = [eqn for eqn in parts.full.eqns if not scalars.issuperset(eqn.outvars)]
        read = [v for eqn in readers for v in reads(eqn)] + list(filter(is_var, parts.full.outvars))
        found = [v for v in dict.fromkeys(read) if v in scalars]
        sums = _sums(parts.full, count, found)
        if parts.full.knowing(dict.fromkeys(sums, 0.0)).cut([*found]).read():
            return NEVER_SAME
        summed = {k: parts.full.eqns[k].invars[0] for k, grads in sums.items() if len(grads) == 1}
        # Not what was clipped before: a layer does not know by how much.
        of_stacks = {
            k: next(iter(sums[k]))
            for k, v in summed.items()
            if parts.labels.get(v) == 0 and v not in of_all
        }
        return cls(parts, count, found, of_stacks)

    def _at(self, total: float) -> list[np.ndarray]:
        """Returns the scalars where all sums over gradients are `total`."""
        with jax.ensure_compile_time_eval():
            known = {k: self._cast(k, total) for k in _sums(self.full, self.count, self.scalars)}
            program = self.full.knowing(known).cut(list(self.scalars))
            return list(map(np.asarray, program([None] * len(self.full.invars))))

    def _cast(self, k: int, value: ArrayLike) -> Array:
        return jnp.asarray(value, type_of(self.full.eqns[k].outvars[0]).dtype)

    def known(self, sums: Mapping[int, Array]) -> dict[int, Array]:
        """Returns the results of equations that are sums, in their own dtypes."""
        return {k: self._cast(k, value) for k, value in sums.items()}

    def found(self, grads: Sequence[Any], sums: Mapping[int, Array]) -> list[Array]:
        """Returns the scalars as they are. Of gradients that are None, it needs the sums."""
        program = self.full.knowing(self.known(sums)).cut(list(self.scalars))
        others = [None] * (len(self.full.invars) - self.count)
        return list(map(jnp.asarray, program([*grads, *others])))

    def taken_from(self, program: Flat) -> Flat:
        """Returns a program of the same equations that has the scalars as its last inputs."""
        taken = [program.eqns[k].outvars[0] for k in self.places]
        eqns = [eqn for k, eqn in enumerate(program.eqns) if k not in self.places]
        invars = [*program.invars, *taken]
        return dataclasses.replace(program, invars=invars, eqns=eqns)

    def reads(
        self, program: Flat, grad: int, shard: Flat, labels: dict[Any, Label], dim: int | None
    ) -> Reads | str:
        """Returns what a program, which `taken_from` the one of a device's part of a layer, has to
        do with the guess; `labels` relate that part to the layer, sharded along `dim`."""
        first = len(program.invars) - len(self.scalars)
        invars = program.invars[first:]
        known: dict[Any, bool] = {
            v: bool(value)
            for v, value, usual in zip(invars, self.values, self.is_usual, strict=True)
            if usual and value.dtype == bool
        }

        def is_known(eqn: JaxprEqn) -> bool:
            return is_var(eqn.invars[0]) and eqn.invars[0] in known  # no literal has a hash

        for eqn in program.eqns:
            if eqn.primitive.name in SHAPED.split() and is_known(eqn):
                known[eqn.outvars[0]] = known[eqn.invars[0]]

        def decides(eqn: JaxprEqn) -> bool:
            return eqn.primitive.name == "select_n" and is_known(eqn)

        def chosen(eqn: JaxprEqn) -> list[Var]:
            if not decides(eqn):
                return reads(eqn)
            which, *cases = eqn.invars
            return list(filter(is_var, (which, cases[known[which]])))

        eqns = alive(program.eqns, program.outvars, chosen)
        live = {v for eqn in eqns for v in chosen(eqn)} | set(filter(is_var, program.outvars))
        needed = frozenset(j for j, v in enumerate(invars) if v in live)
        if not all(self.is_usual[j] for j in needed):
            return NEVER_SAME
        if grad in self.wanted:
            return TOGETHER
        sums = tuple(k for k, of in self.sums.items() if of == grad)
        operands = [self.one.eqns[k].invars[0] for k in sums]
        if any(labels[v] != (SAME if dim is None else dim) for v in operands):
            return NEVER_SAME
        results = shard.cut([shard.eqns[k].outvars[0] for k in sums])

        def of_grad(value: Array) -> list[Array]:
            inputs: list[Any] = [None] * len(shard.invars)
            inputs[grad] = value
            return results(inputs)

        return Reads(needed, sums, of_grad)

    def was_wrong(self, found: Sequence[Array], needed: frozenset[int]) -> Array:
        """Returns whether something that decides is not as it was guessed."""
        # NaN is not equal to anything.
        wrong = [found[j] != self.values[j] for j in sorted(needed)]
        return jnp.any(jnp.stack(wrong))


def _sums(full: Flat, count: int, scalars: Sequence[Var]) -> dict[int, frozenset[int]]:
    """Returns the equations, by position, that sum over gradients and nothing else, among those
    that make the scalars; each with its gradients."""
    grads, state = full.origins(range(count)), full.origins(range(count, len(full.invars)))
    needed = {id(eqn) for eqn in full.cut(list(scalars)).eqns}
    return {
        k: grads[eqn.invars[0]]
        for k, eqn in enumerate(full.eqns)
        if id(eqn) in needed and eqn.primitive.name == "reduce_sum"
        if type_of(eqn.outvars[0]).shape == () and is_var(eqn.invars[0])
        if eqn.invars[0] in grads and eqn.invars[0] not in state
    }
