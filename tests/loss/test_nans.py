"""`jax_debug_nans` and `jax_debug_infs`: the line that a bad value comes from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax


@pytest.mark.parametrize(("stage", "shape"), [(0, (8, 8)), (3, (8, 8)), (3, (9, 31))])
def test_jax_debug_flags_say_where(stage, shape, mesh):
    def loss(params, batch):
        logarithms = jnp.log(batch["x"] @ params["w"])
        return jnp.mean(logarithms**2) + jnp.sqrt(params["b"])

    def step_on(x, b, **flags):
        params = {"w": jnp.ones(shape), "b": jnp.float32(b)}
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
        state = zerojax.shard_train_state(state, stage=stage, mesh=mesh)
        with jax.debug_nans("nans" in flags), jax.debug_infs("infs" in flags):
            return zerojax.train_step(loss)(state, {"x": np.full((8, shape[0]), x, np.float32)})

    with pytest.raises(FloatingPointError, match="not finite, in batch/x"):
        step_on(np.nan, 1, nans=True)
    with pytest.raises(FloatingPointError, match="not finite, in batch/x"):
        step_on(np.inf, 1, infs=True)
    for x, flag in ((-1, "nans"), (0, "infs")):
        with pytest.raises(FloatingPointError, match="encountered") as caught:
            step_on(x, 1, **{flag: True})
        assert "logarithms = jnp.log" in str(caught.traceback[-1].statement)
    with pytest.raises(FloatingPointError, match="derivatives of the loss"):
        step_on(1, 0, infs=True)
    assert np.isfinite(step_on(1, 1, nans=True, infs=True)[1]["loss"])
