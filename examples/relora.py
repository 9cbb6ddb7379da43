"""Trains a GPT by ReLoRA, which merges adapters of low rank into its weights again and again.

    python examples/relora.py                 # trains a small base first if there is none
    python examples/relora.py --checkpoints runs/relora # run again to resume

Between restarts this is LoRA: the base is frozen, without gradients and optimizer state. A restart
adds each adapter to the kernel beside it, makes a new one, and resets Adam's moments, so that the
sum of all adapters has a higher rank than one. The merge is a function of the sharded state; the
reset is a transformation in an optax chain.

With the defaults the loss on unseen code falls from 2.3 to below 2.05 nats per byte. This takes 2
minutes of one CPU core, and 4 minutes for the base.
"""

import argparse
from typing import Any, NamedTuple

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import train_gpt
from finetune_lora import add_base, read_code, train_missing_base, with_adapters
from flax.traverse_util import flatten_dict, unflatten_dict

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=128, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--rank", type=int, default=4, help="the rank of the adapters")
parser.add_argument("--restart-every", type=int, default=40, help="steps")
parser.add_argument("--checkpoints", help="a directory to save to and resume from")
parser.add_argument("--save-every", type=int, default=40, help="steps")
add_base(parser)

# ---- restarts


class Restarting(NamedTuple):
    count: jax.Array
    inner: Any


def restarting(inner, every):
    """Returns the transformation, which makes its state anew every so many steps."""

    def init(params):
        return Restarting(jnp.zeros((), "int32"), inner.init(params))

    def update(updates, state, params=None):
        restarts = state.count % every == 0
        fresh = inner.init(updates)
        kept = jax.tree.map(lambda new, old: jnp.where(restarts, new, old), fresh, state.inner)
        updates, kept = inner.update(updates, kept, params)
        return updates, Restarting(state.count + 1, kept)

    return optax.GradientTransformation(init, update)


def jagged(lr, steps, every, warmup=5):
    """Returns a cosine schedule over all steps that warms up after each restart."""
    cosine = optax.cosine_decay_schedule(lr, max(steps, 1))
    return lambda n: cosine(n) * jnp.minimum(1.0, (n % every + 1) / warmup)


def merged(params, key):
    """Returns the parameters with each adapter added to its kernel, and a new one in its place.

    A new adapter adds nothing yet, so the model is the same before and after.
    """
    flat = flatten_dict(params)
    for n, path in enumerate(path for path in tuple(flat) if "lora_a" in path):
        *layer, _, kernel = path
        down, up, kernel = path, (*layer, "lora_b", kernel), (*layer, kernel)
        flat[kernel] += flat[down] @ flat[up]  # of all layers at once
        lecun = nn.initializers.lecun_normal(batch_axis=0)
        flat[down] = lecun(jax.random.fold_in(key, n), flat[down].shape)
        flat[up] = jnp.zeros_like(flat[up])
    return unflatten_dict(flat)


def merge_step(plan):
    """Returns the jitted restart of a sharded state, which stays sharded."""

    def merge(state, key):
        state = plan.scatter(state)  # without padding, if arrays have some
        return plan.constrain(state.replace(params=merged(state.params, key)))

    return jax.jit(merge, donate_argnums=0)


# ---- training


def main():
    args = parser.parse_args()
    zerojax.initialize()
    train_missing_base(args)
    training, validation = read_code()
    schedule = jagged(args.lr, args.steps, args.restart_every)
    tx = optax.chain(
        restarting(optax.scale_by_adam(), args.restart_every),
        optax.scale_by_learning_rate(schedule),
    )
    _, make_state, loss_fn = with_adapters(args, tx)
    plan = zerojax.plan(make_state, stage=args.stage)
    state = plan.place(make_state)
    params = zerojax.checkpoint.import_safetensors(args.base, like=state, keep="lora_")
    train(args, plan, state.replace(params=params), loss_fn, training, validation)


def train(args, plan, state, loss_fn, training, validation):
    """Returns the trained state. A checkpoint at a restart has the state before the restart."""
    step = zerojax.train_step(loss_fn, accumulate=args.accumulate)
    eval_step = zerojax.eval_step(loss_fn)
    merge = merge_step(plan)
    data = train_gpt.batches(training, args.batch, args.tokens + 1)

    def say(n, what):
        unseen = train_gpt.batches(validation, args.batch, args.tokens + 1)
        losses = [eval_step(state, zerojax.shard_batch(next(unseen)))["loss"] for _ in range(4)]
        zerojax.run.log(f"step {n}: validation loss {np.mean(losses):.4f} {what}")

    with train_gpt.open_checkpoints(args) as checkpoints:
        start = 0
        if checkpoints and checkpoints.latest():
            state, saved = checkpoints.resume(state)
            data.set_state(saved.data)
            start = saved.step
            zerojax.run.log(f"resuming from step {start}")
        for n in range(start, args.steps):
            if n % args.restart_every == 0:
                say(n, "")
                if n > 0:
                    state = merge(state, jax.random.fold_in(jax.random.key(1), n))
                    say(n, "with the adapters merged")
            state, _ = step(state, zerojax.shard_batch(next(data)))
            if checkpoints:
                checkpoints.save(n + 1, state, data=data)
    say(args.steps, "")
    return state


if __name__ == "__main__":
    main()
