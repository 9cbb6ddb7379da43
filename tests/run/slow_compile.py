"""One of two processes, of which the second compiles its step for longer than gloo waits.

python -m tests.run.slow_compile [--compile]
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

SECONDS = 32


def make():
    return TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 4))}, tx=optax.sgd(0.1))


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    zerojax.initialize()
    state, batch = zerojax.shard_train_state(make), zerojax.shard_batch(np.ones((4, 8), "f4"))
    step = zerojax.train_step(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
    compiled = []

    def listen(event: str, _: float, **__: object) -> None:
        if event.endswith("backend_compile_duration") and not compiled:
            compiled.append(event)
            time.sleep(SECONDS)

    if jax.process_index() == 1:
        jax.monitoring.register_event_duration_secs_listener(listen)
    if "--compile" in sys.argv:
        step = step.compile(state, batch)
    _, metrics = step(state, batch)
    print(f"loss {float(metrics['loss']):g}, compiled {len(compiled)}", flush=True)


if __name__ == "__main__":
    main()
