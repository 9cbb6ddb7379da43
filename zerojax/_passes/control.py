"""Calls, loops and users' derivatives in a loss whose sequences are split."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._jaxprs import Atom, Eqn, is_var, type_of
from zerojax._passes.block_runner import CARRIES, TOTALS, BlockRunner, Layouts, Tracked
from zerojax._passes.blocks import Blocks
from zerojax._types import is_key

Code: TypeAlias = Callable[..., list[Array]]
Pair: TypeAlias = tuple[list[Array], list[Array]]
Settle: TypeAlias = Callable[[Tracked, JaxprEqn], Tracked]


class RetryError(Exception):
    """A loop's body returns a carry in other blocks than it takes."""

    def __init__(self, places: list[Blocks | None]) -> None:
        self.places = places


@contextlib.contextmanager
def scoped(eqn: JaxprEqn) -> Generator[None]:
    """Names what runs in place of an equation as it is named."""
    name = _compat.scope_of(eqn)
    with jax.named_scope(name) if name else contextlib.nullcontext():
        yield


def call(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked]) -> list[Tracked]:
    name = Eqn(eqn).name

    def named(code: Code) -> Code:
        code.__name__ = name
        return jax.jit(code)

    if name.startswith("zerojax_"):  # other passes look for it
        return traced(s, named, eqn, operands)
    with scoped(eqn):
        return s.run(*_compat.inner_jaxpr(eqn), operands, eqn)


def remat(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked]) -> list[Tracked]:
    return traced(s, lambda code: jax.checkpoint(code, **Eqn(eqn).options), eqn, operands)


def traced(
    s: BlockRunner,
    wrap: Callable[[Code], Code],
    eqn: JaxprEqn,
    operands: Sequence[Tracked],
    outputs: list[Tracked] | None = None,
    leave: Settle | None = None,
) -> list[Tracked]:
    """Runs the jaxpr of an equation as a function that `wrap` has JAX trace apart. `outputs` say
    what it returns, and in which blocks, as `leave` has them."""
    outs = [] if outputs is None else outputs

    def code(*arrays: Array) -> list[Array]:
        each = iter(arrays)
        inputs = [v if v.eqn else dataclasses.replace(v, array=next(each)) for v in operands]
        with s.scope():
            results = s.run(*_compat.inner_jaxpr(eqn), inputs, eqn)
            outs[:] = [leave(v, eqn) if leave else s.settled(v, eqn) for v in results]
        return [v.array for v in outs]

    with scoped(eqn):
        arrays = wrap(code)(*(v.array for v in operands if v.eqn is None))
    return _like(outs, arrays)


def scan(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked]) -> list[Tracked]:
    fixed, carry, xs = Eqn(eqn).parts(operands)
    xs = [s.settled(v, eqn) for v in xs]
    if any(x.at and x.at.dim == 0 for x in xs):
        return scan_of_tokens(s, eqn, [*fixed, *carry], xs)
    length, count = Eqn(eqn).length, len(carry)
    of_row = [Tracked(v.shape[1:], at=_shifted(v, -1)) for v in xs]

    def loop(places: Layouts) -> list[Tracked]:
        rows: list[Tracked] = []

        def body(state: list[Array], row: list[Array]) -> Pair:
            inputs = [*fixed, *_like(carry, state, places), *_like(of_row, row)]
            with s.scope(length):
                outs = s.run(*_compat.inner_jaxpr(eqn), inputs, eqn)
                state = returned(s, outs[:count], places, eqn)
                rows[:] = [s.settled(v, eqn) for v in outs[count:]]
            return state, [v.array for v in rows]

        first = [s.array(v, at, eqn) for v, at in zip(carry, places, strict=True)]
        state, ys = lax.scan(body, first, [v.array for v in xs], **Eqn(eqn).options)
        results = [Tracked((length, *v.shape), at=_shifted(v, 1)) for v in rows]
        return [*_like(carry, state, places), *_like(results, ys)]

    return until_stable(eqn, loop, [v.at for v in carry])


def _shifted(value: Tracked, by: int) -> Blocks | None:
    """Returns where the blocks are if a dimension comes, or goes, before all others."""
    return value.at and value.at.moved({d: d + by for d in range(len(value.shape))})


def while_loop(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked]) -> list[Tracked]:
    of_test, of_body, carry = Eqn(eqn).parts(operands)

    def loop(places: Layouts) -> list[Tracked]:
        def test(state: list[Array]) -> Array:
            with s.scope():
                inputs = [*of_test, *_like(carry, state, places)]
                return s.array(s.run(*_compat.opened(Eqn(eqn).cond_jaxpr), inputs)[0], None, eqn)

        def body(state: list[Array]) -> list[Array]:
            with s.scope():
                inputs = [*of_body, *_like(carry, state, places)]
                outs = s.run(*_compat.inner_jaxpr(eqn), inputs)
                return returned(s, outs, places, eqn)

        first = [s.array(v, at, eqn) for v, at in zip(carry, places, strict=True)]
        return _like(carry, lax.while_loop(test, body, first), places)

    return until_stable(eqn, loop, [v.at for v in carry])


def cond(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked]) -> list[Tracked]:
    results = [Tracked(type_of(v).shape) for v in eqn.outvars]

    def switch(places: Layouts) -> list[Tracked]:
        def branch(jaxpr: Jaxpr, consts: Sequence[ArrayLike]) -> list[Array]:
            with s.scope():
                return returned(s, s.run(jaxpr, consts, operands[1:]), places, eqn)

        codes = [functools.partial(branch, *pair) for pair in _compat.closed_jaxprs(eqn)]
        with s.scope():  # what a branch sends counts if all of them return the same blocks
            arrays = lax.switch(s.array(operands[0], None, eqn), codes)
        return _like(results, arrays, places)

    return until_stable(eqn, switch, [None] * len(results))


def until_stable(
    eqn: JaxprEqn, code: Callable[[Layouts], list[Tracked]], places: Layouts
) -> list[Tracked]:
    """Returns what a loop does that returns its carry in the blocks in which it takes it."""
    with scoped(eqn):
        while True:
            try:
                return code(places)
            except RetryError as error:
                places = error.places


def returned(
    s: BlockRunner, outs: Sequence[Tracked], places: Layouts, eqn: JaxprEqn
) -> list[Array]:
    """Returns values in these blocks; raises if some should be in blocks and are to be whole."""
    better = [at or s.natural(v) for v, at in zip(outs, places, strict=True)]
    if better != places:
        raise RetryError(better)
    return [s.array(v, at, eqn) for v, at in zip(outs, places, strict=True)]


def custom_jvp(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked]) -> list[Tracked]:
    inputs, outputs = [s.settled(v, eqn) for v in operands], list[Tracked]()

    def jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> Pair:
        (rule, consts), have = _compat.jvp_rule(eqn)
        with s.scope():
            outs = iter(s.run(rule, consts, [*_like(inputs, primals), *_like(inputs, tangents)]))
            results = [s.array(next(outs), v.at, eqn) for v in outputs]

            def tangent(like: Tracked, has: bool) -> Array:
                zero = np.zeros(s.axis.local(like.shape, like.at), jax.dtypes.float0)
                return s.array(next(outs), like.at, eqn) if has else jnp.asarray(zero)

            return results, list(map(tangent, outputs, have))

    def wrap(code: Code) -> Code:
        function = jax.custom_jvp(code)
        function.defjvp(jvp)
        return function

    return traced(s, wrap, eqn, inputs, outputs)


def custom_vjp(s: BlockRunner, eqn: JaxprEqn, operands: list[Tracked]) -> list[Tracked]:
    """Runs the rules of a user's own derivative on blocks.

    Gradients of what is whole are sums over the devices. So a rule takes the sum of those of a
    whole result, and each device returns its share of those of a whole operand.
    """
    inputs, outputs = [s.settled(v, eqn) for v in operands], list[Tracked]()
    kept = list[Tracked]()
    # What was split over heads here goes home; what forward keeps for backward does not.
    has_heads = any(v.at and v.at.home for v in inputs)
    leave = s.settled if has_heads else s.at_home

    def forward(*arrays: Array) -> Pair:
        (rule, consts), forwarded, *_ = _compat.vjp_rules(eqn)
        values = _like(inputs, arrays)
        with s.scope():
            outs = iter([s.settled(v, eqn) for v in s.run(rule, consts, values)])
            kept[:] = [next(outs) if at is None else s.as_read(values[at]) for at in forwarded]
            pairs = zip(outs, outputs, strict=True)
            results = [s.array(leave(v, eqn), like.at, eqn) for v, like in pairs]
        return results, [v.array for v in kept]

    def backward(residuals: list[Array], grads: list[Array]) -> tuple[Array | None, ...]:
        *_, (rule, consts), have = _compat.vjp_rules(eqn)
        whole = [_whole_gradient(s, v, g) for v, g in zip(outputs, grads, strict=True)]
        with s.scope():
            grads_of = iter(s.run(rule, consts, [*_like(kept, residuals), *whole]))

            def grad(like: Tracked) -> Array:
                array = s.array(next(grads_of), like.at, eqn)
                if like.at:
                    return s.axis.counting(array, like.at, like.shape, 0)
                return array if array.dtype == jax.dtypes.float0 else array / s.axis.size

            return tuple(grad(v) if has else None for v, has in zip(inputs, have, strict=True))

    def wrap(code: Code) -> Code:
        function = jax.custom_vjp(code)
        function.defvjp(forward, backward)
        return function

    return traced(s, wrap, eqn, inputs, outputs, leave)


def _whole_gradient(s: BlockRunner, result: Tracked, grad: Array) -> Tracked:
    """Returns the gradient of a result, as on one device."""
    if grad.dtype == jax.dtypes.float0:  # of integers
        return Tracked(result.shape, np.zeros(result.shape, grad.dtype))
    if result.at is None:
        return Tracked(result.shape, s.axis.summed(grad))
    return Tracked(result.shape, s.axis.counting(grad, result.at, result.shape, 0), result.at)


# -- a loop over tokens


def scan_of_tokens(
    s: BlockRunner, eqn: JaxprEqn, others: Sequence[Tracked], rows: Sequence[Tracked]
) -> list[Tracked]:
    """Runs a scan whose steps are in blocks.

    If all that it carries is sums, each device runs its block, and the sums are added up.
    Otherwise, the carry goes from device to device: each runs its block in its turn.
    """
    options = Eqn(eqn).options
    length = options.pop("length")
    jaxpr, inner = _compat.inner_jaxpr(eqn)
    pairs = zip(Eqn(eqn).parts(jaxpr.invars)[1], jaxpr.outvars, strict=False)
    adds_up = all(_adds_up(jaxpr, *pair) for pair in pairs)
    # Sums may have the steps in any order, a carry in its own.
    places = (v.at for v in rows if v.at and v.at.dim == 0)
    at = next(places) if adds_up else Blocks(0)
    at = dataclasses.replace(at, home=None)
    whole = [Tracked(v.shape, jnp.asarray(s.array(v, None, eqn))) for v in others]
    fixed, carry, _ = Eqn(eqn).parts(whole)
    carried = len(carry)
    first = [_as_words(v.array) for v in carry]  # of keys there are no sums
    steps = [s.array(v, at, eqn) for v in rows]
    (count,) = s.axis.local((length,), at)
    counts = s.axis.counting(jnp.ones(count, bool), at, (length,), False)

    def body(state: list[Array], step: tuple[list[Array], Array]) -> Pair:
        row, counts = step
        inputs = [*fixed, *map(_as_keys, state, carry)]
        inputs += [Tracked(v.shape[1:], x) for v, x in zip(rows, row, strict=True)]
        with s.scope(count):
            outs = [s.array(v, None, eqn) for v in s.run(jaxpr, inner, inputs, eqn)]
        new = list(map(_as_words, outs[:carried]))
        if at.length((length,)) % s.axis.size:
            new = [jnp.where(counts, a, b) for a, b in zip(new, state, strict=True)]
        return new, outs[carried:]

    def block_of(state: list[Array]) -> Pair:
        return lax.scan(body, state, (steps, counts), **options)

    with scoped(eqn):
        if adds_up:
            sums, ys = block_of(list(map(jnp.zeros_like, first)))
            with s.sending(TOTALS, eqn, sum(x.nbytes for x in sums)):
                state = [a + s.axis.summed(b) for a, b in zip(first, sums, strict=True)]
        else:
            turns = s.axis.size - 1
            with s.sending(CARRIES, eqn, turns * sum(x.nbytes for x in first)):
                state, ys = in_turn(s, block_of, first, options["reverse"])
    shapes = [type_of(v).shape for v in eqn.outvars[carried:]]
    above = [Tracked(shape, y, at) for shape, y in zip(shapes, ys, strict=True)]
    return [*map(_as_keys, state, carry), *above]


def _as_words(value: Array) -> Array:
    return jax.random.key_data(value) if is_key(value) else value


def _as_keys(value: Array, like: Tracked) -> Tracked:
    if is_key(like.array):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(like.array))
    return Tracked(like.shape, value)


def in_turn(
    s: BlockRunner, code: Callable[[list[Array]], Pair], first: list[Array], reverse: bool
) -> Pair:
    """Returns what a device after the other computes, each from what the one before returns."""
    size, name = s.axis.size, s.axis.name
    turn = size - 1 - s.axis.index if reverse else s.axis.index
    pairs = itertools.pairwise(range(size))
    onward = [(after, before) if reverse else (before, after) for before, after in pairs]

    @jax.checkpoint
    def hand_on(state: list[Array], now: Array) -> tuple[list[Array], None]:
        new = [lax.ppermute(x, name, onward) for x in code(state)[0]]
        return [jnp.where(turn == now + 1, a, b) for a, b in zip(new, state, strict=True)], None

    state, _ = lax.scan(hand_on, first, jnp.arange(size - 1))
    last, ys = code(state)
    return [s.axis.summed(jnp.where(turn == size - 1, x, 0)).astype(x.dtype) for x in last], ys


def _like(
    values: Sequence[Tracked], arrays: Sequence[Array], places: Layouts | None = None
) -> list[Tracked]:
    places = [v.at for v in values] if places is None else places
    return [Tracked(v.shape, x, at) for v, x, at in zip(values, arrays, places, strict=True)]


def _adds_up(jaxpr: Jaxpr, var: Var, out: Atom) -> bool:
    """Whether the code adds something to an input, for this output, and reads neither else."""
    readers = [*itertools.chain(*(eqn.invars for eqn in jaxpr.eqns)), *jaxpr.outvars]
    if any(sum(v is atom for v in readers) != 1 for atom in {var, out}):
        return False
    if out is var:
        return True
    reader = next((eqn for eqn in jaxpr.eqns if var in eqn.invars), None)
    if reader is not None and reader.primitive.name == "convert_element_type":
        is_same = type_of(reader.outvars[0]).dtype == type_of(var).dtype  # of a weak type
        return is_same and _adds_up(jaxpr, reader.outvars[0], out)
    eqn = next((eqn for eqn in jaxpr.eqns if out in eqn.outvars), None)
    if eqn is None or not is_var(out) or not any(v is var for v in eqn.invars):
        return False
    if eqn.primitive.name in _compat.CALLS | _compat.REMAT:
        inner, _ = _compat.inner_jaxpr(eqn)
        place = next(k for k, v in enumerate(eqn.invars) if v is var)
        return _adds_up(inner, inner.invars[place], inner.outvars[eqn.outvars.index(out)])
    return eqn.primitive.name in ("add", "add_any")


CONTROL: dict[str, Callable[..., list[Tracked]]] = {
    **dict.fromkeys(_compat.CALLS, call),
    **dict.fromkeys(_compat.REMAT, remat),
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
