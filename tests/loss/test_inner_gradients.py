"""Gradients that a loss takes itself: of `zerojax.mean`, one device's numbers or an error."""

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.reference import assert_close

W = {"w": jax.random.normal(jax.random.key(0), (16, 2)) / 4}
X = jax.random.normal(jax.random.key(1), (32, 16))
PLAN = zerojax.plan((W, ()), mesh=make_mesh(4))
PARTS = r"itself \(jax.grad\), .* its own part .*average it .*: jax.lax.pmean\(jax.grad.*, 'data'\)"


def inner(w, x):
    return zerojax.mean(jnp.tanh(x @ w)[:, 0] ** 2, where=x[:, 1] > 0.5)


def outer(w, x):
    return zerojax.mean(jnp.sum((x @ w - 1) ** 2, -1))


def maml(average, params, x):
    return outer(params["w"] - 0.1 * average(jax.grad(inner)(params["w"], x)), x)


def inner_loop(average, params, x):
    def step(w, _):
        return w - 0.1 * average(jax.grad(jax.checkpoint(inner))(w, x)), None

    return outer(jax.lax.scan(step, params["w"], length=3)[0], x)


def at_one_of_two(average, params, x):
    w = params["w"]
    grads = jax.lax.cond(w[0, 0] > 0, jax.grad(inner), lambda w, x: jnp.zeros_like(w), w, x)
    return outer(w - average(grads), x)


def scanned_layers(average, params, x):
    def model(w, x):
        layer = lambda h, s: (jax.nn.relu(h * s) + h, None)
        return jax.nn.logsumexp(jax.lax.scan(layer, x, jnp.ones(3) * w[0])[0] * w[0], -1)

    w = params["w"].reshape(-1)
    grads = average(jax.grad(lambda w: zerojax.mean(model(w, x)))(w))
    return zerojax.mean(model(w - grads, x) ** 2)


def gradient_of_a_gradient(average, params, x):
    def dot(w):
        return jnp.vdot(w, jax.grad(lambda w: outer(w, x) ** 2)(w)) / 1e3

    return outer(params["w"] - average(jax.grad(dot)(params["w"])), x)


def with_the_value(average, params, x):
    value, grads = jax.value_and_grad(inner)(params["w"], x)
    grads = average(grads)
    return outer(params["w"] - grads / (1 + jnp.linalg.norm(grads)), x) + value


def alike(average, params, x):
    """Gradients of two means, which are not to be multiplied."""
    one, two = (average(jax.grad(loss)(params["w"], x)) for loss in (inner, outer))
    return outer(params["w"], x) + jnp.vdot(one, two)


LOSSES = [maml, inner_loop, at_one_of_two, scanned_layers, gradient_of_a_gradient]
LOSSES += [with_the_value, alike]


def test_gradients_that_are_averaged_are_those_of_one_device():
    """Each loss has parameters of its own, so that each has its own gradients."""

    def total(average):
        def loss(params, x):
            each = [one(average, params[one.__name__], x) for one in LOSSES]
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
def test_gradients_that_are_not_averaged_are_refused(loss):
    grad = zerojax.value_and_grad(lambda params, x: loss(lambda grad: grad, params, x), PLAN)
    with pytest.raises(ValueError, match=PARTS):
        jax.eval_shape(grad, W, X)


def per_example(params, x):
    critic = lambda x: jnp.sum(jnp.tanh(x @ params["w"]))
    slopes = jax.vmap(jax.grad(critic))(x) + jax.grad(critic)(x)
    return outer(params["w"], x) + zerojax.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)


def forward(params, x):
    w = params["w"]
    return outer(w * jax.jvp(lambda w: inner(w, x), (w,), (jnp.ones_like(w),))[1], x)


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


def test_an_average_over_some_devices_is_none_and_on_one_device_none_is_needed():
    mesh = zerojax.mesh(node=2, gpu=4)
    plan = zerojax.plan((W, ()), mesh=mesh, axis=("node", "gpu"))
    within = lambda g: jax.lax.pmean(g, "gpu")
    hops = lambda g: jax.lax.pmean(within(g), "node")
    with pytest.raises(ValueError, match=r"pmean\(jax.grad\(...\)\(...\), \('node', 'gpu'\)\)"):
        zerojax.value_and_grad(lambda params, x: maml(within, params, x), plan)(W, X)
    one = zerojax.plan((W, ()), mesh=make_mesh(1))
    wanted = float(maml(lambda g: g, W, X))
    for average, where in ((hops, plan), (lambda g: g, one)):
        loss = lambda params, x, average=average: maml(average, params, x)
        value, _ = jax.jit(zerojax.value_and_grad(loss, where))(W, X)
        assert float(value) == pytest.approx(wanted, rel=1e-5)
