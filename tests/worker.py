"""One process of a training run, for tests and benchmarks that start, kill and compare runs.

    python -m tests.worker --directory runs/a --steps 8

Prints `step N` after each step, and in the end `digest HEX` of the whole state on process 0.
"""

import argparse
import contextlib
import hashlib
import os
import time

import jax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--directory", required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--every", type=int, default=2)
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--devices", type=int, default=2, help="of this process")
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--step-seconds", type=float, default=0.0)
parser.add_argument("--heartbeat", type=int, default=10)
parser.add_argument("--watchdog", type=float, default=120)
parser.add_argument("--hang-at", type=int)
parser.add_argument("--raise-at", type=int)
parser.add_argument("--no-data", action="store_true", help="as many processes as saved it only")
parser.add_argument("--offload", action="store_true", help="state on the host, updated in backward")
parser.add_argument("--export")


def main() -> None:
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)

    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax.training.train_state import TrainState

    import zerojax

    zerojax.initialize(heartbeat_timeout_seconds=args.heartbeat)

    def make_state():
        k1, k2 = jax.random.split(jax.random.key(0))
        layers = {
            "w1": jax.random.normal(k1, (2, args.dim, 4 * args.dim)) / 8,
            "w2": jax.random.normal(k2, (2, 4 * args.dim, args.dim)) / 16,
        }
        params = {"layers": layers, "bias": jnp.zeros(args.dim)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    def loss_fn(params, batch, rng):
        @jax.checkpoint
        def layer(x, weights):
            hidden = jnp.tanh(x @ weights["w1"])
            hidden *= jax.random.bernoulli(rng, 0.9, hidden.shape)
            return x + hidden @ weights["w2"], None

        x, _ = jax.lax.scan(layer, batch, params["layers"])
        return jnp.mean((x + params["bias"] - 2 * batch) ** 2)

    def batch(n):
        rows = np.random.default_rng(n).normal(size=(16, args.dim)).astype(np.float32)
        return zerojax.shard_batch(rows[zerojax.process_slice(16)])

    def memories(state):
        return {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim}

    offload = zerojax.Offload(params=True, min_bytes=0) if args.offload else None
    rests = {"pinned_host" if args.offload else jax.devices()[0].default_memory().kind}
    plan = zerojax.plan(make_state, stage=args.stage, offload=offload)
    step = zerojax.train_step(loss_fn, update="backward" if args.offload else "auto")
    watchdog = zerojax.Watchdog(args.watchdog)
    with (
        contextlib.ExitStack() as watched,
        zerojax.Checkpoints(args.directory, every=args.every, keep=2) as checkpoints,
    ):
        state, saved = checkpoints.resume(plan, make_state, data=not args.no_data)
        assert memories(state) == rests, "born or restored elsewhere"
        if saved.step and not args.no_data:
            assert saved.data == ("rows", jax.process_index(), saved.step)
        zerojax.log(f"from {saved.step or 0}")
        for n in range(saved.step or 0, args.steps):
            if n == args.hang_at and jax.process_index() == 1:
                time.sleep(1000)
            if n == args.raise_at and jax.process_index() == 1:
                raise ValueError("this process has seen enough")
            rng = jax.random.fold_in(jax.random.key(1), n)
            state, metrics = jax.block_until_ready(step(state, batch(n), rng))
            time.sleep(args.step_seconds)
            if n == (saved.step or 0):  # compiled: steps are short from here on
                watched.enter_context(watchdog)
            watchdog.alive(n + 1)
            zerojax.log(f"step {n + 1} loss {float(metrics['loss']):.9g}")
            checkpoints.save(n + 1, state, data=("rows", jax.process_index(), n + 1))
    assert memories(state) == rests, "a step left it elsewhere"
    if args.export:
        names = {"layers/w1": ("layers.{}.up", "in out -> out in"), "layers/w2": "layers.{}.down"}
        zerojax.export_safetensors(args.export, state, names=names)
    whole = jax.tree.leaves(zerojax.gather_params({"state": state}))
    digest = hashlib.sha256(b"".join(x.tobytes() for x in whole)).hexdigest()
    print("digest", digest, flush=True)  # of every process: each has gathered all of it
    if os.environ.get("WORLD_SIZE"):
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
