"""What it costs a step, in a run of several processes, that they compare what they call.

    zerojax launch -n 2 --cpu benchmarks/compared.py  # states of 98 leaves and of 602

Prints the median time that a known step adds: it looks for values that the user has put into the
state, and notes the call under its number (`docs/hosts.md`).
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

CALLS = 500


def compare(count: int) -> None:
    def make():
        params = {f"w{i}": jnp.ones((64, 4)) for i in range(count)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    state = zerojax.shard_train_state(make, stage=3, min_shard_size=1)
    step = zerojax.train_step(
        lambda params, x: sum(jnp.mean((x @ w) ** 2) for w in params.values())
    )
    batch = zerojax.shard_batch(np.ones((4, 64), np.float32))
    state, _ = step(state, batch)
    leaves, jitted, seconds = jax.tree.leaves(state), step._for_args(state, batch), []
    for _ in range(CALLS):
        start = time.perf_counter()
        step._agree(jitted, state.tx.plan, leaves, (state, batch), {})
        seconds.append(time.perf_counter() - start)
    if jax.process_index() == 0:
        print(f"{len(leaves)} leaves: {statistics.median(seconds) * 1e6:.0f} us a step", flush=True)


zerojax.initialize()
for count in (32, 200):
    compare(count)
