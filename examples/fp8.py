"""Trains a network whose matrix products run in float8, by Flax's fp8 layers or by Qwix.

    python examples/fp8.py                      # Flax: scales from the largest values of 16 steps
    python examples/fp8.py --by qwix            # Qwix: scales from the values of each row
    python examples/fp8.py --by qwix-static     # Qwix: scales from the mean of all steps
    python examples/fp8.py --by float32

**Flax** has a scale and a history of largest values (amax) for each product, in the collection
`_overwrite_with_gradient`: their derivatives are their new values, and depend on no loss. A step
sums derivatives over the devices, so zerojax refuses that collection among parameters. Here

- `overwritten` takes the maximum over the devices in the derivative, on the first device;
- `Fp8State` overwrites the old values. It divides by what the step makes of a gradient of 1, which
  is another number with 6 devices or 3 microbatches;
- the optimizer sets their updates to zero, and makes no moments for them.

`metrics["grad_norm"]` counts these values too; a clip inside of `optimizer` does not. Leave
`accumulate=` out: a new value would be the mean of the maxima of microbatches. Where the number of
devices is a power of two, all numbers are one device's, but for rounding. Elsewhere, the gradients
that Flax rounds to float8 are up to two times smaller than one device's.

**Transformer Engine** runs on GPUs only. Nobody has tried it with zerojax. Its delayed scaling has
the same seam, a collection whose gradients are its new values, by another name: `fp8_metas` in
2025. Without delayed scaling there is no such state.

**Qwix** computes scales where it quantizes. Those of a row are one device's. With `bwd_qtype`, the
gradient of a weight has scales over a device's rows, and another rounding than one device's. Static
scales are means over rows, in `quant_stats`: `mutable=` passes that field to the loss and takes the
mean over the devices. In a step, a device knows only its rows beside the means of earlier steps.

On CPUs, XLA computes float8 products in float32. With the defaults, each reads above 88% of unseen
digits right, after 6 seconds of one CPU core.
"""

import argparse
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from jax import lax
from sklearn.datasets import load_digits

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--by", default="flax", choices=("flax", "qwix", "qwix-static", "float32"))
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--batch", type=int, default=128, help="images per step, over all devices")
parser.add_argument("--lr", type=float, default=3e-3)

OVERWRITE = fp8_ops.OVERWRITE_WITH_GRADIENT
STATS = "quant_stats"


class Reader(nn.Module):
    dim: int
    dot: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Dense(self.dim, dot_general_cls=self.dot)(x))
        return nn.Dense(10)(x)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# ---- Flax


def maxima(values):
    return jax.tree.map(lambda value: lax.pmax(value, "data"), values)


@jax.custom_vjp
def overwritten(fp8):
    """Returns the values. Their derivatives are the maxima over the devices, and 1 for `one`."""
    each = 0 * lax.axis_index("data")  # has `verify` see that each device has a derivative
    return jax.tree.map(lambda value: value + each, fp8)


def backward(_, new):
    is_first = lax.axis_index("data") == 0  # a step sums what the devices return
    new = {"values": maxima(new["values"]), "one": jnp.ones(())}
    return (jax.tree.map(lambda value: value * is_first, new),)


overwritten.defvjp(lambda fp8: (overwritten(fp8), None), backward)


class Fp8State(TrainState):
    def apply_gradients(self, *, grads, **fields):
        new = jax.tree.map(lambda value: value / grads["fp8"]["one"], grads["fp8"])
        state = super().apply_gradients(grads=grads, **fields)
        return state.replace(params={**state.params, "fp8": new})


def by_flax(args, optimizer, x):
    dot = lambda: fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=16)
    model = Reader(args.dim, dot)

    def make_state():
        variables = model.init(jax.random.key(0), x)
        fp8 = {"values": variables[OVERWRITE], "one": jnp.ones(())}
        params = {"weights": variables["params"], "fp8": fp8}
        parts = {"weights": optimizer, "fp8": optax.set_to_zero()}
        tx = optax.partition(parts, {"weights": "weights", "fp8": "fp8"})
        return Fp8State.create(apply_fn=None, params=params, tx=tx)

    def loss_fn(params, batch):
        variables = {"params": params["weights"], OVERWRITE: overwritten(params["fp8"])["values"]}
        return cross_entropy(model.apply(variables, batch["x"]), batch["y"])

    def logits_of(state, x):
        values = state.params["fp8"]["values"]
        return model.apply({"params": state.params["weights"], OVERWRITE: values}, x)

    return make_state, zerojax.train_step(loss_fn), logits_of


# ---- Qwix, and neither


class WithStats(TrainState):
    quant_stats: Any = None


def by_qwix(args, optimizer, x, bwd=None):
    model, static = Reader(args.dim), args.by == "qwix-static"
    if args.by != "float32":
        import qwix  # no other way needs it

        e4m3 = {"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn}
        rule = qwix.QtRule(module_path=".*", act_static_scale=static, bwd_qtype=bwd, **e4m3)
        model = qwix.quantize_model(model, qwix.QtProvider([rule]))

    def make_state():
        variables = model.init(jax.random.key(0), x)
        fields = {"params": variables["params"], STATS: variables.get(STATS, {})}
        return WithStats.create(apply_fn=None, tx=optimizer, **fields)

    def loss_fn(params, batch, quant_stats):
        variables = {"params": params, STATS: quant_stats}
        logits, new = model.apply(variables, batch["x"], mutable=[STATS])
        return cross_entropy(logits, batch["y"]), {STATS: new.get(STATS, {})}

    def logits_of(state, x):
        return model.apply({"params": state.params, STATS: state.quant_stats}, x)

    return make_state, zerojax.train_step(loss_fn, mutable=(STATS,)), logits_of


# ---- training


def main():
    args = parser.parse_args()
    zerojax.initialize()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    make = by_flax if args.by == "flax" else by_qwix
    make_state, step, logits_of = make(args, optax.adam(args.lr), images[:1])
    state, draw = zerojax.shard_train_state(make_state, stage=args.stage), np.random.default_rng(0)
    for _ in range(args.steps):
        rows = draw.integers(1400, size=args.batch)
        state, metrics = step(state, {"x": images[rows], "y": labels[rows]})
    right = logits_of(zerojax.unpad(state), images[1400:]).argmax(1) == labels[1400:]
    zerojax.run.log(f"{args.by}: loss {metrics['loss']:.3f}, {right.mean():.1%} of unseen digits")
    if args.by == "flax":
        largest = zerojax.gather_params(state)["fp8"]["values"]["Dense_0"]
        name = next(iter(largest))
        zerojax.run.log(f"amax of the images: {largest[name]['input_amax_history'].max():.2f}")


if __name__ == "__main__":
    main()
