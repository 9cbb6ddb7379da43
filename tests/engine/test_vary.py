"""Parameters that are not real numbers: complex ones have gradients, integers have zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.engine.losses import BATCH, DIM, PARAMS, end
from tests.reference import assert_close


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_complex_parameters_keep_their_imaginary_parts(stage):
    params = {"w": (PARAMS["shared"] + 1j * PARAMS["single"]["w"]).astype(jnp.complex64)}
    loss = lambda p, b: jnp.mean(jnp.abs(b["x"] @ p["w"]) ** 2)
    plan = zerojax.plan({"params": params}, stage=stage, mesh=make_mesh())
    precision = zerojax.Precision(reduce="float32")
    placed = plan.place({"params": params})["params"]
    _, grads = zerojax.value_and_grad(loss, plan, precision=precision)(placed, BATCH)
    np.testing.assert_allclose(grads["w"], jax.grad(loss)(params, BATCH)["w"], atol=1e-6)


def test_integer_parameters_pass_through():
    params = {"w": PARAMS["single"]["w"], "perm": jnp.arange(DIM)[::-1]}
    loss = lambda p, batch: end(batch["x"][:, p["perm"]] @ p["w"])
    plan = zerojax.plan({"params": params}, stage=3, mesh=make_mesh(), min_shard_size=1)
    _, grads = zerojax.value_and_grad(loss, plan)(plan.place({"params": params})["params"], BATCH)
    assert_close(grads["w"], jax.grad(loss, allow_int=True)(params, BATCH)["w"], 1e-6)
    assert grads["perm"].dtype == jnp.int32 and not np.any(grads["perm"])
