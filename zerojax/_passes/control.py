"""Calls, loops and users' derivatives in a loss whose sequences are split: see `splitter.py`."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.typing import ArrayLike

from zerojax import _compat
from zerojax._jaxprs import is_var, type_of
from zerojax._passes.blocks import Blocks
from zerojax._passes.splitter import CARRIES, SUMS, Splitter, Value
from zerojax._types import Shape


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


def call(s: Splitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    jaxpr, consts = _compat.inner_jaxpr(eqn)
    with scoped(eqn):
        if str(eqn.params.get("name")).startswith("zerojax_"):  # other passes look for it
            return traced(
                s, lambda code: _compat.named_jit(code, eqn.params["name"]), eqn, operands
            )
        return s.run(jaxpr, consts, operands, eqn)


def traced(
    s: Splitter,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    eqn: JaxprEqn,
    operands: list[Value],
) -> list[Value]:
    """Runs the jaxpr of an equation as a function that `wrap` has JAX trace apart."""
    jaxpr, consts = _compat.inner_jaxpr(eqn)
    places: list[tuple[Shape, Blocks | None]] = []

    def code(*arrays: Array) -> list[Array]:
        each = iter(arrays)
        inputs = [
            v if v.eqn is not None else dataclasses.replace(v, array=next(each)) for v in operands
        ]
        with s.scope():
            outs = [s.settled(v, eqn) for v in s.run(jaxpr, consts, inputs, eqn)]
        places[:] = [(v.shape, v.at) for v in outs]
        return [v.array for v in outs]

    arrays = wrap(code)(*(v.array for v in operands if v.eqn is None))
    return [Value(shape, x, at) for (shape, at), x in zip(places, arrays, strict=True)]


def remat(s: Splitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    options = {"policy": eqn.params["policy"], "prevent_cse": eqn.params["prevent_cse"]}
    with scoped(eqn):
        return traced(s, lambda code: jax.checkpoint(code, **options), eqn, operands)


def scan(s: Splitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    consts, count = _compat.scan_counts(eqn.params)
    xs = [s.settled(v, eqn) for v in operands[consts + count :]]
    if any(x.at and x.at.dim == 0 for x in xs):
        return scan_of_tokens(s, eqn, operands[: consts + count], xs)
    carry, length = operands[consts : consts + count], eqn.params["length"]

    def loop(places: list[Blocks | None]) -> list[Value]:
        below = [v.at and v.at.moved({d: d - 1 for d in range(len(v.shape))}) for v in xs]
        rows: list[tuple[Shape, Blocks | None]] = []

        def body(state: list[Array], row: list[Array]) -> tuple[list[Array], list[Array]]:
            inputs = [*operands[:consts], *_like(carry, state, places)]
            inputs += [Value(v.shape[1:], x, at) for v, x, at in zip(xs, row, below, strict=True)]
            with s.scope(length):
                outs = s.run(*_compat.inner_jaxpr(eqn), inputs, eqn)
                state = returned(s, outs[:count], places, eqn)
                ys = [s.settled(v, eqn) for v in outs[count:]]
            rows[:] = [(v.shape, v.at) for v in ys]
            return state, [v.array for v in ys]

        first = [s.array(v, at, eqn) for v, at in zip(carry, places, strict=True)]
        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        state, ys = lax.scan(body, first, [v.array for v in xs], **options)
        above = [
            Value((length, *shape), y, at and at.moved({d: d + 1 for d in range(len(shape))}))
            for (shape, at), y in zip(rows, ys, strict=True)
        ]
        return [*_like(carry, state, places), *above]

    with scoped(eqn):
        return until_stable(s, loop, carry)


def while_loop(s: Splitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    params = eqn.params
    tests, consts = params["cond_nconsts"], params["body_nconsts"]
    carry = operands[tests + consts :]

    def loop(places: list[Blocks | None]) -> list[Value]:
        def test(state: list[Array]) -> Array:
            inputs = [*operands[:tests], *_like(carry, state, places)]
            with s.scope():
                (out,) = s.run(*_compat.opened(params["cond_jaxpr"]), inputs)
                return s.array(out, None, eqn)

        def body(state: list[Array]) -> list[Array]:
            inputs = [*operands[tests : tests + consts], *_like(carry, state, places)]
            with s.scope():
                outs = s.run(*_compat.opened(params["body_jaxpr"]), inputs)
                return returned(s, outs, places, eqn)

        first = [s.array(v, at, eqn) for v, at in zip(carry, places, strict=True)]
        return _like(carry, lax.while_loop(test, body, first), places)

    with scoped(eqn):
        return until_stable(s, loop, carry)


def until_stable(
    s: Splitter, loop: Callable[[list[Blocks | None]], list[Value]], carry: Sequence[Value]
) -> list[Value]:
    """Returns what a loop does that returns its carry in the blocks in which it takes it."""
    places = [v.at for v in carry]
    while True:
        try:
            return loop(places)
        except RetryError as error:
            places = error.places


def returned(
    s: Splitter, outs: Sequence[Value], places: list[Blocks | None], eqn: JaxprEqn
) -> list[Array]:
    """Returns a carry in these blocks; raises if it should have begun in others."""
    naturals = map(s.natural, outs)
    better = [at or natural for at, natural in zip(places, naturals, strict=True)]
    if better != places:
        raise RetryError(better)
    return [s.array(v, at, eqn) for v, at in zip(outs, places, strict=True)]


def cond(s: Splitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    index, *inputs = operands
    branches = [_compat.opened(branch) for branch in eqn.params["branches"]]
    places: list[Blocks | None] = []

    def branch(jaxpr: Jaxpr, consts: Sequence[ArrayLike], is_trial: bool) -> list[Array]:
        with s.scope():
            outs = s.run(jaxpr, consts, inputs)
            if is_trial:
                places[:] = [at or s.natural(v) for v, at in zip(outs, places, strict=True)]
            pairs = zip(outs, places, strict=True)
            return [s.array(v, at, eqn) for v, at in pairs]

    places += [None] * len(eqn.outvars)
    with scoped(eqn):
        for each in branches:
            with s.scope(times=0):
                jax.eval_shape(functools.partial(branch, *each, True))
        codes = [functools.partial(branch, *each, False) for each in branches]
        arrays = lax.switch(s.array(index, None, eqn), codes)
    shapes = [type_of(v).shape for v in eqn.outvars]
    return [Value(*each) for each in zip(shapes, arrays, places, strict=True)]


def custom_jvp(s: Splitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    jaxpr, consts = _compat.inner_jaxpr(eqn)
    inputs = [s.settled(v, eqn) for v in operands]
    outputs: list[Value] = []

    @jax.custom_jvp
    def code(*arrays: Array) -> list[Array]:
        with s.scope():
            outs = s.run(jaxpr, consts, _refilled(inputs, arrays), eqn)
            outputs[:] = [s.settled(v, eqn) for v in outs]
        return [v.array for v in outputs]

    def jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Any, Any]:
        ((rule, consts),) = _compat.derivatives(eqn)
        values = [*_refilled(inputs, primals), *_refilled(inputs, tangents)]
        with s.scope():
            outs = s.run(rule, consts, values)
            pairs = zip(outs, [*outputs, *outputs], strict=True)
            arrays = [s.array(v, like.at, eqn) for v, like in pairs]
        return arrays[: len(outputs)], arrays[len(outputs) :]

    code.defjvp(jvp)
    with scoped(eqn):
        return _refilled(outputs, code(*(v.array for v in inputs)))


def custom_vjp(s: Splitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs the rules of a user's own derivative on blocks.

    Gradients of what is whole are sums over the devices. So a rule takes the sum of those of a
    whole result, and each device returns its share of those of a whole operand.
    """
    jaxpr, consts = _compat.inner_jaxpr(eqn)
    inputs = [s.settled(v, eqn) for v in operands]
    outputs, kept = list[Value](), list[Value]()

    @jax.custom_vjp
    def code(*arrays: Array) -> list[Array]:
        with s.scope():
            outs = s.run(jaxpr, consts, _refilled(inputs, arrays), eqn)
            outputs[:] = [s.settled(v, eqn) for v in outs]
        return [v.array for v in outputs]

    def forward(*arrays: Array) -> tuple[list[Array], list[Array]]:
        (rule, consts), forwarded, *_ = _compat.vjp_rules(eqn)
        values = _refilled(inputs, arrays)
        with s.scope():
            outs = iter([s.settled(v, eqn) for v in s.run(rule, consts, values)])
            kept[:] = [next(outs) if at is None else values[at] for at in forwarded]
            pairs = zip(outs, outputs, strict=True)
            results = [s.array(v, like.at, eqn) for v, like in pairs]
        return results, [v.array for v in kept]

    def backward(residuals: list[Array], grads: list[Array]) -> tuple[Any, ...]:
        *_, (rule, consts), have = _compat.vjp_rules(eqn)
        whole = [
            s.axis.summed(g) if v.at is None else s.axis.counting(g, v.at, v.shape, 0)
            for v, g in zip(outputs, grads, strict=True)
        ]
        with s.scope():
            values = [*_refilled(kept, residuals), *_refilled(outputs, whole)]
            grads_of = iter(s.run(rule, consts, values))

            def grad(like: Value) -> Array:
                array = s.array(next(grads_of), like.at, eqn)
                is_shared = like.at is None and array.dtype != jax.dtypes.float0
                return array / s.axis.size if is_shared else array

            return tuple(grad(v) if has else None for v, has in zip(inputs, have, strict=True))

    code.defvjp(forward, backward)
    with scoped(eqn):
        return _refilled(outputs, code(*(v.array for v in inputs)))


# -- a loop over tokens


def scan_of_tokens(
    s: Splitter, eqn: JaxprEqn, others: Sequence[Value], rows: Sequence[Value]
) -> list[Value]:
    """Runs a scan whose steps are in blocks.

    If all that it carries is sums, each device runs its block, and the sums are added up.
    Otherwise, the carry goes from device to device: each runs its block in its turn.
    """
    consts, carried = _compat.scan_counts(eqn.params)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    fixed = [Value(v.shape, s.array(v, None, eqn)) for v in others[:consts]]
    first = [jnp.asarray(s.array(v, None, eqn)) for v in others[consts:]]
    steps = [s.array(v, Blocks(0), eqn) for v in rows]
    block, index = s.axis.block(length), s.axis.index
    counts = index * block + jnp.arange(block) < length
    jaxpr, inner = _compat.inner_jaxpr(eqn)

    def body(state: list[Array], step: tuple[list[Array], Array]) -> Any:
        row, counts = step
        inputs = [*fixed, *_like(others[consts:], state)]
        inputs += [Value(v.shape[1:], x) for v, x in zip(rows, row, strict=True)]
        with s.scope(block):
            outs = [s.array(v, None, eqn) for v in s.run(jaxpr, inner, inputs, eqn)]
        new = outs[:carried]
        if length % s.axis.size:
            new = [jnp.where(counts, a, b) for a, b in zip(new, state, strict=True)]
        return new, outs[carried:]

    def block_of(state: list[Array]) -> tuple[list[Array], list[Array]]:
        options = {"reverse": reverse, "unroll": eqn.params["unroll"]}
        return lax.scan(body, state, (steps, counts), **options)

    with scoped(eqn):
        if _adds_up(jaxpr, consts, carried):
            sums, ys = block_of(list(map(jnp.zeros_like, first)))
            with s.sending(SUMS, eqn, sum(map(_nbytes, sums))):
                state = [a + s.axis.summed(b) for a, b in zip(first, sums, strict=True)]
        else:
            turns = s.axis.size - 1
            with s.sending(CARRIES, eqn, turns * sum(map(_nbytes, first))):
                state, ys = in_turn(s, block_of, first, reverse)
    shapes = [type_of(v).shape for v in eqn.outvars[carried:]]
    above = [Value(shape, y, Blocks(0)) for shape, y in zip(shapes, ys, strict=True)]
    return [*_like(others[consts:], state), *above]


def in_turn(
    s: Splitter, code: Callable[[Any], tuple[Any, Any]], first: list[Array], reverse: bool
) -> tuple[list[Array], list[Array]]:
    """Returns what a device after the other computes, each from what the one before returns."""
    size, name = s.axis.size, s.axis.name
    turn = size - 1 - s.axis.index if reverse else s.axis.index
    onward = [(s, s - 1) if reverse else (s, s + 1) for s in range(size)]
    onward = [pair for pair in onward if 0 <= pair[1] < size]

    @jax.checkpoint
    def hand_on(state: list[Array], now: Array) -> tuple[list[Array], None]:
        new = [lax.ppermute(x, name, onward) for x in code(state)[0]]
        return [jnp.where(turn == now + 1, a, b) for a, b in zip(new, state, strict=True)], None

    state, _ = lax.scan(hand_on, first, jnp.arange(size - 1))
    last, ys = code(state)
    return [s.axis.summed(jnp.where(turn == size - 1, x, 0)).astype(x.dtype) for x in last], ys


def _like(
    values: Sequence[Value], arrays: Sequence[Array], places: Sequence[Blocks | None] | None = None
) -> list[Value]:
    places = [None] * len(values) if places is None else places
    return [Value(v.shape, x, at) for v, x, at in zip(values, arrays, places, strict=True)]


def _refilled(values: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    return [dataclasses.replace(v, array=x) for v, x in zip(values, arrays, strict=True)]


def _nbytes(array: Array) -> int:
    return array.size * array.dtype.itemsize


def _adds_up(jaxpr: Jaxpr, consts: int, carried: int) -> bool:
    """Whether each step of a scan adds something to what it carries, and reads nothing of it."""
    inputs, outputs = jaxpr.invars[consts : consts + carried], jaxpr.outvars
    readers = [v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v)] + list(outputs)
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for var, out in zip(inputs, outputs[:carried], strict=True):
        maker = makers.get(out) if is_var(out) else None
        is_sum = maker is not None and maker.primitive.name in ("add", "add_any")
        if out is not var and not (is_sum and maker and var in maker.invars):
            return False
        if any(readers.count(v) != 1 for v in {var, out}):
            return False
    return True


CONTROL: dict[str, Callable[..., list[Value]]] = {
    **dict.fromkeys(_compat.CALLS, call),
    **dict.fromkeys(_compat.REMAT, remat),
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
