"""Trains an Equinox model on many devices: a byte-level GPT on Python's own manual.

    python examples/equinox_loop.py                        # 8 emulated CPU devices, or your GPUs
    python examples/equinox_loop.py --stage 1 --accumulate 2
    python examples/equinox_loop.py --checkpoints runs/eqx # run again to resume

The model and `loss_fn(model, batch)` are Equinox code for one device. Lines 1 and 2 train them on
many: a state replaces `tx.init(eqx.filter(model, eqx.is_inexact_array))`, and zerojax's step
replaces one with `eqx.filter_jit` and `eqx.filter_value_and_grad`. The loss still takes the module.
Other lines that name zerojax are for checkpoints, the progress bar, and runs of several processes.
With the defaults the validation loss ends below 2.3 nats per byte, on unseen text.
"""

import argparse
import contextlib

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

from collections.abc import Callable
from pydoc_data import topics

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=64, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--checkpoints", help="a directory to save to and resume from")
parser.add_argument("--save-every", type=int, default=50, help="steps")

# ---- an ordinary Equinox model, for one sequence

HEAD_DIM = 32


class Block(eqx.Module):
    norms: list[eqx.nn.RMSNorm]
    qkv: eqx.nn.Linear
    proj: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable

    def __init__(self, dim, dropout, key):
        keys = iter(jax.random.split(key, 4))
        linear = lambda n, m: eqx.nn.Linear(n, m, use_bias=False, key=next(keys))
        self.norms = [eqx.nn.RMSNorm(dim, use_bias=False) for _ in range(2)]
        self.qkv, self.proj = linear(dim, 3 * dim), linear(dim, dim)
        self.up, self.down = linear(dim, 4 * dim), linear(4 * dim, dim)
        self.dropout, self.activation = eqx.nn.Dropout(dropout), jax.nn.gelu

    def __call__(self, x, key):
        keys = jax.random.split(key, 2) if key is not None else (None, None)
        heads = (len(x), -1, HEAD_DIM)
        qkv = jax.vmap(self.qkv)(jax.vmap(self.norms[0])(x))
        q, k, v = (a.reshape(heads) for a in jnp.split(qkv, 3, -1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + self.dropout(jax.vmap(self.proj)(attended), key=keys[0], inference=key is None)
        hidden = self.activation(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + self.dropout(jax.vmap(self.down)(hidden), key=keys[1], inference=key is None)


class GPT(eqx.Module):
    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, layers, dim, tokens, dropout, *, vocab=256, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(weight=jax.random.normal(k1, (vocab, dim)) / 8)
        self.positions = eqx.nn.Embedding(weight=jax.random.normal(k2, (tokens, dim)) / 8)
        # The weights of all layers, stacked for lax.scan.
        self.blocks = eqx.filter_vmap(lambda key: Block(dim, dropout, key))(
            jax.random.split(k3, layers)
        )
        self.norm = eqx.nn.RMSNorm(dim, use_bias=False)
        self.head = eqx.nn.Linear(dim, vocab, use_bias=False, key=k4)

    def __call__(self, text, key=None):
        """Returns the logits; without a key there is no dropout."""
        x = jax.vmap(self.embed)(text) + jax.vmap(self.positions)(jnp.arange(len(text)))
        layers, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def step(carry, layer):
            x, key = carry
            key, now = (None, None) if key is None else jax.random.split(key)
            return (eqx.combine(layer, static)(x, now), key), None

        (x, _), _ = jax.lax.scan(step, (x, key), layers)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss_fn(model, text, rng=None):
    keys = None if rng is None else jax.random.split(rng, len(text))
    logits = jax.vmap(model)(text[:, :-1], keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


# ---- text that comes with every Python


def read_text():
    """Returns (training, validation) text: each paragraph of the manual is in one of them."""
    paragraphs = dict.fromkeys("\n\n".join(topics.topics.values()).split("\n\n"))
    text = np.frombuffer("\n\n".join(paragraphs).encode(), np.uint8).astype(np.int32)
    return np.split(text, [len(text) * 9 // 10])


def sample_batch(text, seed, rows, tokens):
    """Returns the batch of a step. It is always the same, so a resumed run needs no saved position.

    A process reads only its own rows; the batch has those of all processes.
    """
    starts = np.random.default_rng(seed).integers(0, len(text) - tokens - 1, rows)
    mine = starts[zerojax.run.process_slice(rows)]
    return zerojax.shard_batch(np.stack([text[start : start + tokens + 1] for start in mine]))


# ---- training


def main():
    args = parser.parse_args()
    zerojax.initialize()
    training, validation = read_text()

    def make_state():
        model = GPT(args.layers, args.dim, args.tokens, args.dropout, key=jax.random.key(0))
        schedule = optax.warmup_cosine_decay_schedule(0, args.lr, 20, max(args.steps, 21))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
        return zerojax.ModuleState.create(model, tx)

    state = zerojax.shard_train_state(make_state, stage=args.stage)  # line 1: made already sharded
    step = zerojax.train_step(loss_fn, accumulate=args.accumulate)  # line 2
    eval_step = zerojax.eval_step(loss_fn)

    with open_checkpoints(args) as checkpoints:
        start = 0
        if checkpoints:
            state, saved = checkpoints.resume(state)
            start = saved.step or 0
            zerojax.run.log(f"resuming from step {start}" if start else "starts from scratch")
        shape = jax.ShapeDtypeStruct((args.batch, args.tokens + 1), "int32")
        flops = zerojax.tools.step_flops(step, state, shape, jax.random.key(0))
        tokens = {"tokens": args.batch * args.tokens}
        meter = zerojax.tools.Meter(args.steps, start=start, per_step=tokens, flops=flops)
        for n in meter:
            batch = sample_batch(training, n, args.batch, args.tokens)
            state, metrics = step(state, batch, jax.random.key(n))
            meter.update(metrics)
            if checkpoints:
                checkpoints.save(n + 1, state)

    unseen = [sample_batch(validation, n, args.batch, args.tokens) for n in range(4)]
    loss = np.mean([float(eval_step(state, batch)["loss"]) for batch in unseen])
    zerojax.run.log(f"validation loss {loss:.3f} nats a byte after {args.steps} steps")
    model = state.model  # the trained module, with sharded arrays
    weight, name = model.blocks.up.weight, model.blocks.activation.__name__
    part = weight.addressable_shards[0].data.shape
    zerojax.run.log(
        f"a {type(model).__name__} with {name}, its up-projections {weight.shape}, {part} a device"
    )


def open_checkpoints(args):
    if not args.checkpoints:
        return contextlib.nullcontext()
    return zerojax.Checkpoints(args.checkpoints, every=args.save_every)


if __name__ == "__main__":
    main()
