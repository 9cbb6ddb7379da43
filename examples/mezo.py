"""Fine-tunes a GPT without gradients (MeZO): two forward passes a step, in the memory of inference.

    python examples/mezo.py                   # trains a small base first if there is none
    python examples/mezo.py --steps 500 --accumulate 4

A step moves all parameters along a random direction, forth and back, and takes the difference of
the two losses as the slope. It draws the direction anew from its key each time, shard by shard, and
gets the same numbers on any number of devices. There are no gradients, there is no optimizer, and
nothing waits for backward: the step needs the memory of evaluation.

With the defaults both need 3.6 MiB on each of 8 devices, and training with Adam 14.9. The loss on
unseen code falls from 2.31 to 2.29 nats per byte in 100 steps.
"""

import argparse

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import numpy as np
import optax
import train_gpt
from finetune_lora import add_base, read_code, train_missing_base
from flax.training.train_state import TrainState

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=128, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="directions per step")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--eps", type=float, default=1e-3, help="how far a step moves the parameters")
parser.add_argument("--eval-every", type=int, default=50, help="steps")
add_base(parser)

# ---- the step


def moved(params, key, by):
    """Returns the parameters moved along the direction of this key."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    along = [
        leaf + by * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, along)


def mezo_step(loss_fn, plan, lr, eps, directions=1):
    """Returns a jitted `(state, batch, key) -> (state, metrics)` for a state {"params": ...}."""
    evaluate = zerojax.eval_step(loss_fn, plan=plan)

    def along(state, key, by):
        params = moved(plan.scatter(state)["params"], key, by)  # on shards, without padding
        return plan.constrain({"params": params})

    def step(state, batch, key):
        losses, slopes = [], []
        for n in range(directions):
            drawn, at = jax.random.fold_in(key, n), []
            for by in (eps, -2 * eps):
                state = along(state, drawn, by)
                at.append(evaluate(state, batch)["loss"])
                # One after another, because the direction is drawn anew, not kept.
                state, at, drawn = jax.lax.optimization_barrier((state, at, drawn))
            slopes.append((at[0] - at[1]) / (2 * eps))
            state = along(state, drawn, eps - lr / directions * slopes[-1])
            losses += at
        return state, {"loss": jnp.mean(jnp.stack(losses)), "slope": jnp.stack(slopes)}

    return jax.jit(step, donate_argnums=0)


# ---- training


def peak_mib(step, state, batch, *key, plan=None):
    return zerojax.audit(step, state, batch, *key, plan=plan).memory.peak / 2**20


def compare_memory(args, model, loss_fn, plan, step, batch):
    """Prints the peak memory of each device for a step of each kind."""

    def with_adam():
        params = model.init(jax.random.key(0), jnp.zeros((1, args.tokens), "int32"))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    state = plan.abstract()
    adam = zerojax.plan(with_adam, stage=args.stage).abstract()
    evaluation = peak_mib(zerojax.eval_step(loss_fn, plan=plan), state, batch)
    mezo = peak_mib(step, state, batch, jax.random.key(0), plan=plan)
    training = peak_mib(zerojax.train_step(loss_fn), adam, batch)
    zerojax.run.log(
        f"peak per device: evaluation {evaluation:.2f} MiB, MeZO {mezo:.2f}, Adam {training:.2f}"
    )


def main():
    args = parser.parse_args()
    zerojax.initialize()
    train_missing_base(args)
    training, validation = read_code()
    model = train_gpt.GPT(args.layers, args.dim, args.tokens)
    loss_fn = lambda params, text: train_gpt.next_byte_loss(model, params, text)

    def make_state():
        text = jnp.zeros((1, args.tokens), "int32")
        return {"params": model.init(jax.random.key(0), text)["params"]}

    plan = zerojax.plan(make_state, stage=args.stage)
    state = {"params": zerojax.checkpoint.import_safetensors(args.base, like=plan)}
    step = mezo_step(loss_fn, plan, args.lr, args.eps, args.accumulate)
    eval_step = zerojax.eval_step(loss_fn, plan=plan)
    data = train_gpt.batches(training, args.batch, args.tokens + 1)
    compare_memory(args, model, loss_fn, plan, step, zerojax.shard_batch(next(data)))

    def say(n):
        unseen = train_gpt.batches(validation, args.batch, args.tokens + 1)
        losses = [eval_step(state, zerojax.shard_batch(next(unseen)))["loss"] for _ in range(4)]
        zerojax.run.log(f"step {n}: validation loss {np.mean(losses):.4f}")

    for n in range(args.steps):
        if n % args.eval_every == 0:
            say(n)
        key = jax.random.fold_in(jax.random.key(1), n)
        state, _ = step(state, zerojax.shard_batch(next(data)), key)
    say(args.steps)


if __name__ == "__main__":
    main()
