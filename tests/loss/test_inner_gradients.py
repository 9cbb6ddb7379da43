"""Gradients that a loss takes itself: of `jnp.mean`, averaged, one device's; of `zerojax.mean`, an
error."""

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.support import draw
from tests.support.reference import assert_close

W = {"w": draw.normal(0, 16, 2) / 4}
X = draw.normal(1, 32, 16)
PLAN = zerojax.plan((W, ()), mesh=make_mesh(4))
PARTS = r"itself \(jax.grad\), .* its own part .*jnp.mean, .*: jax.lax.pmean\(jax.grad.*, 'data'\)"


def inner(mean, w, x):
    return mean(jnp.tanh(x @ w)[:, 0] ** 2)


def outer(w, x):
    return zerojax.mean(jnp.sum((x @ w - 1) ** 2, -1))


def maml(mean, average, params, x):
    return outer(params["w"] - 0.1 * average(jax.grad(inner, 1)(mean, params["w"], x)), x)


def inner_loop(mean, average, params, x):
    loss = jax.checkpoint(lambda w: inner(mean, w, x))

    def step(w, _):
        return w - 0.1 * average(jax.grad(loss)(w)), None

    return outer(jax.lax.scan(step, params["w"], length=3)[0], x)


def at_one_of_two(mean, average, params, x):
    w, grad = params["w"], jax.grad(lambda w: inner(mean, w, x))
    return outer(w - average(jax.lax.cond(w[0, 0] > 0, grad, jnp.zeros_like, w)), x)


def gradient_of_a_gradient(mean, average, params, x):
    def slope(w):
        return average(jax.grad(inner, 1)(mean, w, x))

    dot = lambda w: jnp.vdot(w, slope(w))
    return outer(params["w"] - average(jax.grad(dot)(params["w"])), x)


def with_the_value(mean, average, params, x):
    value, grads = jax.value_and_grad(inner, 1)(mean, params["w"], x)
    grads = average(grads)
    return outer(params["w"] - grads / (1 + jnp.linalg.norm(grads)), x) + value


LOSSES = [maml, inner_loop, at_one_of_two, gradient_of_a_gradient, with_the_value]


def test_gradients_that_are_averaged_are_those_of_one_device():
    """Each loss has parameters of its own, so that each has its own gradients."""

    def total(average):
        def loss(params, x):
            each = [one(jnp.mean, average, params[one.__name__], x) for one in LOSSES]
            return sum(each), jnp.stack(each)

        return loss

    params = {loss.__name__: W for loss in LOSSES}
    plan = zerojax.plan((params, ()), mesh=make_mesh(4))
    averaged = total(lambda grad: jax.lax.pmean(grad, "data"))
    got = jax.jit(zerojax.value_and_grad(averaged, plan, has_aux=True))(params, X)
    wanted = jax.jit(jax.value_and_grad(total(lambda grad: grad), has_aux=True))(params, X)
    assert_close(got[0], wanted[0], 2e-6)
    for name, grads in wanted[1].items():
        assert_close(got[1][name], grads, 5e-6, name)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_the_mean_of_all_devices_are_refused(loss):
    average = lambda grad: jax.lax.pmean(grad, "data")
    grad = zerojax.value_and_grad(lambda p, x: loss(zerojax.mean, average, p, x), PLAN)
    with pytest.raises(ValueError, match=PARTS):
        jax.eval_shape(grad, W, X)


def per_example(params, x):
    critic = lambda x: jnp.sum(jnp.tanh(x @ params["w"]))
    slopes = jax.vmap(jax.grad(critic))(x) + jax.grad(critic)(x)
    return outer(params["w"], x) + zerojax.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)


def forward(params, x):
    w = params["w"]
    return outer(w * jax.jvp(lambda w: inner(zerojax.mean, w, x), (w,), (jnp.ones_like(w),))[1], x)


@pytest.mark.parametrize(("loss", "accumulate"), [(per_example, 2), (forward, 1)])
def test_what_is_one_devices_number_as_it_comes_is_taken(loss, accumulate):
    grad = jax.jit(zerojax.value_and_grad(loss, PLAN, accumulate=accumulate))
    assert_close(grad(W, X), jax.jit(jax.value_and_grad(loss))(W, X), 2e-6)


def test_a_derivative_of_a_mean_that_accumulation_cannot_know_is_refused():
    with pytest.raises(ValueError, match=r"not linear .*use accumulate=1"):
        jax.eval_shape(zerojax.value_and_grad(forward, PLAN, accumulate=2), W, X)


def test_a_gradient_with_respect_to_examples_is_that_of_a_sum():
    def penalty(params, x):
        slopes = jax.grad(lambda x: zerojax.mean(jnp.tanh(x @ params["w"])))(x)
        return zerojax.mean(jnp.linalg.norm(slopes, axis=-1))

    with pytest.raises(ValueError, match=r"With respect to examples, differentiate a sum, jnp.sum"):
        zerojax.value_and_grad(penalty, PLAN)(W, X)
    with pytest.raises(ValueError, match=PARTS):
        zerojax.eval_step(penalty, plan=PLAN)(PLAN.place((W, ())), X)


def test_the_axes_of_a_mesh_of_levels_are_named_and_one_device_needs_no_average():
    mesh = zerojax.mesh(node=2, gpu=4)
    plan = zerojax.plan((W, ()), mesh=mesh, axis=("node", "gpu"))
    plain = lambda params, x: maml(zerojax.mean, lambda grad: grad, params, x)
    with pytest.raises(ValueError, match=r"pmean\(jax.grad\(...\)\(...\), \('node', 'gpu'\)\)"):
        zerojax.value_and_grad(plain, plan)(W, X)
    one = zerojax.plan((W, ()), mesh=make_mesh(1))
    value, _ = jax.jit(zerojax.value_and_grad(plain, one))(W, X)
    assert float(value) == pytest.approx(float(plain(W, X)), rel=1e-5)
