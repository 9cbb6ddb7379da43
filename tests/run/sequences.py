"""One of two processes of four devices, which share the rows of a batch, or sequences.

python -m tests.run.sequences
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax

DRAWN = np.random.default_rng(0)
PARAMS = {"w": DRAWN.normal(size=(16, 8)).astype(np.float32)}
# The rows that each of the processes loads, by the sizes of the mesh.
MESHES = {(2, 4): [slice(0, 4), slice(4, 8)], (1, 8): [slice(0, 8)] * 2}


def loss(params, batch):
    errors = jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2, -1)
    return zerojax.mean(errors, where=batch["mask"]), {"errors": errors}


def main():
    jax.config.update("jax_num_cpu_devices", 4)
    zerojax.initialize()
    for (data, sequence), slices in MESHES.items():
        mesh = zerojax.mesh(data=data, sequence=sequence)
        for tokens in (16, 18):
            batch = {"x": DRAWN.normal(size=(8, tokens, 16)).astype(np.float32)}
            batch["mask"] = DRAWN.random((8, tokens)) < 0.6
            made = lambda: TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(1.0))
            options = {"mesh": mesh, "sequence": "sequence", "min_shard_size": 0}
            state = zerojax.shard_train_state(made, **options)
            own = zerojax.run.process_slice(8, state)
            assert own == slices[jax.process_index()], own
            mine = zerojax.shard_batch(jax.tree.map(lambda leaf: leaf[own], batch), state)
            assert mine["x"].shape == batch["x"].shape and mine["x"].sharding.spec == P("data")
            state, metrics = zerojax.train_step(loss)(state, mine)
            with jax.default_device(jax.local_devices()[0]):
                (value, _), grads = jax.value_and_grad(loss, has_aux=True)(PARAMS, batch)
                new = PARAMS["w"] - np.asarray(grads["w"])
            np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
            np.testing.assert_allclose(zerojax.gather_params(state)["w"], new, atol=1e-6)
            print(f"right {data} x {sequence} of {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
