"""Trains a Flax nnx model on many devices: a byte-level GPT on Python's own manual.

    python examples/nnx_loop.py                            # 8 emulated CPU devices, or your GPUs
    python examples/nnx_loop.py --stage 1 --accumulate 2
    python examples/nnx_loop.py --checkpoints runs/nnx     # run again to resume

Model, optimizer and loss are nnx code for one device. Four numbered lines train them on many, and
replace a jitted step with `nnx.value_and_grad`. Other lines that name zerojax are for checkpoints,
the progress bar, and runs of several processes.
With the defaults the validation loss ends below 2.4 nats per byte, on unseen text.
"""

import argparse
import contextlib

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

from pydoc_data import topics

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax
import zerojax.nnx  # line 1

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

# ---- an ordinary nnx model

HEAD_DIM = 32


class Block(nnx.Module):
    def __init__(self, dim, dropout, rngs):
        self.norms = nnx.List([nnx.RMSNorm(dim, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(dim, 3 * dim, use_bias=False, rngs=rngs)
        self.proj = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        heads = (*x.shape[:2], -1, HEAD_DIM)
        q, k, v = (a.reshape(heads) for a in jnp.split(self.qkv(self.norms[0](x)), 3, -1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + self.dropout(self.proj(attended))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class GPT(nnx.Module):
    def __init__(self, layers, dim, tokens, dropout, *, vocab=256, rngs):
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.positions = nnx.Embed(tokens, dim, rngs=rngs)
        # The weights of all layers, stacked for nnx.scan; each layer has its own random streams.
        make = nnx.split_rngs(splits=layers)(nnx.vmap(lambda rngs: Block(dim, dropout, rngs)))
        self.blocks = make(rngs)
        self.norm = nnx.RMSNorm(dim, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text) + self.positions(jnp.arange(text.shape[1]))
        run = nnx.scan(nnx.remat(Block.__call__), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.embed.attend(self.norm(run(self.blocks, x)))


def loss_fn(model, text):
    logits = model(text[:, :-1])
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

    def make():
        rngs = nnx.Rngs(params=0, dropout=1)
        model = GPT(args.layers, args.dim, args.tokens, args.dropout, rngs=rngs)
        schedule = optax.warmup_cosine_decay_schedule(0, args.lr, 20, max(args.steps, 21))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = zerojax.nnx.shard(make, stage=args.stage)  # line 2: made already sharded
    train_step = zerojax.nnx.train_step(loss_fn, accumulate=args.accumulate)  # line 3
    eval_step = zerojax.nnx.eval_step(loss_fn)

    def validation_loss():
        model.eval()  # no dropout
        unseen = [sample_batch(validation, n, args.batch, args.tokens) for n in range(4)]
        loss = np.mean([float(eval_step(model, optimizer, batch)["loss"]) for batch in unseen])
        model.train()
        return loss

    with open_checkpoints(args) as checkpoints:
        start = resume(checkpoints, model, optimizer) if checkpoints else 0
        shape = jax.ShapeDtypeStruct((args.batch, args.tokens + 1), "int32")
        flops = zerojax.tools.step_flops(*train_step.pure(model, optimizer, shape))
        tokens = {"tokens": args.batch * args.tokens}
        meter = zerojax.tools.Meter(args.steps, start=start, per_step=tokens, flops=flops)
        for n in meter:
            batch = sample_batch(training, n, args.batch, args.tokens)
            metrics = train_step(model, optimizer, batch)  # line 4: returns metrics, not a loss
            meter.update(metrics)
            if checkpoints:
                checkpoints.save(n + 1, zerojax.nnx.state(model, optimizer))
    zerojax.run.log(f"validation loss {validation_loss():.3f} nats a byte after {args.steps} steps")
    kernel = model.blocks.up.kernel
    part = kernel.addressable_shards[0].data.shape
    zerojax.run.log(f"the layers' up-projections are {kernel.shape}, {part} a device")


def open_checkpoints(args):
    if not args.checkpoints:
        return contextlib.nullcontext()
    return zerojax.Checkpoints(args.checkpoints, every=args.save_every)


def resume(checkpoints, model, optimizer):
    """Reads the newest checkpoint into the model and its optimizer; returns the next step."""
    state, saved = checkpoints.resume(zerojax.nnx.state(model, optimizer))
    zerojax.nnx.update(model, optimizer, state)
    start = saved.step or 0
    zerojax.run.log(f"resuming from step {start}" if start else "starts from scratch")
    return start


if __name__ == "__main__":
    main()
