"""Gradients that a loss takes itself: of `zerojax.mean`, one device's numbers or an error."""

import functools

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.reference import assert_close

W = {"w": jax.random.normal(jax.random.key(0), (16, 2)) / 4}
X = jax.random.normal(jax.random.key(1), (32, 16))
PARTS = r"itself \(jax.grad\), .* its own part .*average it .*: jax.lax.pmean\(jax.grad.*, 'data'\)"


def inner(w, x):
    return zerojax.mean(jnp.tanh(x @ w)[:, 0] ** 2, where=x[:, 1] > 0.5)


def outer(w, x):
    return zerojax.mean(jnp.sum((x @ w - 1) ** 2, -1))


def maml(average, params, x):
    return outer(params["w"] - 0.1 * average(jax.grad(inner)(params["w"], x)), x)


def linear(average, params, x):
    return jnp.mean(x @ (params["w"] - 0.1 * average(jax.grad(inner)(params["w"], x))))


def inner_loop(average, params, x):
    def step(w, _):
        return w - 0.1 * average(jax.grad(jax.checkpoint(inner))(w, x)), None

    return outer(jax.lax.scan(step, params["w"], length=3)[0], x)


def inner_loop_of_while(average, params, x):
    def step(state):
        i, w = state
        return i + 1, w - 0.1 * average(jax.grad(inner)(w, x))

    w = jax.lax.while_loop(lambda state: state[0] < 3, step, (0, params["w"]))[1]
    return jnp.mean((x @ params["w"] - x @ jax.lax.stop_gradient(w)) ** 2)


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


def hessian_vector(average, params, x):
    w = params["w"]
    _, product = jax.jvp(lambda w: jax.grad(inner)(w, x), (w,), (w,))
    return outer(average(product), x)


def gradient_of_a_gradient(average, params, x):
    def dot(w):
        return jnp.vdot(w, jax.grad(lambda w: outer(w, x) ** 2)(w)) / 1e3

    return outer(params["w"] - average(jax.grad(dot)(params["w"])), x)


def with_the_value(average, params, x):
    value, grads = jax.value_and_grad(inner)(params["w"], x)
    grads = average(grads)
    return outer(params["w"] - grads / (1 + jnp.linalg.norm(grads)), x) + value


LOSSES = [maml, linear, inner_loop, inner_loop_of_while, at_one_of_two, scanned_layers]
LOSSES += [hessian_vector, gradient_of_a_gradient, with_the_value]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_of_a_mean_is_averaged_or_refused(loss):
    plan = zerojax.plan((W, ()), stage=3)

    def derived(average):
        loss_fn = lambda params, x: loss(average, params, x)
        return jax.jit(zerojax.value_and_grad(loss_fn, plan))(W, X)

    value, grads = derived(lambda grad: jax.lax.pmean(grad, "data"))
    wanted = jax.jit(jax.value_and_grad(lambda params: loss(lambda grad: grad, params, X)))(W)
    assert_close((value, grads), wanted, 2e-6)
    with pytest.raises(ValueError, match=PARTS):
        derived(lambda grad: grad)


def test_gradients_of_two_means_are_not_multiplied():
    def alike(average, params, x):
        one, two = (average(jax.grad(loss)(params["w"], x)) for loss in (inner, outer))
        return outer(params["w"], x), jnp.vdot(one, two)

    plan = zerojax.plan((W, ()), stage=3)
    cosine = lambda average: zerojax.value_and_grad(
        functools.partial(alike, average), plan, has_aux=True
    )(W, X)
    (_, found), _ = cosine(lambda grad: jax.lax.pmean(grad, "data"))
    assert float(found) == pytest.approx(float(alike(lambda grad: grad, W, X)[1]), rel=1e-5)
    with pytest.raises(ValueError, match=PARTS):
        cosine(lambda grad: grad)


def per_example(params, x):
    critic = lambda x: jnp.sum(jnp.tanh(x @ params["w"]))
    slopes = jax.vmap(jax.grad(critic))(x) + jax.grad(critic)(x)
    return outer(params["w"], x) + zerojax.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)


def forward(params, x):
    w = params["w"]
    return outer(w * jax.jvp(lambda w: inner(w, x), (w,), (jnp.ones_like(w),))[1], x)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", [per_example, forward])
def test_what_is_one_devices_number_as_it_comes_is_taken(loss, accumulate):
    plan = zerojax.plan((W, ()), stage=3)
    fn = zerojax.value_and_grad(loss, plan, accumulate=accumulate)
    if loss is forward and accumulate > 1:
        with pytest.raises(ValueError, match=r"not linear .*use accumulate=1"):
            jax.jit(fn)(W, X)
        return
    assert_close(jax.jit(fn)(W, X), jax.value_and_grad(loss)(W, X), 2e-6)


def test_a_gradient_with_respect_to_examples_is_that_of_a_sum():
    def penalty(params, x):
        slopes = jax.grad(lambda x: zerojax.mean(jnp.tanh(x @ params["w"])))(x)
        return zerojax.mean(jnp.linalg.norm(slopes, axis=-1))

    plan = zerojax.plan((W, ()), stage=3)
    with pytest.raises(ValueError, match=r"With respect to examples, take that of a sum, jnp.sum"):
        zerojax.value_and_grad(penalty, plan)(W, X)
    evaluate = zerojax.eval_step(penalty, plan=plan)
    with pytest.raises(ValueError, match=PARTS):
        evaluate(plan.place((W, ())), X)


def test_an_average_over_some_devices_is_none():
    mesh = zerojax.mesh(node=2, gpu=4)
    plan = zerojax.plan((W, ()), stage=3, mesh=mesh, axis=("node", "gpu"))
    over = lambda axes: lambda params, x: maml(lambda g: jax.lax.pmean(g, axes), params, x)
    with pytest.raises(ValueError, match=r"pmean\(jax.grad\(...\)\(...\), \('node', 'gpu'\)\)"):
        zerojax.value_and_grad(over("gpu"), plan)(W, X)
    hops = lambda g: jax.lax.pmean(jax.lax.pmean(g, "gpu"), "node")
    for loss in (over(("node", "gpu")), lambda params, x: maml(hops, params, x)):
        value, _ = jax.jit(zerojax.value_and_grad(loss, plan))(W, X)
        assert float(value) == pytest.approx(float(maml(lambda g: g, W, X)), rel=1e-5)


def test_on_one_device_there_is_nothing_to_average():
    plan = zerojax.plan((W, ()), stage=3, mesh=make_mesh(1))
    as_it_comes = lambda params, x: maml(lambda g: g, params, x)
    value, _ = zerojax.value_and_grad(as_it_comes, plan)(W, X)
    assert float(value) == pytest.approx(float(as_it_comes(W, X)), rel=1e-5)
