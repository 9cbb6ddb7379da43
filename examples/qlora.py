"""QLoRA: trains adapters over a frozen base, which devices store and gather in 4 bits.

    python examples/qlora.py
    python examples/qlora.py --codes int8 --rank 16

A layer is gathered and decoded when it runs. Only adapters have gradients and optimizer
state. The base is drawn at random, and what is learnt is the difference that other adapters make.
`examples/finetune_lora.py` reads a base from files; `import_safetensors` quantizes one too.

With the defaults the loss falls below a third of its first value. This takes 10 seconds of one CPU
core.
"""

import argparse
import collections

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--codes", default="nf4", choices=("nf4", "int4", "int8"))
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 64")
parser.add_argument("--rank", type=int, default=8, help="the rank of the adapters")
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")


def make_params(args, seed, size):
    """Returns the base, and adapters of which the second halves are drawn with this size."""
    n, d = args.layers, args.dim
    shapes = {"up": (n, d, 4 * d), "down": (n, 4 * d, d)}
    params = {"base": {}, "lora": {}}
    for at, (name, (_, rows, columns)) in enumerate(shapes.items()):
        draw = lambda seed, *shape, at=at: jax.random.normal(jax.random.key(seed + at), shape)
        params["base"][name] = draw(0, n, rows, columns) / rows**0.5
        first = draw(seed, n, rows, args.rank) / rows**0.5
        params["lora"][name] = first, size * draw(seed + 10, n, args.rank, columns)
    return params


def forward(params, x):
    """Sees decoded weights."""

    @jax.checkpoint
    def layer(x, p):
        def dense(x, name):
            first, second = p["lora"][name]
            return x @ p["base"][name] + x @ first @ second

        return x + dense(jax.nn.gelu(dense(x, "up")), "down"), None

    return jax.lax.scan(layer, x, params)[0]


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((forward(params, x) - y) ** 2)


def main():
    args = parser.parse_args()
    zerojax.initialize()

    def make_state():
        params = make_params(args, seed=1, size=0)
        mask = {name: jax.tree.map(lambda _, n=name: n == "base", params[name]) for name in params}
        tx = optax.selective_transform(optax.adam(args.lr), freeze_mask=mask)
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        return zerojax.quantize(state, args.codes)  # what the optimizer does not update

    state = zerojax.shard_train_state(make_state, stage=args.stage)
    stored = state.tx.plan.bytes_per_device()["params"] / 2**10
    floats = jax.eval_shape(lambda: make_params(args, 1, 0))
    full = sum(4 * leaf.size for leaf in jax.tree.leaves(floats)) / 2**10
    zerojax.run.log(f"{full:,.0f} KiB of weights in float32 take {stored:,.0f} KiB on each device")

    x = jax.random.normal(jax.random.key(0), (512, args.dim))
    batch = x, forward(make_params(args, seed=50, size=0.1), x)
    step = zerojax.train_step(loss_fn, accumulate=args.accumulate)
    gathered = collections.Counter()
    for sent in zerojax.audit(step, state, batch).traffic:
        if sent.kind == "all-gather":
            gathered[", ".join(sent.dtypes)] += sent.wire_bytes * sent.trips / 2**10
    for dtypes, size in gathered.items():
        zerojax.run.log(f"a step gathers {size:,.0f} KiB of {dtypes}")
    for n in range(1, args.steps + 1):
        state, metrics = step(state, batch)
        if n == 1 or n % 20 == 0 or n == args.steps:
            zerojax.run.log(f"step {n}: loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
