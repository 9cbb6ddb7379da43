"""One process of a training run, for tests and benchmarks that start, kill and compare runs.

    python -m tests.support.worker --directory runs/a --steps 8

Prints `step N` after each step, and in the end `digest HEX` of the whole state. With --elastic it
goes on when others are lost. What goes wrong on purpose does so in the last process alone.
"""

import argparse
import contextlib
import hashlib
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--directory", required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--every", type=int, default=2)
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--devices", type=int, default=2, help="of this process")
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--step-seconds", type=float, default=0.0)
parser.add_argument("--heartbeat", type=int, default=60)
parser.add_argument("--watchdog", type=float, default=120)
parser.add_argument("--hang-at", type=int)
parser.add_argument("--raise-at", type=int)
parser.add_argument("--refuse-at", type=int, help="an error of XLA, in every process")
parser.add_argument("--kill-at", type=int, help="in a step, where the others wait in a collective")
parser.add_argument("--kill-after", type=int, help="a step, where the others save")
parser.add_argument("--elastic", action="store_true", help="of zerojax.initialize")
parser.add_argument("--at-least", type=int, help="of zerojax.run.elastic, which then runs it")
parser.add_argument("--keep-arrays", action="store_true", help="outside of what elastic runs")
parser.add_argument("--no-data", action="store_true", help="as many processes as saved it only")
parser.add_argument("--offload", action="store_true", help="state on the host, updated in backward")
parser.add_argument("--disagree", action="store_true", help="in the end, about a step to save")
parser.add_argument("--export")
KEPT = []  # outside of what elastic runs


def make_state(dim):
    k1, k2 = jax.random.split(jax.random.key(0))
    layers = {
        "w1": jax.random.normal(k1, (2, dim, 4 * dim)) / 8,
        "w2": jax.random.normal(k2, (2, 4 * dim, dim)) / 16,
    }
    params = {"layers": layers, "bias": jnp.zeros(dim)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))


def loss_fn(params, batch, rng):
    @jax.checkpoint
    def layer(x, weights):
        hidden = jnp.tanh(x @ weights["w1"])
        hidden *= jax.random.bernoulli(rng, 0.9, hidden.shape)
        return x + hidden @ weights["w2"], None

    x, _ = jax.lax.scan(layer, batch, params["layers"])
    return jnp.mean((x + params["bias"] - 2 * batch) ** 2)


def memories(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim}


def train(args, mesh=None):
    """Returns the state after the last step, from the newest checkpoint on."""
    offload = zerojax.Offload(params=True, min_bytes=0) if args.offload else None
    rests = {"pinned_host" if args.offload else jax.devices()[0].default_memory().kind}
    make = lambda: make_state(args.dim)
    plan = zerojax.plan(make, stage=args.stage, offload=offload, mesh=mesh)
    step = zerojax.train_step(
        loss_fn, schedule=zerojax.Schedule(update="backward" if args.offload else "auto")
    )
    watchdog = zerojax.run.Watchdog(args.watchdog)
    with (
        contextlib.ExitStack() as watched,
        zerojax.Checkpoints(args.directory, every=args.every, keep=2) as checkpoints,
    ):
        state, saved = checkpoints.resume(plan, make, data=not args.no_data)
        if args.keep_arrays:
            KEPT.append(state)
        assert memories(state) == rests, "born or restored elsewhere"
        if saved.step and not args.no_data:
            assert saved.data == ("rows", jax.process_index(), saved.step)
        zerojax.run.log(f"from {saved.step or 0}")
        for n in range(saved.step or 0, args.steps):
            fail_on_purpose(args, n, checkpoints)
            batch = np.random.default_rng(n).normal(size=(args.rows, args.dim)).astype(np.float32)
            batch = zerojax.shard_batch(batch[zerojax.run.process_slice(args.rows)], mesh)
            state, metrics = step(state, batch, jax.random.fold_in(jax.random.key(1), n))
            loss = float(metrics["loss"])
            time.sleep(args.step_seconds)
            if n == (saved.step or 0):  # compiled: steps are short from here on
                watched.enter_context(watchdog)
            watchdog.alive(n + 1)
            zerojax.run.log(f"step {n + 1} on {plan.size} loss {loss:.9g}")
            if n + 1 == args.kill_after:
                kill_the_last()
            data = None if args.no_data else ("rows", jax.process_index(), n + 1)
            checkpoints.save(n + 1, state, data=data)
        assert memories(state) == rests, "a step left it elsewhere"
    return state


def fail_on_purpose(args, step, checkpoints):
    if step == args.hang_at and is_last():
        time.sleep(1000)
    if step == args.raise_at and is_last():
        raise ValueError("this process has seen enough")
    if step == args.refuse_at:
        raise jax.errors.JaxRuntimeError("INTERNAL: of all of them")
    if step == args.kill_at:
        checkpoints.wait()
        kill_the_last()


def is_last():
    """Of the processes that were started: those that are left count themselves anew."""
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def kill_the_last():
    if is_last():
        time.sleep(1)  # the others wait for it
        os.kill(os.getpid(), signal.SIGKILL)


def digest(state):
    whole = jax.tree.leaves(zerojax.gather_params({"state": state}))
    return hashlib.sha256(b"".join(x.tobytes() for x in whole)).hexdigest()


def check_leaves(state):
    """Every process gets every weight, from streams and from resharded parameters."""
    names = {f"layers/{name}": f"layers.{{}}.{name}" for name in ("w1", "w2")}
    wanted = zerojax.gather_params(state)
    stacks = {f"layers.{n}.{k}": w[n] for k, w in wanted["layers"].items() for n in range(2)}
    streamed = {name: np.asarray(x) for name, x in zerojax.stream(state, names=names)}
    jax.tree.map(np.testing.assert_array_equal, streamed, {"bias": wanted["bias"], **stacks})
    jax.tree.map(np.testing.assert_array_equal, zerojax.reshard(state), wanted)


def main() -> None:
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    zerojax.initialize(elastic=args.elastic, heartbeat_timeout_seconds=args.heartbeat)

    def run():
        """Only its string outlives it: `elastic` runs it again on other devices."""
        state = train(args)
        if args.export:
            layers = {"w1": ("layers.{}.up", "in out -> out in"), "w2": "layers.{}.down"}
            names = {f"layers/{name}": entry for name, entry in layers.items()}
            zerojax.checkpoint.export_safetensors(args.export, state, names=names)
        if args.disagree:
            try:
                zerojax.save(f"{args.directory}/never", {"w": np.ones(3)}, step=jax.process_index())
            except ValueError as error:
                print(error, flush=True)
        saved = zerojax.restore(f"{args.directory}/{args.steps}", like=state)
        assert digest(saved) == digest(state), "another state was saved last"
        if args.offload:
            check_leaves(state)
        return digest(state)

    found = run() if args.at_least is None else zerojax.run.elastic(run, at_least=args.at_least)
    print("digest", found, flush=True)
    if os.environ.get("WORLD_SIZE") and not args.elastic:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
