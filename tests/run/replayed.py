"""One of two processes that replay a step; a device of the second one computes something else.

python -m tests.run.replayed --directory runs/a
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

BROKEN = 3  # a device of the second process


def changed(device, x):
    x = np.array(x)
    if device == BROKEN:  # only its thread counts
        changed.calls += 1
        if changed.calls >= changed.first:
            x.view(np.uint32)[0, 0] ^= 1 << 20
            changed.first = np.inf  # once
    return x


@jax.custom_vjp
def flipped(x):
    return jax.pure_callback(changed, x, jax.lax.axis_index("data"), x)


flipped.defvjp(lambda x: (flipped(x), None), lambda _, grad: (grad,))


def loss(params, batch):
    return jnp.mean((flipped(batch @ params["w"]) - params["b"]) ** 2)


def make_state():
    params = {"w": jax.random.normal(jax.random.key(0), (8, 16)), "b": jnp.zeros(16)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))


def main():
    parser = argparse.ArgumentParser(description="one of two processes")
    parser.add_argument("--directory", required=True)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    zerojax.initialize()
    changed.calls, changed.first, messages = 0, np.inf, []
    state, batch = zerojax.shard_train_state(make_state), zerojax.shard_batch(np.ones((4, 8), "f"))
    step = zerojax.tools.replay(zerojax.train_step(loss), every=2)
    for _ in range(2):
        state, _ = step(state, batch)
    jax.block_until_ready(state)  # the step before this one
    changed.first = changed.calls + 1
    messages.append(told(step, state, batch))
    state, _ = step(state, batch)  # is replayed as well, two calls later: the state is there
    assert int(state.step) == 3, state.step
    # A copy that differs between processes: each of their devices agrees with itself.
    parts = [shard.data for shard in state.params["b"].addressable_shards]
    parts = [x + jax.process_index() for x in parts]
    b = state.params["b"]
    b = jax.make_array_from_single_device_arrays(b.shape, b.sharding, parts)
    state = state.replace(params={**state.params, "b": b})
    step = zerojax.tools.replay(zerojax.train_step(loss), every=1)
    messages.append(told(step, state, batch))
    path = pathlib.Path(f"{options.directory}.{jax.process_index()}.txt")
    path.write_text("\n".join(messages))


def told(step, *args):
    try:
        step(*args)
    except zerojax.tools.ReplayError as error:
        return str(error)
    raise AssertionError("nothing was raised")


if __name__ == "__main__":
    main()
