"""What zerojax reads of JAX's jaxprs, each reading tried on a program of a line or two.

Before its first plan on a JAX that it does not know, zerojax tries all of them, which takes a tenth
of a second, and names what has moved: it would fail in the middle of a trace otherwise, or not at
all.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from zerojax import _compat
from zerojax._jaxprs import Eqn, derivatives, params_of, source

SEEN = ("0.10", "0.11", "0.12")  # versions of JAX of which every reading has been seen to hold
# Parameters of kernels, of collectives, of `shard_map` and of constraints.
UNTRIED = {"axis_name", "compiler_params", "dropout_rate", "grid_mapping", "in_specs", "layout"}
UNTRIED |= {"input_output_aliases", "mesh", "newly_manual_axes", "out_specs", "sharding"}
X = np.ones(2, np.float32)


def _eqns(function: Callable, *args: object) -> list[JaxprEqn]:
    return jax.make_jaxpr(function)(*args).jaxpr.eqns


def _names(eqn: JaxprEqn) -> list[str]:
    return [inner.primitive.name for inner in _compat.inner_jaxpr(eqn)[0].eqns]


def _calls() -> bool:
    (eqn,) = _eqns(jax.jit(lambda x: jnp.sin(x) * 2), X)
    return eqn.primitive.name in _compat.CALLS and _names(eqn) == ["sin", "mul"]


def _checkpoints() -> bool:
    (eqn,) = _eqns(jax.checkpoint(lambda x: jnp.sin(x) * 2), X)
    return len(Eqn(eqn).options) == 2 and _names(eqn) == ["sin", "mul"]


def _scans() -> bool:
    def loop(w: Array, carry: Array, xs: Array) -> object:
        return lax.scan(lambda c, x: ((c[0] * w + x, c[1] + 1), x * 2), (carry, 0), xs)

    (eqn,) = _eqns(loop, X, X, np.ones((3, 2), np.float32))
    return Eqn(eqn).parts("abcd") == (["a"], ["b", "c"], ["d"]) and Eqn(eqn).length == 3


def _operations() -> bool:
    def some(x: Array, stack: Array) -> list[object]:
        lax.conv_general_dilated(stack, stack, (1,), "SAME")
        lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME")
        lax.while_loop(lambda x: x[0, 0] < 0, jax.checkpoint(jnp.sin), x)
        lax.map(jnp.sin, x)
        lax.pad(x, 0.0, [(1, 1, 0)] * 2)
        lax.ragged_dot(x, stack, jnp.array([1, 1]))
        return [x[None], x.T, x[1:], x[x.argmax(0)], jnp.fft.fft(jnp.cumsum(x)), lax.iota(int, 4)]

    closed = jax.make_jaxpr(some)(np.ones((2, 2), np.float32), np.ones((2, 2, 2), np.float32))
    params = map(params_of, _compat.every_eqn(closed.jaxpr))
    return {*Eqn.__annotations__} - UNTRIED <= {name for pairs in params for name, _ in pairs}


def _unread() -> bool:
    def loop(xs: Array) -> Array:
        total, squares = lax.scan(lambda c, x: (c + x, x * x), jnp.float32(0), xs)
        jnp.sin(squares)
        return total

    (scan,) = _compat.without_unread(jax.make_jaxpr(loop)(X).jaxpr).eqns
    return _names(scan) == ["add"]


def _scopes() -> bool:
    def scoped(x: Array) -> Array:
        with jax.named_scope("outside"):
            return jax.jit(lambda x: jax.named_scope("inside")(jnp.sin)(x))(x)

    (call,) = _eqns(scoped, X)
    jaxpr, _ = _compat.inner_jaxpr(call)
    (eqn,) = [_compat.renamed(each, lambda v: v, call) for each in jaxpr.eqns]
    (bound,) = _eqns(lambda x: _compat.bind(eqn, [x]), X)
    return _compat.scope_of(eqn) == _compat.scope_of(bound) == "outside/inside"


def _effects() -> bool:
    sums = jax.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 2)])(1.0).jaxpr.eqns
    (prints,) = _eqns(lambda x: jax.debug.print("{}", x), X)
    return not any(map(_compat.has_side_effects, sums)) and _compat.has_side_effects(prints)


def _rules() -> bool:
    same = jax.custom_vjp(lambda x: x * 1)
    same.defvjp(lambda x: (same(x), None), lambda _, grad: (grad * 2,))
    (eqn,) = _eqns(same, X)
    (forward, _), (backward, _) = derivatives(eqn)
    return len(forward.outvars) == 1 and [e.primitive.name for e in backward.eqns] == ["mul"]


def _contexts() -> bool:
    (eqn,) = _eqns(jnp.sin, X)
    return type(_compat.context_on(eqn, lambda mesh: mesh)) is type(eqn.ctx)


def _residuals() -> bool:
    def inside(x: Array, w: Array) -> Array:
        _, vjp = jax.vjp(lambda x, w: jnp.tanh(x * w), x, w)
        kept = {id(leaf) for leaf in jax.tree.leaves(vjp)}
        return x if {id(x), id(w)} <= kept else jnp.zeros(3)

    return jax.eval_shape(inside, X, X).shape == X.shape


def _tracers() -> bool:
    """In `jax.make_jaxpr`, where losses are traced."""
    held: list[bool] = []

    def inside(x: Array) -> None:
        held.extend(source(out) is x for out in jax.checkpoint(lambda x: (x, x * 2))(x))

    jax.make_jaxpr(inside)(X)
    return held == [True, False]


READINGS: dict[str, Callable[[], bool]] = {
    "what jitted functions run": _calls,
    "what a jax.checkpoint runs": _checkpoints,
    "what a scan carries": _scans,
    "the parameters of operations": _operations,
    "what nobody reads in a scan": _unread,
    "the name scopes of equations": _scopes,
    "the effects of equations": _effects,
    "the rules of a custom_vjp": _rules,
    "the mesh that an equation is for": _contexts,
    "what a vjp keeps": _residuals,
    "what a tracer is the result of": _tracers,
}


@functools.cache
def check() -> None:
    """Raises where JAX is a version that zerojax does not know, and a reading does not hold."""
    if jax.__version__.startswith(tuple(f"{version}." for version in SEEN)):
        return
    if moved := [name for name, holds in READINGS.items() if not _holds(holds)]:
        raise RuntimeError(
            f"zerojax reads JAX's programs, and JAX {jax.__version__} writes them otherwise: "
            f"{', '.join(moved)}. Take a newer zerojax, or JAX {SEEN[-1]}: pip install "
            f"'jax=={SEEN[-1]}.*'."
        )


def _holds(reading: Callable[[], bool]) -> bool:
    try:
        return reading()
    except Exception:  # whatever JAX raises where it has moved
        return False
