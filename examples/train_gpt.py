"""Trains a byte-level GPT on Python's own manual, then generates text with it.

    python examples/train_gpt.py                        # 8 emulated CPU devices, or your GPUs
    python examples/train_gpt.py --stage 1 --accumulate 2
    python examples/train_gpt.py --checkpoints runs/gpt # run again to resume

The model is in Flax, with its layers in one `nn.scan`; the input pipeline is in Grain. The lines
for many devices name zerojax; they are the same for one process and for several
(examples/multihost_*.sh).

With the defaults the validation loss ends below 1.5 nats per byte, on unseen text. This takes 6
minutes on one CPU core, and 3 on two.
"""

import argparse
import contextlib
from pydoc_data import topics
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import flax.linen as nn
import grain
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=128, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, for recent GPUs")
parser.add_argument("--eval-every", type=int, default=200, help="steps")
parser.add_argument("--checkpoints", help="a directory to save to and resume from")
parser.add_argument("--save-every", type=int, default=100, help="steps")
parser.add_argument("--export", help="a new directory for the trained weights, as safetensors")
parser.add_argument("--sample", type=int, default=300, help="bytes to generate at the end")

# ---- the model, for one device

HEAD_DIM = 32


class Block(nn.Module):
    dim: int
    dense: Any  # finetune_lora.py puts adapters here

    @nn.compact
    def __call__(self, x, _):
        dense = lambda width, name: self.dense(width, use_bias=False, name=name)
        heads = (*x.shape[:2], -1, HEAD_DIM)
        q, k, v = jnp.split(dense(3 * self.dim, "qkv")(nn.RMSNorm()(x)), 3, axis=-1)
        attended = jax.nn.dot_product_attention(
            q.reshape(heads), k.reshape(heads), v.reshape(heads), is_causal=True
        )
        x = x + dense(self.dim, "proj")(attended.reshape(x.shape))
        hidden = nn.gelu(dense(4 * self.dim, "up")(nn.RMSNorm()(x)))
        return x + dense(self.dim, "down")(hidden), None


class GPT(nn.Module):
    layers: int
    dim: int
    tokens: int
    dense: Any = nn.Dense
    vocab: int = 256

    @nn.compact
    def __call__(self, text):
        embed = nn.Embed(self.vocab, self.dim, name="embed")
        positions = nn.Embed(self.tokens, self.dim, name="positions")
        x = embed(text) + positions(jnp.arange(text.shape[1]))
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            length=self.layers,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        x, _ = blocks(self.dim, self.dense, name="blocks")(x, None)
        return embed.attend(nn.RMSNorm(name="norm")(x))


def next_byte_loss(model, params, text):
    logits = model.apply({"params": params}, text[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), text[:, 1:])
    return losses.mean()


# ---- the text, and each process's share


def read_text():
    """Returns (training, validation) text: each paragraph of the manual is in one of them."""
    paragraphs = dict.fromkeys("\n\n".join(topics.topics.values()).split("\n\n"))
    text = np.frombuffer("\n\n".join(paragraphs).encode(), np.uint8).astype(np.int32)
    return np.split(text, [len(text) * 9 // 10])


def batches(text, rows, length):
    """Returns an endless Grain iterator over shuffled windows; a process reads only its own rows.

    Grain shuffles and batches the windows' indices, which are the same in all processes.
    """
    mine = zerojax.run.process_slice(rows)
    windows = np.lib.stride_tricks.sliding_window_view(text, length)[:: length // 4]
    numbers = grain.MapDataset.range(len(windows)).shuffle(seed=0).repeat().batch(rows)
    dataset = numbers.map(lambda batch: windows[batch[mine]])
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


# ---- training


def main():
    args = parser.parse_args()
    zerojax.initialize()
    pretrain(args)


def pretrain(args):
    training, validation = read_text()
    model = GPT(args.layers, args.dim, args.tokens)

    def loss_fn(params, text):
        return next_byte_loss(model, params, text)

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros((1, args.tokens), "int32"))["params"]
        schedule = optax.warmup_cosine_decay_schedule(0, args.lr, 20, max(args.steps, 21))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    precision = zerojax.Precision(compute="bfloat16") if args.bf16 else None
    state = zerojax.shard_train_state(make_state, stage=args.stage, precision=precision)
    state = train(args, state, loss_fn, training, validation)
    if args.export:
        zerojax.checkpoint.export_safetensors(args.export, state)
    if args.sample:
        written = write(model, state.params, validation[: args.tokens], args.sample)
        zerojax.run.log(f"The model writes:\n{written}")


def train(args, state, loss_fn, training, validation):
    """Returns the trained state; saves it and the data's position every --save-every steps."""
    step = zerojax.train_step(loss_fn, accumulate=args.accumulate)
    eval_step = zerojax.eval_step(loss_fn)

    def validation_loss(state):
        unseen = batches(validation, args.batch, args.tokens + 1)
        losses = [eval_step(state, zerojax.shard_batch(next(unseen)))["loss"] for _ in range(8)]
        return float(np.mean(losses))

    data = batches(training, args.batch, args.tokens + 1)
    with open_checkpoints(args) as checkpoints:
        start = 0
        if checkpoints and checkpoints.latest():
            state, saved = checkpoints.resume(state)
            data.set_state(saved.data)
            start = saved.step
            zerojax.run.log(f"resuming from step {start}")
        shape = jax.ShapeDtypeStruct((args.batch, args.tokens + 1), "int32")
        flops = zerojax.tools.step_flops(step, state, shape)
        tokens = {"tokens": args.batch * args.tokens}
        meter = zerojax.tools.Meter(args.steps, start=start, per_step=tokens, flops=flops)
        for n in meter:
            if n % args.eval_every == 0:
                meter.log({"validation_loss": validation_loss(state)})
            state, metrics = step(state, zerojax.shard_batch(next(data)))
            meter.update(metrics)
            if checkpoints:
                checkpoints.save(n + 1, state, data=data)
    zerojax.run.log(f"validation loss {validation_loss(state):.3f} nats a byte")
    return state


def open_checkpoints(args):
    if not args.checkpoints:
        return contextlib.nullcontext()
    return zerojax.Checkpoints(args.checkpoints, every=args.save_every)


# ---- generating


def write(model, params, prompt, count, temperature=0.8):
    """Returns the model's continuation of `prompt`, a full window of bytes."""
    params = jax.tree.map(lambda leaf: leaf.addressable_data(0), zerojax.reshard(params))

    def write_byte(window, key):
        logits = model.apply({"params": params}, window[None])[0, -1]
        byte = jax.random.categorical(key, logits / temperature)
        return jnp.append(window[1:], byte), byte

    keys = jax.random.split(jax.random.key(0), count)
    _, written = jax.lax.scan(write_byte, jnp.asarray(prompt), keys)
    text = bytes(np.asarray(written, np.uint8)).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)  # for terminals


if __name__ == "__main__":
    main()
