"""Trains a small byte-level GPT at ZeRO stage 3, checks a step, and shows the memory of each stage.

    python examples/demo.py                     # 8 emulated CPU devices, or your GPUs
    python examples/demo.py --stage 1 --steps 50 --accumulate 2

The model, the optimizer and the loss below know nothing of zerojax. Two marked lines train them on
many devices.
"""

import argparse
import inspect
import json
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import ast
import collections

import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from tqdm import tqdm

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=3, choices=range(4))
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=64, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")

# ---- an ordinary GPT on one device


def init_params(key, layers, dim, tokens, vocab=256):
    keys = iter(jax.random.split(key, 6))

    def normal(*shape, scale=0.02):
        return jax.random.normal(next(keys), shape) * scale

    return {
        "embed": normal(vocab, dim),
        "position": normal(tokens, dim),
        "norm": jnp.ones(dim),
        "blocks": {  # the weights of all layers, stacked for lax.scan
            "norm1": jnp.ones((layers, dim)),
            "norm2": jnp.ones((layers, dim)),
            "qkv": normal(layers, dim, 3 * dim),
            "proj": normal(layers, dim, dim, scale=0.02 / layers**0.5),
            "up": normal(layers, dim, 4 * dim),
            "down": normal(layers, 4 * dim, dim, scale=0.02 / layers**0.5),
        },
    }


def norm(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def attention(x, p, head_dim=32, attend=causal):
    rows, tokens, dim = x.shape
    # The columns of q, k and v of a head are neighbours, so that heads may be split over devices.
    qkv = (x @ p["qkv"]).reshape(rows, tokens, -1, 3, head_dim)
    attended = attend(*jnp.unstack(qkv, axis=3))
    return attended.reshape(rows, tokens, dim) @ p["proj"]


def mlp(x, p):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def block(x, p):
    x = x + attention(norm(x, p["norm1"]), p)
    return x + mlp(norm(x, p["norm2"]), p), None


def loss_fn(params, text):
    inputs, targets = text[:, :-1], text[:, 1:]
    x = params["embed"][inputs] + params["position"]
    x, _ = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
    logits = norm(x, params["norm"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


# ---- text that comes with every Python


def read_text():
    modules = (argparse, ast, collections, inspect, json)
    return np.frombuffer("".join(map(inspect.getsource, modules)).encode(), np.uint8)


def sample_batch(text, rng, rows, tokens):
    starts = rng.integers(0, len(text) - tokens - 1, rows)
    return np.stack([text[s : s + tokens + 1] for s in starts]).astype(np.int32)


# ---- what you get for it


def checked(step, state, batch):
    """Prints that the step is right, and what it sends."""
    zerojax.verify(step, state, batch).check()  # raises where a leaf differs
    print("verify: loss, gradients and new state are those of one device")
    report = zerojax.audit(
        step, state, batch
    ).check()  # raises where XLA breaks the stage's promise
    sent = collections.Counter()
    for one in report.traffic:
        sent[one.kind] += one.wire_bytes
    parts = [f"{n / 2**20:.2f} MiB by {kind}" for kind, n in sent.most_common() if n > 2**10]
    print(f"audit:  in a step, each device sends {', '.join(parts) or 'nothing'}")


def memory_by_stage(make_state):
    print(f"\nMemory between steps on each of {len(jax.devices())} devices, by stage:")
    replicated = None
    for stage in range(4):
        nbytes = zerojax.plan(make_state, stage=stage).bytes_per_device()
        total = sum(nbytes.values())
        replicated = replicated or total
        bar = "█" * round(30 * nbytes["params"] / replicated)
        bar += "▒" * round(30 * nbytes["opt_state"] / replicated)
        print(f"  {stage}  {bar:30}  {total / 2**20:5.2f} MiB  {total / replicated:4.0%}")
    print("     █ parameters  ▒ optimizer state")


def main():
    args = parser.parse_args()
    devices = jax.devices()
    print(f"{len(devices)} x {devices[0].device_kind}, JAX {jax.__version__}, stage {args.stage}")
    text, rng = read_text(), np.random.default_rng(0)

    def make_state():
        params = init_params(jax.random.key(0), args.layers, args.dim, args.tokens)
        schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 20, max(args.steps, 21))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    state = zerojax.shard_train_state(make_state, stage=args.stage)  # line 1: made already sharded
    step = zerojax.train_step(loss_fn, accumulate=args.accumulate)  # line 2

    first, started = None, None
    with tqdm(range(args.steps), desc="training", unit="step") as bar:
        for i in bar:
            state, metrics = step(state, sample_batch(text, rng, args.batch, args.tokens))
            if i == 0:
                first, started = float(metrics["loss"]), time.perf_counter()
            elif i % 10 == 0 or i == args.steps - 1:
                loss, seconds = float(metrics["loss"]), time.perf_counter() - started
                rate = i * args.batch * args.tokens / seconds
                bar.set_postfix({"loss": f"{loss:.2f}", "tokens/s": f"{rate:,.0f}"})
    print(f"loss {first:.2f} -> {float(metrics['loss']):.2f}")

    table = state.params["embed"]
    shards = [shard.data.shape for shard in table.addressable_shards]
    print(f"the embedding is {table.shape}; each device has {shards[0]}\n")
    checked(step, state, sample_batch(text, rng, args.batch, args.tokens))
    memory_by_stage(make_state)


if __name__ == "__main__":
    main()
