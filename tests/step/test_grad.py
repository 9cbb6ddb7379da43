"""`value_and_grad`: in a loop of the user's own, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import zerojax
from tests.models import mlp
from tests.placed import place, shardings
from tests.reference import assert_close, make_state, reference_run


def test_drop_in_for_a_loop_of_ones_own():
    made = mlp(False)
    state = make_state(made, optax.adam(1e-2, eps=1e-4))
    plan = zerojax.plan(state, stage=3)
    state = plan.place(state)

    @jax.jit
    def train_step(state, batch):
        loss, grads = zerojax.value_and_grad(made.loss, plan)(state.params, batch)
        return plan.constrain(state.apply_gradients(grads=grads)), loss

    before = shardings(state)
    for _ in range(3):
        state, _ = train_step(state, made.batch)
    assert shardings(state) == before and train_step._cache_size() == 1
    assert_close(state.params, reference_run(made, optax.adam(1e-2, eps=1e-4), 3)[0].params)


def test_a_loss_that_closes_over_its_batch_is_warned_of():
    """Each of the 8 devices would compute all of it."""
    params, x = {"w": jnp.ones((16, 8))}, jnp.ones((16, 16))
    plan, key = zerojax.plan({"params": params}), jax.random.key(0)
    loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    grad = lambda loss, *args, **options: zerojax.value_and_grad(loss, plan, **options)(*args)
    said = r"split over the 8 devices.*float32\[16, 16\]: .*pass it as an argument.*batch_specs=Par"
    with pytest.warns(UserWarning, match=said) as warned:
        grad(lambda params, key: loss(params, x), params, key)
    assert warned[0].filename == __file__, "the user's line, not zerojax's or JAX's"
    with pytest.warns(UserWarning, match=said):
        grad(lambda params, batch: loss(params, x), params, x + 1)
    grad(loss, params, x)
    grad(lambda params: loss(params, x), params, batch_specs=PartitionSpec())
    two = lambda params, x, y: loss(params, x)
    said = r"argument 3 of the loss would be split.*as one batch.*\(PartitionSpec\(\), {}\) splits"
    with pytest.raises(ValueError, match=said.format(r"PartitionSpec\('data'\)")):
        grad(two, params, x, x, batch_specs=PartitionSpec())
    plan = zerojax.plan({"params": params}, mesh=zerojax.mesh(node=2, gpu=4), axis=("node", "gpu"))
    with pytest.raises(ValueError, match=said.format(r"PartitionSpec\(\('node', 'gpu'\)\)")):
        grad(two, params, x, x, batch_specs=PartitionSpec())
    grad(lambda params: loss(params, jax.random.normal(key, (16, 16))), params)  # has no batch


def test_a_generator_reads_of_its_batch_how_many_rows_it_has():
    """And closes over the weights of a discriminator: each device computes its own rows."""
    params, judge = {"w": jnp.ones((16, 8))}, {"w": jnp.ones((8, 2))}
    plan, x, key = zerojax.plan({"params": params}), jnp.ones((16, 16)), jax.random.key(0)

    def loss(params, batch, key):
        rows = jax.random.normal(key, (len(batch), 16))
        return jnp.mean(rows @ params["w"] @ judge["w"])

    zerojax.value_and_grad(loss, plan)(params, x, key)
    of_2 = lambda params, batch, key: loss(params, batch.reshape(2, 16), key)  # a device's rows
    zerojax.value_and_grad(of_2, plan)(params, x, key)
    of_rows = lambda params, batch: jnp.sum(x @ params["w"]) / len(batch)
    with pytest.warns(UserWarning, match=r"each device computes all of that"):
        zerojax.value_and_grad(of_rows, plan)(params, x)


def test_a_batch_may_be_filled_again_after_the_call():
    x, plan = np.ones((16, 8), np.float32), zerojax.plan({"params": {"w": jnp.ones(8)}})

    def loss(params, x, scale):
        batch["x"][:] = batch["scale"][:] = 7  # traced before it runs
        return jnp.mean((x * scale) @ params["w"])

    batch = {"x": x, "scale": x[:, :1].copy()}
    value, _ = zerojax.value_and_grad(loss, plan)({"w": jnp.ones(8)}, x, scale=batch["scale"])
    assert value == 8


def test_value_and_grad_without_a_plan():
    with pytest.raises(TypeError, match=r"takes a plan, got 3. Make one: zerojax.plan"):
        zerojax.value_and_grad(lambda p, b: 0.0, 3)
    with pytest.raises(TypeError, match=r"plan=.*takes a plan, got 3. Make one: zerojax.plan"):
        zerojax.train_step(lambda p, b: 0.0, plan=3)
    with pytest.raises(TypeError, match=r"plan=.*takes a plan, got 3. Make one: zerojax.plan"):
        zerojax.eval_step(lambda p, b: 0.0, plan=3)
    with pytest.raises(TypeError, match=r"takes a plan, got a State. Make one: zerojax.plan"):
        zerojax.param_specs(place(mlp(False)))


def test_a_model_in_place_of_its_parameters():
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    plan = zerojax.plan({"params": nnx.state(model)})
    with pytest.raises(TypeError, match=r"a Flax nnx model, not a state.*zerojax.nnx.train_step"):
        zerojax.value_and_grad(lambda model, x: model(x).sum(), plan)(model, jnp.ones((8, 16)))


def test_parameters_that_are_not_the_plans():
    made = mlp(False)
    plan = zerojax.plan({"params": made.params})
    with pytest.raises(ValueError, match=r"params/in/b is missing.*zerojax.plan"):
        zerojax.value_and_grad(made.loss, plan)({"in": {"w": jnp.ones(3)}}, made.batch)
