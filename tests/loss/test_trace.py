"""A loss traced at the shapes of one device: what it may return and close over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.models import convnet, mlp
from tests.placed import place
from tests.reference import assert_close


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda b: b, r"must be a scalar, got shape \(8, 24\). Reduce it"),
        (lambda b: b.sum().astype(int), r"float dtype, got int32. Convert it"),
        (lambda b: "no", r"scalar array, got str. Return a scalar"),
        (lambda b: (b.sum(), "no"), r"aux is a str, not a numeric array.*Leave it out"),
        (lambda b: (b.sum(), {"k": jax.random.key(0)}), r"aux\['k'\].*key.*Leave it out"),
        (lambda b: (b.sum(), 1.0, 2.0), r"a tuple of 3. Return a scalar, or \(loss, aux\)"),
    ],
)
def test_loss_that_returns_something_else(returns, message):
    made = mlp(False)
    with pytest.raises(TypeError, match=message):
        zerojax.train_step(lambda p, b: returns(b["x"]))(place(made), made.batch)


@pytest.mark.parametrize("narrow", ["compute", "param"])
def test_a_carry_that_changes_its_dtype_is_told_of_precision(narrow):
    """In float32 it would run; the carry begins in the dtype that the loss writes."""
    made = mlp(False)
    precision = zerojax.Precision(**{narrow: "bfloat16"})
    given = {"precision": precision} if narrow == "compute" else {}
    state = place(made, precision=precision)

    def loss(begin):
        def of(params, batch):
            turn = lambda n, x: jnp.tanh(x.astype(params["in"]["w"].dtype))
            return jnp.mean(jax.lax.fori_loop(0, 2, turn, begin(batch["x"], params)))

        return zerojax.train_step(of, **given, donate=False)

    message = r"(?s)equal types.*parameters in bfloat16 .*jnp.zeros\(shape, x.dtype\), or cast what"
    with pytest.raises(TypeError, match=message):
        loss(lambda x, _: jnp.ones(x.shape))(state, made.batch)
    loss(lambda x, params: jnp.ones(x.shape, params["in"]["w"].dtype))(state, made.batch)
    with pytest.raises(TypeError, match=r"equal types(?s:(?!parameters in).)*$"):
        loss(lambda x, _: jnp.ones(x.shape, jnp.int32))(place(made), made.batch)


def test_an_axis_that_no_step_has_is_told_of_those_that_one_has():
    """As in a loss that was written for a `pmap` over 'batch'."""
    made = convnet(False, axis_name="batch")
    step = zerojax.train_step(made.loss, mutable="batch_stats")
    message = r"over the axis 'batch', and its batch is split over 'data'. .*axis_name='data' in Ba"
    with pytest.raises(NameError, match=message):
        step(place(made), made.batch)
    mesh = zerojax.mesh(node=2, gpu=4)
    with pytest.raises(NameError, match=r"over \('node', 'gpu'\). Name that: axis_name=\('node"):
        step(place(made, mesh=mesh, axis=("node", "gpu")), made.batch)
    with pytest.raises(NameError, match=r"^name 'nowhere' is not defined"):
        zerojax.train_step(lambda *_: nowhere)(place(made), made.batch)  # noqa: F821


def test_has_aux_without_a_pair():
    made = mlp(False)
    plan = zerojax.plan({"params": made.params})
    with pytest.raises(TypeError, match=r"must return \(loss, aux\).*leave has_aux out"):
        zerojax.value_and_grad(made.loss, plan, has_aux=True)(made.params, made.batch)


def test_what_the_loss_closes_over_is_replicated():
    made = mlp(False)
    scale = jax.device_put(jnp.linspace(0.5, 2, 8), jax.devices()[3])
    shift = make_mesh()
    shift = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(shift, P("data")))

    def loss(params, batch):
        out = jnp.tanh(batch["x"] @ params["in"]["w"]) @ params["out"]["w"]
        return jnp.mean((out * numbers + shift) ** 2)

    numbers = np.asarray(scale)
    plan = zerojax.plan({"params": made.params}, stage=3)
    params = plan.place({"params": made.params})["params"]
    _, grads = zerojax.value_and_grad(loss, plan)(params, made.batch)
    assert_close(grads, jax.grad(loss)(made.params, made.batch), 2e-6)
