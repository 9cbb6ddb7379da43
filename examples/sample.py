"""Samples from a byte-level GPT while it trains, in Flax linen or nnx.

    python examples/sample.py                    # 8 emulated CPU devices, or your GPUs
    python examples/sample.py --model nnx
    python examples/sample.py --names            # the tensors that an inference engine would get

Every --sample-every steps, `zerojax.reshard` moves the parameters to where they are used, whole
on each device, in one program. Each device then writes a text of its own, and no byte of it needs
another device; training goes on from the sharded state. Models, losses and text are those of
train_gpt.py and nnx_loop.py.
"""

import argparse

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import nnx_loop
import numpy as np
import optax
import train_gpt
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", choices=("linen", "nnx"), default="linen")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=64, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--sample-every", type=int, default=100, help="steps")
parser.add_argument("--bytes", type=int, default=120, help="of each text")
parser.add_argument("--names", action="store_true", help="print the tensors that leave, at the end")


# ---- two ways to train, and a model to sample from


class Linen:
    def __init__(self, args):
        model = train_gpt.GPT(args.layers, args.dim, args.tokens)

        def make_state():
            params = model.init(jax.random.key(0), jnp.zeros((1, args.tokens), "int32"))["params"]
            return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(args.lr))

        self.state = zerojax.shard_train_state(make_state, stage=args.stage)
        loss = lambda params, text: train_gpt.next_byte_loss(model, params, text)
        self.train_step = zerojax.train_step(loss, accumulate=args.accumulate)
        self.write = jax.jit(writer(lambda p, text: model.apply({"params": p}, text), args.bytes))

    def step(self, text):
        self.state, metrics = self.train_step(self.state, text)
        return metrics

    def sample(self, prompts, key):
        params = zerojax.reshard(self.state)
        return self.write(params, prompts, key)


class Nnx:
    def __init__(self, args):
        def make():
            model = nnx_loop.GPT(args.layers, args.dim, args.tokens, 0.0, rngs=nnx.Rngs(0))
            return model, nnx.Optimizer(model, optax.adamw(args.lr), wrt=nnx.Param)

        self.model, self.optimizer = zerojax.nnx.shard(make, stage=args.stage)
        self.train_step = zerojax.nnx.train_step(nnx_loop.loss_fn, accumulate=args.accumulate)
        # A scan takes no nnx objects from outside of it: its body makes the model of arrays.
        self.write = jax.jit(writer(lambda parts, text: nnx.merge(*parts)(text), args.bytes))

    @property
    def state(self):
        return zerojax.nnx.state(self.model, self.optimizer)

    def step(self, text):
        return self.train_step(self.model, self.optimizer, text)

    def sample(self, prompts, key):
        sampler = zerojax.nnx.merge(self.state, zerojax.reshard(self.state))
        graphdef, variables = nnx.split(sampler)
        return self.write((graphdef, nnx.as_pure(variables)), prompts, key)


def writer(logits_of, count, temperature=0.8):
    """Returns a function that continues each row of `prompts`, a full window, by `count` bytes."""

    def write(model, prompts, key):
        def write_bytes(windows, key):
            logits = logits_of(model, windows)[:, -1]
            new = jax.random.categorical(key, logits / temperature)
            return jnp.append(windows[:, 1:], new[:, None], axis=1), new

        return jax.lax.scan(write_bytes, prompts, jax.random.split(key, count))[1].T

    return write


# ---- training


def main():
    args = parser.parse_args()
    zerojax.initialize()
    training, validation = train_gpt.read_text()
    run = {"linen": Linen, "nnx": Nnx}[args.model](args)
    starts = range(0, jax.device_count() * args.tokens, args.tokens)  # a prompt for each device
    prompts = np.stack([validation[start : start + args.tokens] for start in starts])
    prompts = zerojax.shard_batch(prompts[zerojax.run.process_slice(len(prompts))])
    for n in range(args.steps):
        metrics = run.step(nnx_loop.sample_batch(training, n, args.batch, args.tokens))
        if (n + 1) % args.sample_every == 0:
            written = run.sample(prompts, jax.random.key(n))
            text = shown(written.addressable_data(0)[0])
            zerojax.run.log(f"step {n + 1}: loss {metrics['loss']:.3f}\n  {text}")
    if args.names:
        for name, tensor in zerojax.stream(run.state, names=layer_names(run), dtype="bfloat16"):
            zerojax.run.log(f"{name}: {tensor.dtype}{list(tensor.shape)}")


def layer_names(run):
    """Returns names under which the layers of a stack come one by one."""
    leaves = jax.tree_util.tree_leaves_with_path(run.state.params["blocks"])
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {f"blocks/{path}": f"layers.{{}}.{path}".replace("/", ".") for path in paths}


def shown(written):
    text = bytes(np.asarray(written, np.uint8)).decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text)


if __name__ == "__main__":
    main()
