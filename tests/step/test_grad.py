"""`value_and_grad` in a loop of the user's own, and the batch that it splits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import is_here, make_mesh
from tests.support.models import mlp
from tests.support.reference import assert_close, make_state, shardings
from tests.support.schedules import value_and_grad

PARAMS = {"w": jnp.ones((16, 8))}
X = jnp.ones((16, 16))
KEY = jax.random.key(0)
PLAN = zerojax.plan({"params": PARAMS}, mesh=make_mesh(4))


def grad(loss, *args, **options):
    return value_and_grad(loss, PLAN, **options)(*args)


def test_drop_in_for_a_loop_of_ones_own():
    model, tx = mlp(False), optax.adam(1e-2, eps=1e-4)
    state = make_state(model, tx)
    plan = zerojax.plan(state, stage=3, mesh=make_mesh(2))
    wanted, state = state, plan.place(state)

    @jax.jit
    def plain_step(state, batch):
        return state.apply_gradients(grads=jax.grad(model.loss)(state.params, batch))

    @jax.jit
    def train_step(state, batch):
        loss, grads = zerojax.value_and_grad(model.loss, plan)(state.params, batch)
        return plan.constrain(state.apply_gradients(grads=grads)), loss

    before = shardings(state)
    for _ in range(3):
        state, _ = train_step(state, model.batch)
        wanted = plain_step(wanted, model.batch)
    assert shardings(state) == before and train_step._cache_size() == 1
    assert_close(state.params, wanted.params)


def loss_of(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.parametrize(
    ("loss", "args"),
    [
        (lambda params, key: loss_of(params, X), (PARAMS, KEY)),
        (lambda params, key: loss_of(params, X * jax.random.uniform(key)), (PARAMS, KEY)),
        (lambda params, batch: loss_of(params, X), (PARAMS, X + 1)),
        (lambda params, batch: jnp.sum(X @ params["w"]) / len(batch), (PARAMS, X + 1)),
    ],
)
def test_a_loss_that_closes_over_its_batch_is_warned_of(loss, args):
    """Each of the 4 devices would compute all of it."""
    said = r"split over the 4 devices.*float32\[16, 16\]: .*pass it as an argument.*batch_specs=Par"
    with pytest.warns(UserWarning, match=said) as warned:
        grad(loss, *args)
    assert is_here(warned[0], __file__), "the user's line, not zerojax's or JAX's"


JUDGE = jnp.ones((8, 2))


def generated(params, batch, key):
    """Closes over the weights of a discriminator: each device computes its own rows."""
    return jnp.mean(jax.random.normal(key, (len(batch), 16)) @ params["w"] @ JUDGE)


@pytest.mark.parametrize(
    ("loss", "args", "options"),
    [
        (loss_of, (X,), {}),
        (lambda params: loss_of(params, X), (), {"batch_specs": P()}),
        (lambda params: loss_of(params, jax.random.normal(KEY, X.shape)), (), {}),  # has no batch
        (generated, (X, KEY), {}),
        (lambda params, x: generated(params, x, KEY), (X,), {}),
        (lambda params, x, key: generated(params, x.reshape(4, 16), key), (X, KEY), {}),
    ],
)
@pytest.mark.filterwarnings("error")
def test_other_losses_are_not_warned_of(loss, args, options):
    trace = jax.jit(lambda *args: grad(loss, *args, **options)).trace
    assert trace(PARAMS, *args).jaxpr.out_avals[1].shape == PARAMS["w"].shape


@pytest.mark.parametrize("name", ["value_and_grad", "train_step"])
def test_a_batch_may_be_filled_again_after_the_call(name):
    """JAX has a program of CPUs read numpy's memory, when its turn comes."""
    x = np.ones((16, 8), np.float32)
    batch = {"x": x, "scale": x[:, :1].copy()}
    params = {"w": jnp.ones(8)}

    def loss(params, x, scale=1.0):
        batch["x"][:] = batch["scale"][:] = 7  # traced before it runs
        return jnp.mean((x * scale) @ params["w"])

    if name == "value_and_grad":
        plan = zerojax.plan({"params": params}, mesh=make_mesh(2))
        value, _ = zerojax.value_and_grad(loss, plan)(params, x, scale=batch["scale"])
    else:
        plan = zerojax.plan((params, ()), mesh=make_mesh(2), tx=optax.identity())
        state = plan.place((params, ()))
        step = zerojax.train_step(loss, plan=plan, tx=optax.identity())
        value = step(state, batch=batch["x"])[1]["loss"]
    assert value == 8
