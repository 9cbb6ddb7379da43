"""The program of one device: means over the mesh, rows in order, keys folded by device."""

import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from tests.conftest import make_mesh

DEVICES = 4
PLAN = zerojax.plan({"params": {"w": np.ones((16, 16), "f")}}, mesh=make_mesh(DEVICES))
ROWS = np.random.default_rng(0).normal(size=(16, 16)).astype("f")


def aux_of(loss, *args, accumulate=1, **named):
    params = PLAN.place({"params": {"w": np.ones((16, 16), "f")}})["params"]
    grad = zerojax.value_and_grad(loss, PLAN, has_aux=True, accumulate=accumulate)
    return jax.device_get(jax.jit(grad)(params, *args, **named)[0][1])


def test_keys_are_folded_by_device_and_arrays_of_keys_are_split():
    key = jax.random.key(3)
    batch = {"x": ROWS, "keys": jax.random.split(key, len(ROWS))}

    def loss(params, batch, rngs, scale):
        drawn = {name: jax.random.uniform(rng, (len(batch["x"]),)) for name, rng in rngs.items()}
        rows = jax.vmap(jax.random.uniform)(batch["keys"])
        return scale * jnp.mean(batch["x"] @ params["w"]), (drawn, rows)

    rngs = {"new": key, "old": jax.random.PRNGKey(3), "data": jax.random.key_data(key)}
    drawn, rows = aux_of(loss, batch, rngs=rngs, scale=2.0)
    folded = [jax.random.fold_in(key, device) for device in range(DEVICES)]
    wanted = np.concatenate([jax.random.uniform(k, (len(ROWS) // DEVICES,)) for k in folded])
    for values in drawn.values():
        np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(rows, jax.vmap(jax.random.uniform)(batch["keys"]))
