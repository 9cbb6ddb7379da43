"""The readings of JAX that move between versions; fails plainly on a JAX that moved again."""

import inspect
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax import _compat, _readings
from zerojax._jaxprs import Eqn
from zerojax._run import agreement, processes

ATTENTIONS = {"dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"}
UNKNOWN = f"JAX {jax.__version__} spells this otherwise: teach zerojax/_compat.py about it"


def test_the_store_that_processes_share():
    assert _compat.shared_store() is None, UNKNOWN  # tests/run/test_processes.py has two processes
    assert agreement.read(processes.FAILED) is None  # nor after jax.distributed.shutdown()


@pytest.mark.parametrize("name", _readings.READINGS)
def test_a_reading_holds(name):
    assert _readings.READINGS[name](), UNKNOWN


def test_a_reading_that_moved_is_named_on_an_unknown_jax(monkeypatch):
    """Before anything is traced, by hand too; not on known versions, nor where all hold."""
    with monkeypatch.context() as context:
        context.setattr(jax, "__version__", "0.99.0")
        _readings.check.__wrapped__()
    monkeypatch.setitem(Eqn.__annotations__, "renamed", int)
    monkeypatch.setattr(_compat, "CALLS", frozenset({"renamed"}))
    monkeypatch.setattr(_compat, "scan_counts", lambda scan: scan.params["gone"])
    _readings.check.__wrapped__()
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    monkeypatch.setattr(_readings, "check", _readings.check.__wrapped__)
    state = {"params": {"w": jnp.ones((8, 8))}, "opt_state": ()}
    says = r"JAX 0.99.0 .*: what jitted .*, what a scan carries, the parameters of operations. Take"
    with pytest.raises(RuntimeError, match=says):
        zerojax.plan(state, stage=3)


def test_residuals_that_are_copies_are_no_longer_what_went_in(monkeypatch):
    """Full weights would be kept for backward: see the note in `body.py`."""
    vjp = jax.vjp

    def copying(*args):
        out, backward = vjp(*args)
        return out, jax.tree.map(lambda leaf: leaf + 0, backward)

    monkeypatch.setattr(jax, "vjp", copying)
    assert not _readings.READINGS["what a vjp keeps"]()


def test_bind_keeps_the_source_line():
    (eqn,) = jax.make_jaxpr(jnp.sin)(jnp.ones(2)).jaxpr.eqns
    lowered = jax.jit(lambda x: _compat.bind(eqn, [x])).lower(jnp.ones(2))
    assert "test_compat.py" in lowered.as_text(debug_info=True), UNKNOWN


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
    assert found and 1 + Eqn(found[0]).layout == dim, UNKNOWN
    assert found[0].primitive.name.startswith(_compat.ATTENTION)


def test_arrays_say_whether_their_values_are_there():
    array = jnp.ones(3)
    jax.block_until_ready(array)
    assert _compat.is_ready(array) is True and _compat.is_ready(2.0), UNKNOWN
