"""One process of a training run that goes on when others are lost.

    python -m tests.elastic_worker --directory runs/a --steps 8 --kill-at 5

Prints `step N on D loss L` after each step on D devices, and in the end `digest HEX` of the
whole state. Process 3 kills itself in a step, while the others wait for it.
"""

import argparse
import hashlib
import os
import signal
import time

import jax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--directory", required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--devices", type=int, default=1, help="of this process")
parser.add_argument("--kill-at", type=int)
parser.add_argument("--kill-after", type=int, help="the step, where the others save")
parser.add_argument("--raise-at", type=int, help="an error of the program")
parser.add_argument("--refuse-at", type=int, help="an error of XLA in every process")
parser.add_argument("--at-least", type=int, default=1)
parser.add_argument("--not-elastic", action="store_true")
ROWS, DIM = 12, 48


def main() -> None:
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)

    import zerojax
    from zerojax._run import agreement as _agreement

    _agreement.PATIENCE, _agreement.LOST = 2, 4
    zerojax.initialize(elastic=not args.not_elastic, heartbeat_timeout_seconds=5)
    me = jax.process_index()
    whole = zerojax.elastic(lambda: train(args, me), at_least=args.at_least)
    print("digest", hashlib.sha256(b"".join(x.tobytes() for x in whole)).hexdigest(), flush=True)


def train(args, me):
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax.training.train_state import TrainState

    import zerojax

    def make_state():
        keys = jax.random.split(jax.random.key(0))
        params = {"up": jax.random.normal(keys[0], (DIM, 4 * DIM)) / 8}
        params |= {"down": jax.random.normal(keys[1], (4 * DIM, DIM)) / 16}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    def loss_fn(params, batch, rng):
        x = batch + jnp.tanh(batch @ params["up"]) @ params["down"]
        return jnp.mean((x - 2 * batch) ** 2)

    def batch(n):
        rows = np.random.default_rng(n).normal(size=(ROWS, DIM)).astype(np.float32)
        return zerojax.shard_batch(rows[zerojax.process_slice(ROWS)])

    plan = zerojax.plan(make_state, stage=3)
    step = zerojax.train_step(loss_fn)
    with zerojax.Checkpoints(args.directory, every=2, keep=None) as checkpoints:
        state, saved = checkpoints.resume(plan, make_state)
        assert len(state.params["up"].sharding.device_set) == jax.device_count()
        for n in range(saved.step or 0, args.steps):
            if n == args.kill_at and me == 3 and jax.process_count() == 4:
                checkpoints.wait()
                time.sleep(1)  # the others wait for it in a collective
                os.kill(os.getpid(), signal.SIGKILL)
            if n == args.raise_at and me == 1:
                raise ValueError("this process has seen enough")
            if n == args.refuse_at:
                raise jax.errors.JaxRuntimeError("INTERNAL: of all of them")
            state, metrics = step(state, batch(n), jax.random.key(n))
            loss = float(metrics["loss"])
            zerojax.log(f"step {n + 1} on {jax.device_count()} loss {loss:.9g}")
            if n + 1 == args.kill_after and me == 3 and jax.process_count() == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.save(n + 1, state)
    return jax.tree.leaves(zerojax.gather_params({"state": state}))


if __name__ == "__main__":
    main()
