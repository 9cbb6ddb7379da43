"""Has collectives of CPU devices run in the order of the program.

[Note: collectives of CPU devices]
XLA:CPU may run a collective during a loop, or a branch, from which it needs nothing. It orders
collectives only by their start, and counts a loop as started as soon as one turn waits for another
thread. All collectives have the same channel, so devices pair the wrong ones: they wait for each
other until XLA ends the process, or return NaN or wrong numbers. A barrier is no data dependence
(JAX 0.12; 0.10 expands barriers before it schedules). `tests/engine/test_fence.py` has the fault in
plain JAX. In a program that JAX loads from its cache, XLA:CPU orders a loop not even by its start:
it reads each loop back as if nobody else used the channel. So on CPUs such a loop depends on the
collectives before it, and what follows on its results, in a way that XLA cannot see through.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import Mesh
from jax.typing import ArrayLike

from zerojax import _compat, _jaxprs
from zerojax._types import PyTree, is_float, is_key

T = TypeVar("T")

LOOPS = "cond", "while", "scan"  # and branches: all that has a program of its own
_MOST_BITS = 64  # of one number


def mark(outs: Sequence[Array]) -> Array | None:
    """Returns a boolean that is ready once all `outs` are. It is false, but XLA cannot know that.

    Returns None if no output has elements.
    """
    # Scalars, one after another: XLA:CPU compiles a loop of its own for each small array.
    filled = [x for x in outs if x.dtype != jax.dtypes.float0 and math.prod(x.shape) > 0]
    counts = [lax.population_count(_bits(x)) for x in filled]
    marks = [count > _MOST_BITS for count in counts]
    return functools.reduce(jnp.logical_or, marks) if marks else None


def wait(values: T, done: Array | None, other: Callable[..., Array] = jnp.zeros_like) -> T:
    """Returns `values`, made to depend on a mark if there is one. XLA sees through that where it
    knows that a value is what `other` returns for it."""

    def waiting(x: Array) -> Array:
        if done is None:
            return x
        if is_key(x):
            words = waiting(jax.random.key_data(x))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        here = _compat.fetched(x)
        here = lax.select(done, other(here), here)
        return _compat.stored(here) if _compat.is_on_host(x) else here

    return jax.tree.map(waiting, values)


def _bits(array: Array) -> Array:
    array = jax.random.key_data(array) if is_key(array) else array
    first = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())
    first = first.real if jnp.iscomplexobj(first) else first
    if jnp.issubdtype(first.dtype, jnp.floating):
        width = jnp.finfo(first.dtype).bits
        first = lax.bitcast_convert_type(first, jnp.dtype(f"uint{width}"))
    # Numbers of 4 bits cannot count to `_MOST_BITS`.
    is_wide = first.dtype != bool and jnp.iinfo(first.dtype).bits >= 8
    return first if is_wide else first.astype(jnp.uint8)


# -- whole programs


def mixes_up_collectives(mesh: Mesh) -> bool:
    """Whether collectives may run in the midst of a loop that needs nothing of them, as on
    (emulated) CPU devices. GPUs have streams, which run in order."""
    return mesh.devices.flat[0].platform == "cpu"


def in_order(code: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns the code of one device, in which loops and branches of collectives wait for the
    collectives before them, and those after them wait for the loops."""

    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(code, return_shape=True)(*args)
        outs = _ordered(*_compat.opened(closed), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run


class _Sequenced(NamedTuple):
    array: ArrayLike
    loops: int = 0  # that it depends on: each of them depends on those before it
    since: frozenset[int] = frozenset()  # and which collectives after the last of them


def _ordered(
    jaxpr: Jaxpr, consts: Sequence[ArrayLike], inputs: Sequence[ArrayLike]
) -> list[ArrayLike]:
    order = _Order()
    outs = order.run(jaxpr, consts, list(map(_Sequenced, inputs)))
    return [wait(x, order.done) if loops < order.loops else x for x, loops, _ in outs]


class _Order:
    """Runs jaxprs. `done` marks the last loop of `loops`, and `since` has what came from other
    devices after it, by the number of the collective."""

    def __init__(self) -> None:
        self.loops = self.count = 0
        self.done: Array | None = None
        self.since: dict[int, list[Array]] = {}

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[ArrayLike], inputs: Sequence[_Sequenced]
    ) -> list[_Sequenced]:
        env = dict(zip(jaxpr.constvars, map(_Sequenced, consts), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: _jaxprs.Atom) -> _Sequenced:
            return env[atom] if _jaxprs.is_var(atom) else _Sequenced(atom.val)

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.results(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, jaxpr.outvars)]

    def results(self, eqn: JaxprEqn, operands: Sequence[_Sequenced]) -> list[_Sequenced]:
        arrays, loops = [v.array for v in operands], max([0, *(v.loops for v in operands)])
        since = frozenset[int]().union(*(v.since for v in operands))
        if not _compat.names_an_axis(eqn):
            return [_Sequenced(x, loops, since) for x in _compat.bind(eqn, arrays)]
        if _is_loop(eqn) and eqn.primitive.name in (*_compat.CALLS, *_compat.REMAT):
            if _jaxprs.Eqn(eqn).prevent_cse:  # as JAX does where it lowers a remat
                arrays = lax.optimization_barrier(arrays)
            inputs = [v._replace(array=x) for x, v in zip(arrays, operands, strict=True)]
            return self.in_scope(eqn, inputs)
        if eqn.primitive.name == "scan" and _jaxprs.Eqn(eqn).length == 1:
            return self.turn(eqn, operands)  # XLA takes it apart, too
        done = self.done if loops < self.loops else None
        if is_loop := _is_loop(eqn):
            eqn = _jaxprs.mapped_params(eqn, lambda _, value: _inside(value))
            free = (x for k, outs in self.since.items() if k not in since for x in outs)
            done = _either(done, mark([*free]))
        outs = _compat.bind(*_waiting(eqn, arrays, done))
        self.count += 1
        self.since[self.count] = outs
        if is_loop:
            self.loops, self.since = self.loops + 1, {}
            numbers = [outs[at] for at in _recurrent(eqn)[1:]]
            self.done = _either(self.done, mark(numbers or outs))
        return [_Sequenced(x, self.loops, since | {self.count}) for x in outs]

    def in_scope(self, eqn: JaxprEqn, inputs: Sequence[_Sequenced]) -> list[_Sequenced]:
        """Runs the jaxpr of an equation once, in the equation's scope."""
        jaxpr, consts = _compat.inner_jaxpr(eqn)
        eqns = [_compat.renamed(each, lambda var: var, eqn) for each in jaxpr.eqns]
        return self.run(jaxpr.replace(eqns=eqns), consts, inputs)

    def turn(self, eqn: JaxprEqn, operands: Sequence[_Sequenced]) -> list[_Sequenced]:
        """Runs the only turn of a scan."""
        consts, carry, rows = _jaxprs.Eqn(eqn).parts(operands)
        row = [v._replace(array=jnp.squeeze(v.array, 0)) for v in rows]
        outs = self.in_scope(eqn, [*consts, *carry, *row])
        stacked = [v._replace(array=jnp.expand_dims(v.array, 0)) for v in outs[len(carry) :]]
        return [*outs[: len(carry)], *stacked]


def _either(one: Array | None, other: Array | None) -> Array | None:
    return other if one is None else one if other is None else jnp.logical_or(one, other)


def _is_loop(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop or a branch of collectives, or has one in it."""
    loops = eqn.primitive.name in LOOPS or any(map(has_loops, _compat.inner_jaxprs(eqn)))
    return loops and _compat.names_an_axis(eqn)


def has_loops(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has loops or branches of collectives."""
    return any(map(_is_loop, jaxpr.eqns))


def _inside(value: PyTree) -> PyTree:
    """Returns a parameter of an equation. In jaxprs, loops are in order."""
    if type(value) is tuple:  # of branches
        return tuple(map(_inside, value))
    jaxpr, consts = _compat.opened(value)
    if not (hasattr(jaxpr, "eqns") and has_loops(jaxpr)):
        return value
    avals = [v.aval for v in jaxpr.invars]
    return jax.make_jaxpr(lambda *inputs: _ordered(jaxpr, consts, inputs))(*avals)


def _recurrent(eqn: JaxprEqn) -> list[int]:
    """Returns where a scan takes and where it returns the smallest number that each turn computes
    from that of the turn before and from other inputs; [] if there is none. XLA may drop other
    values, or know them: the gradient of a sum over layers passes through."""
    if eqn.primitive.name != "scan":
        return []
    body, _ = _compat.inner_jaxpr(eqn)
    read = {v for inner in body.eqns for v in _jaxprs.reads(inner)}
    numbers = list[list[int]]()
    for at, k in enumerate(_jaxprs.Eqn(eqn).parts(range(len(eqn.invars)))[1]):
        number, kind = body.invars[k], _jaxprs.type_of(body.invars[k])
        if not (is_float(kind) and kind.size and number in read):
            continue
        others, changed = {*body.invars} - {number}, set[_jaxprs.Var]()
        for inner in body.eqns:
            if not (others | changed).isdisjoint(_jaxprs.reads(inner)):
                changed.update(inner.outvars)
        if body.outvars[at] in changed:
            numbers.append([kind.size, k, at])
    return min(numbers, default=[])[1:]


def _waiting(
    eqn: JaxprEqn, arrays: Sequence[ArrayLike], done: Array | None
) -> tuple[JaxprEqn, Sequence[ArrayLike]]:
    """Returns an equation and its operands, of which enough wait for a mark."""
    if done is None:
        return eqn, arrays
    waiting = every = range(len(arrays))
    match eqn.primitive.name:
        case "cond":
            waiting = range(1)
        case "while":
            waiting = _jaxprs.Eqn(eqn).parts(every)[2]
        case "scan":
            waiting = _recurrent(eqn)[:1] or every
    arrays, invars = list(arrays), list(eqn.invars)
    other = functools.partial(jnp.full_like, fill_value=done)  # XLA knows the zeros of a carry
    for k in waiting:
        arrays[k] = wait(jnp.asarray(arrays[k], _jaxprs.type_of(invars[k]).dtype), done, other)
        invars[k] = _compat.fresh(invars[k])
    return eqn.replace(invars=invars), arrays
