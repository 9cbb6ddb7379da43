"""Mesh axes that nothing is sharded over; arguments that change while a step runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from tests import linear
from tests.step.tensor import BATCH, DIM, cpu_mesh, make_state, placed, scanned


def along_tensor(params, x):
    x = jax.lax.with_sharding_constraint(x, P(None, "tensor"))
    return jnp.mean((x @ params["up"][0]) ** 2)


def manual_along_tensor(params, x):
    total = jax.shard_map(
        lambda part: jax.lax.psum(jnp.sum(part**2), "tensor"), in_specs=P(None, "tensor"),
        out_specs=P(), axis_names={"tensor"}, check_vma=False,
    )  # fmt: skip
    return total(x @ params["up"][0])


def test_an_axis_that_nothing_is_sharded_over_is_refused():
    """Every replica would compute the same batch, and nobody would see."""
    mesh = cpu_mesh()
    remedy = (
        r"mesh axes {'tensor': 2}.*Each of 2 replicas would compute the same batch.*"
        r"axis=\('data', 'tensor'\), or pass a mesh without"
    )
    state = zerojax.shard_train_state(make_state(), mesh=mesh)
    step = zerojax.train_step(scanned, donate=False)
    for use in (step, step.lower, step.trace):
        with pytest.raises(ValueError, match=remedy):
            use(state, BATCH)
    with pytest.raises(ValueError, match=remedy):
        zerojax.eval_step(scanned)(state, BATCH)

    def tensor(params, batch):  # a function's name is no axis
        return scanned(params, batch)

    with pytest.raises(ValueError, match=remedy):
        zerojax.train_step(jax.jit(tensor))(state, BATCH)
    step.trace(zerojax.shard_train_state(make_state(), mesh=mesh, axis=mesh.axis_names), BATCH)
    # What the model uses by itself is its own affair.
    step.trace(placed(mesh, 3), BATCH)
    step.trace(state, jax.device_put(BATCH, NamedSharding(mesh, P("data", "tensor"))))
    table = jax.device_put(np.eye(DIM, dtype="f"), NamedSharding(mesh, P(None, "tensor")))
    zerojax.train_step(lambda p, x: scanned(p, x @ table)).trace(state, BATCH)
    with jax.set_mesh(mesh):
        zerojax.train_step(along_tensor).trace(state, BATCH)
    zerojax.train_step(manual_along_tensor).trace(state, BATCH)


@pytest.mark.parametrize("call", ["by position", "by name"])
def test_a_batch_may_be_filled_again_while_the_step_runs(monkeypatch, call):
    """JAX has a step of CPUs read numpy's memory, when its turn comes."""
    state, seen = linear.placed(), []
    run = lambda state, batch: seen.append((state, batch)) or batch["x"].sum()
    monkeypatch.setattr(linear.STEP, "for_args", lambda *_, **__: run)
    batch = {"x": np.zeros((8, 64), np.float32), "n": jnp.ones(8)}
    if call == "by name":
        linear.STEP(state=state, batch=batch)
    else:
        linear.STEP(state, batch)
    batch["x"][:] = 7
    assert seen[0][0] is state and seen[0][1]["n"] is batch["n"] and seen[0][1]["x"].sum() == 0
