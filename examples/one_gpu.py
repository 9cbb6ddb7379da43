"""Trains a model on one GPU that it does not fit, with its optimizer state in host memory.

    python examples/one_gpu.py                          # without a GPU: what a T4 would hold
    python examples/one_gpu.py --gpu A100 --plot memory # and pictures of its memory
    python examples/one_gpu.py --layers 24 --dim 2048   # one model, not a list of them

The program compiles the training step of a GPT of each size for the GPU twice: with the optimizer
state on the GPU, and with `offload="opt_state"`. Then it trains the largest that fits, or a small
one on a CPU. To compile for a GPU that you do not have, install the packages that it names.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from train_gpt import GPT, batches, next_byte_loss, read_text

import zerojax

jax.config.update("jax_num_cpu_devices", 1)  # train_gpt.py asks for 8

# Layers and dim: 0.2B to 13B. The program stops at the first that does not fit.
SIZES = [(12, 1024), (24, 1536), (24, 2048), (36, 2048), (32, 3072), (32, 4096), (40, 5120)]
SMALL = (2, 64)  # what a CPU trains

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--gpu", help="the GPU to forecast for; default: yours, or a T4")
parser.add_argument("--layers", type=int)
parser.add_argument("--dim", type=int, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=512, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=4, help="sequences per step")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--plot", help="a prefix for pictures of the largest model's memory")


def workload(layers, dim, args):
    """Returns the loss of one size, and the function that makes its state."""
    model = GPT(layers, dim, args.tokens)

    def loss_fn(params, text):
        return next_byte_loss(model, params, text)

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros((1, args.tokens), "int32"))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))

    return loss_fn, make_state


def forecast(size, offload, gpu, args):
    loss_fn, make_state = workload(*size, args)
    batch = jax.ShapeDtypeStruct((args.batch, args.tokens + 1), "int32")
    options = {"gpus": f"1x{gpu}", "stages": 0, "accumulate": args.accumulate}
    return zerojax.forecast(loss_fn, make_state, batch, offload=offload, **options)


def parameters(size, args):
    _, make_state = workload(*size, args)
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(make_state).params))


def largest(sizes, gpu, args):
    """Prints the needs of each size, and returns the largest that fits with host memory."""
    print(f"one {gpu}, GiB at the peak of a step and seconds of a step, modelled\n")
    print("parameters   optimizer state on the GPU     in host memory")
    found = None
    for size in sizes:
        made = [forecast(size, offload, gpu, args) for offload in (None, "opt_state")]
        cases = [each.cases[0] for each in made]
        count = parameters(size, args) / 1e9
        print(f"{count:9.1f}B   {'   '.join(map(described, cases))}", flush=True)
        if not cases[-1].fits:
            break
        found = size, made
    if found is None:
        return None
    size, (before, after) = found
    if args.plot:
        before.plot(f"{args.plot}_before.svg")
        after.plot(f"{args.plot}_after.svg")
    return size


def described(case):
    fits = "fits" if case.fits else "does not"
    return f"{case.peak / 2**30:5.1f} {fits:8s} {case.step_seconds:6.2f} s"


def train(size, offload, args):
    loss_fn, make_state = workload(*size, args)
    state = zerojax.shard_train_state(make_state, stage=0, offload=offload)
    step = zerojax.train_step(loss_fn, accumulate=args.accumulate)
    text, _ = read_text()
    rows = batches(text, args.batch, args.tokens + 1)
    for number in range(args.steps):
        state, metrics = step(state, next(rows))
        if number in (0, args.steps - 1):
            print(f"step {number + 1}: loss {metrics['loss']:.3f}")
    plan = zerojax.plan(make_state, stage=0, offload=offload)
    there = plan.host_bytes_per_device()["opt_state"]
    print(f"{there / 2**20:.1f} MiB of optimizer state in {memory_of(state)} memory")


def memory_of(state):
    """Returns the memory in which the largest array of the optimizer state is."""
    arrays = jax.tree.leaves(state.opt_state)
    return max(arrays, key=lambda x: x.nbytes).sharding.memory_kind


def main():
    args = parser.parse_args()
    here = jax.devices()[0].platform == "gpu"
    gpu = args.gpu or (jax.devices()[0].device_kind if here else "T4")
    if (args.layers is None) != (args.dim is None):
        parser.error("--layers and --dim make one model: pass both")
    sizes = [(args.layers, args.dim)] if args.layers else SIZES
    try:
        fitting = largest(sizes, gpu, args)
    except ModuleNotFoundError as error:
        print(error)
        fitting = None
    except ValueError as error:  # an unknown GPU; --gpu names a similar one
        parser.error(str(error))
    if here:
        train(fitting or sizes[0], "opt_state", args)
    else:
        print(f"there is no GPU here: {SMALL[0]} layers of {SMALL[1]} train on the CPU")
        train(SMALL, zerojax.Offload(min_bytes=0), args)


if __name__ == "__main__":
    main()
