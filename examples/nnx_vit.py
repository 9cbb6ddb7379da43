"""Trains a vision transformer in Flax nnx to read handwritten digits.

    python examples/nnx_vit.py                    # 8 emulated CPU devices, or your GPUs
    python examples/nnx_vit.py --stage 1 --accumulate 2

The model is ordinary nnx for one device; two lines train it on many. The layers are in a Python
loop, each under `nnx.remat`, so a step gathers one layer at a time and runs them as one loop:
`print(step)` says which. Eight devices do not divide the 297 digits of the test, so
`zerojax.pad_batch` fills the batch up, and a mask says which rows are real. At the end the program
shows how a weight is sharded, and checks that the compiled step keeps what its stage promises.

With the defaults the accuracy ends above 95%, on unseen digits, after half a minute of one CPU
core. `precision=zerojax.Precision(compute="bfloat16")` computes in 16 bits. train_vit.py is the
same in Flax linen, with checkpoints and CIFAR-10.
"""

import argparse

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import zerojax
import zerojax.nnx

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=64, help="a multiple of 16")
parser.add_argument("--batch", type=int, default=128, help="images per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
parser.add_argument("--lr", type=float, default=2e-3)

# ---- the model: ordinary nnx


class Block(nnx.Module):
    def __init__(self, dim, rngs):
        self.norms = nnx.List([nnx.LayerNorm(dim, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(dim // 16, dim, decode=False, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.drop(self.attend(self.norms[0](x)))
        return x + self.drop(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class ViT(nnx.Module):
    def __init__(self, layers, dim, rngs):
        self.patches = nnx.Conv(1, dim, (2, 2), strides=2, rngs=rngs)
        self.positions = nnx.Param(0.5 * rngs.params.normal((16, dim)))
        self.blocks = nnx.List([Block(dim, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(dim, rngs=rngs), nnx.Linear(dim, 10, rngs=rngs)

    def __call__(self, images):
        patches = self.patches(images)
        x = patches.reshape(len(images), -1, patches.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x)
        return self.head(self.norm(x).mean(1))


# ---- the loss: a mean over the real rows


def loss_fn(model, batch):
    logits, real = model(batch["image"]), batch["real"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = (logits.argmax(-1) == batch["label"]) & real
    # Aux values are averaged over all rows, also those of the padding: return both shares.
    return zerojax.mean(losses, where=real), {"right": right.mean(), "real": real.mean()}


def main():
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 8 - 1
    shuffled = np.random.default_rng(0).permutation(len(images))

    def batch_of(rows):
        batch, real = zerojax.pad_batch({"image": images[rows], "label": labels[rows]})
        return batch | {"real": real}

    def make():
        model = ViT(args.layers, args.dim, nnx.Rngs(0))
        schedule = optax.warmup_cosine_decay_schedule(0, args.lr, 20, max(args.steps, 21))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = zerojax.nnx.shard(make, stage=args.stage)  # line 1
    step = zerojax.nnx.train_step(loss_fn, accumulate=args.accumulate)  # line 2

    draw = np.random.default_rng(1)
    for n in range(args.steps):
        metrics = step(model, optimizer, batch_of(draw.choice(shuffled[:1500], args.batch)))
        if n % 40 == 39:
            print(n + 1, f"loss {metrics['loss']:.3f}")

    model.eval()  # no dropout
    unseen = batch_of(shuffled[1500:])
    aux = zerojax.nnx.eval_step(loss_fn)(model, optimizer, unseen)["aux"]
    print(f"accuracy {aux['right'] / aux['real']:.1%} of {len(shuffled) - 1500} unseen digits")

    model.train()
    kernel = model.blocks[0].up.kernel
    print(f"{kernel.shape}, {kernel.addressable_shards[0].data.shape} on each device")
    print(step)  # which layers run as one loop
    batch = batch_of(shuffled[: args.batch])
    zerojax.audit(*step.pure(model, optimizer, batch)).check()


if __name__ == "__main__":
    main()
