"""The readings of JAX that move between versions; fails plainly on a JAX that moved again."""

import inspect
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zerojax import _compat

ATTENTIONS = {"dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"}
UNKNOWN = f"JAX {jax.__version__} spells this otherwise: teach zerojax/_compat.py about it"


def test_the_store_that_processes_share():
    assert _compat.shared_store() is None, UNKNOWN  # tests/run/test_processes.py has two processes


def only_eqn(f, *args):
    (eqn,) = jax.make_jaxpr(f)(*args).jaxpr.eqns
    return eqn


def test_scan_counts():
    w, h, xs = jnp.ones((2, 2)), jnp.ones(2), jnp.ones((3, 2))
    f = lambda w, h, xs: lax.scan(lambda c, x: ((c[0] @ w + x, c[1] + 1), x * 2), (h, 0), xs)
    eqn = only_eqn(f, w, h, xs)
    assert _compat.scan_counts(eqn.params) == (1, 2), UNKNOWN
    assert {"length", "reverse", "unroll"} <= eqn.params.keys(), UNKNOWN


@pytest.mark.parametrize(
    ("wrap", "names"), [(jax.jit, _compat.CALLS), (jax.checkpoint, _compat.REMAT)]
)
def test_calls_and_their_jaxprs(wrap, names):
    eqn = only_eqn(wrap(lambda x: jnp.sin(x) * 2), jnp.ones(2))
    assert eqn.primitive.name in names, UNKNOWN
    jaxpr, consts = _compat.inner_jaxpr(eqn)
    assert [e.primitive.name for e in jaxpr.eqns] == ["sin", "mul"] and not consts, UNKNOWN
    assert wrap is jax.jit or {"policy", "prevent_cse"} <= eqn.params.keys(), UNKNOWN


def test_bind_keeps_scope_and_source_line():
    def f(x):
        with jax.named_scope("my_layer"):
            return jnp.sin(x)

    eqn = only_eqn(f, jnp.ones(2))
    lowered = jax.jit(lambda x: _compat.bind(eqn, [x])).lower(jnp.ones(2))
    text = lowered.as_text(debug_info=True)
    assert "my_layer/sin" in text and "test_compat.py" in text, UNKNOWN


def test_inlined_equations_keep_the_callers_scope():
    def inner(x):
        with jax.named_scope("inside"):
            return jnp.sin(x)

    def f(x):
        with jax.named_scope("outside"):
            return jax.jit(inner)(x)

    call = only_eqn(f, jnp.ones(2))
    jaxpr, _ = _compat.inner_jaxpr(call)
    (eqn,) = [_compat.renamed(e, lambda v: v, call) for e in jaxpr.eqns]
    assert str(eqn.source_info.name_stack) == "outside/inside", UNKNOWN


def test_side_effects_are_told_from_axis_names():
    mesh_axis = jax.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 2)])(1.0).jaxpr.eqns
    assert mesh_axis and not any(map(_compat.has_side_effects, mesh_axis)), UNKNOWN
    assert _compat.has_side_effects(only_eqn(lambda x: jax.debug.print("{}", x), 1.0)), UNKNOWN


def test_what_nobody_reads_is_taken_out_of_loops():
    def loss(x):
        total, squares = jax.lax.scan(lambda c, x: (c + x, x * x), jnp.float32(0), x)
        jnp.sin(squares)
        return total

    jaxpr = jax.make_jaxpr(loss)(jnp.ones(3)).jaxpr
    (scan,) = _compat.without_unread(jaxpr).eqns
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["scan", "sin"]
    assert [eqn.primitive.name for eqn in _compat.inner_jaxpr(scan)[0].eqns] == ["add"]


@pytest.mark.parametrize(("transposed", "dim"), [(False, 1), (True, 2)])
def test_attention_of_cudnn_is_traced_without_it(transposed, dim, monkeypatch):
    attend = inspect.unwrap(jax.nn.dot_product_attention).__globals__["cudnn_dot_product_attention"]
    module = inspect.unwrap(attend).__globals__
    missing = mock.Mock(side_effect=RuntimeError("cuDNN not found."))
    monkeypatch.setitem(module, "check_cudnn_version", missing)
    layout = {"qkv_layout": "BNTH" if transposed else "BTNH"}
    shape = (2, 4, 16, 64) if transposed else (2, 16, 4, 64)
    trace = lambda: jax.make_jaxpr(lambda q: attend(q, q, q, **layout))(jnp.ones(shape, "bfloat16"))
    with pytest.raises(RuntimeError, match="cuDNN not found"):
        trace()
    _compat.assume_cudnn()
    found = [e for e in _compat.every_eqn(trace().jaxpr) if e.primitive.name in ATTENTIONS]
    assert found and _compat.sequence_dim(found[0]) == dim, UNKNOWN
    assert found[0].primitive.name.startswith(_compat.ATTENTION)


def test_vjp_functions_are_pytrees_that_hold_inputs_by_identity():
    """What the engine's residual stripping stands on."""

    def inside(x, w):
        out, vjp = jax.vjp(lambda x, w: jnp.tanh(x @ w), x, w)
        ids = {id(leaf) for leaf in jax.tree.leaves(vjp)}
        assert id(x) in ids and id(w) in ids, UNKNOWN
        return out

    jax.jit(inside)(jnp.ones((2, 3)), jnp.ones((3, 2)))


def test_arrays_say_whether_their_values_are_there():
    array = jnp.ones(3)
    jax.block_until_ready(array)
    assert _compat.is_ready(array) is True and _compat.is_ready(2.0), UNKNOWN
