"""One of two processes that make other calls than the other, each of which is known by itself.

python -m tests.run.orders --case evaluations
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
CASES = ["end", "evaluations", "turns", "rate", "weights"]
parser.add_argument("--case", choices=CASES, required=True)
CALLS, SECONDS = 60, 0.05  # a step


def make():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1e-3)
    return TrainState.create(apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=tx)


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def twice(params, batch):
    return 2 * loss(params, batch)


def main() -> None:
    case = parser.parse_args().case
    jax.config.update("jax_num_cpu_devices", 1)
    zerojax.initialize()
    second = jax.process_index() == 1
    state, batch = zerojax.shard_train_state(make, 3), zerojax.shard_batch(np.ones((4, 64), "f4"))
    first, other = zerojax.train_step(loss), zerojax.train_step(twice)
    evaluate = zerojax.eval_step(loss)
    for step in (first, other):
        state, _ = step(state, batch)
    evaluate(state, batch)
    turns = [first, other][:: -1 if second and case == "turns" else 1]
    for _ in range(2 + (second and case == "evaluations")):
        evaluate(state, batch)
    if second and case == "rate":
        hyper = {"learning_rate": jnp.float32(0.2)}
        state = state.replace(opt_state=state.opt_state._replace(hyperparams=hyper))
    if second and case == "weights":
        zerojax.gather_params(state)
    for n in range(second if case == "end" else CALLS):
        state, metrics = turns[n % 2](state, batch)
        float(metrics["loss"])
        time.sleep(SECONDS)
    if case != "end":
        print("not a word", flush=True)


if __name__ == "__main__":
    main()
