"""Gradients of tables that a loss reads in 16 bits: sums in float32, rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import zerojax
from tests.conftest import make_mesh
from tests.support.reference import train_state

VOCAB, DIM, TOKENS = 512, 32, 4096
NARROW = zerojax.Precision(compute="bfloat16")
READS = {
    "indexed": lambda table, t: table[t],
    "by two": lambda table, t: table[t.reshape(-1, 2)],
    "in a call": jax.jit(lambda table, t: jnp.take(table, t, axis=0)),
    "clipped": lambda table, t: jnp.take(table, t - VOCAB * (t == 0), axis=0, mode="clip"),
    "filled": lambda table, t: table.at[t + VOCAB * (t == 0)].get(mode="fill", fill_value=0),
    "turned": lambda table, t: table.T[:, t].T,
    "a part": lambda table, t: table.reshape(2, -1, DIM)[0][t],
    "tied": lambda table, t: table[t] + jnp.sum(table) * 0,
}


def gradient(loss, tokens, precision=NARROW, devices=8, stage=3, mesh=None):
    params = {"table": jnp.ones((VOCAB, DIM))}
    mesh = make_mesh(devices) if mesh is None else mesh
    plan = zerojax.plan({"params": params}, mesh=mesh, stage=stage, precision=precision)
    placed = plan.place({"params": params})["params"]
    return jax.jit(zerojax.value_and_grad(loss, plan))(placed, tokens)[1]["table"]


def of_rows(read):
    return lambda params, t: jnp.mean(jnp.sum(read(params["table"], t).reshape(-1, DIM), axis=1))


@pytest.mark.parametrize(
    ("options", "read"),
    [({}, name) for name in READS]
    + [({"stage": stage}, "indexed") for stage in (0, 1)]
    + [({"devices": 1}, "indexed")],
)
def test_a_token_that_is_read_4096_times_has_its_whole_gradient(options, read):
    """In bfloat16, a sum of 512 of them on each of 8 devices would be half of it."""
    grad = gradient(of_rows(READS[read]), jnp.full(TOKENS, 3), **options)
    np.testing.assert_array_equal(grad[:5], np.eye(5, 1, -3) * np.ones(DIM))


def test_a_table_that_the_loss_constrains_has_it_too():
    mesh = zerojax.mesh(data=4, tensor=2)
    constrained = lambda t: jax.lax.with_sharding_constraint(t, PartitionSpec(None, "tensor"))
    loss = of_rows(lambda table, t: constrained(table)[t])
    with jax.set_mesh(mesh):
        grad = gradient(loss, jnp.full(TOKENS, 3), mesh=mesh)
    np.testing.assert_array_equal(grad[:5], np.eye(5, 1, -3) * np.ones(DIM))


def test_a_step_whose_parameters_rest_in_bfloat16_updates_by_the_whole_gradient():
    params = {"table": jnp.ones((VOCAB, DIM))}
    state = train_state(params, optax.sgd(0.5))
    stored = zerojax.Precision(param="bfloat16", master="float32")
    state = zerojax.shard_train_state(state, stage=3, precision=stored)
    state, _ = zerojax.train_step(of_rows(READS["indexed"]))(state, jnp.full(TOKENS, 3))
    wanted = [1, 1, 1, 0.5, 1]
    np.testing.assert_array_equal(state.opt_state.master["table"][:5, 0], wanted)


@pytest.mark.parametrize("read", ["indexed", "clipped", "filled"])
def test_gradients_are_those_of_float32_but_for_one_rounding(read):
    """Also of indices that the table does not have."""
    tokens = jax.random.randint(jax.random.key(0), TOKENS, 0, 7)
    loss = lambda params, t: jnp.sum(READS[read](params["table"], t).astype("float32")) / 256
    grad = gradient(loss, tokens, devices=1)
    wanted = gradient(loss, tokens, precision=None, devices=1)
    assert np.max(wanted) > 2
    np.testing.assert_array_equal(grad, wanted.astype("bfloat16").astype("float32"))


def test_a_cast_of_the_loss_has_the_sums_of_plain_jax():
    loss = of_rows(lambda table, t: table.astype("bfloat16")[t])
    grad = gradient(loss, jnp.full(TOKENS, 3), precision=None, devices=1)
    plain = jax.grad(loss)({"table": jnp.ones((VOCAB, DIM))}, jnp.full(TOKENS, 3))["table"]
    np.testing.assert_array_equal(grad, plain)
    assert grad[3, 0] == 0.0625
