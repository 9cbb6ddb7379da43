"""Shared by the examples on meshes of two axes: flags, data, the loop, and reports on the step.

They train demo.py's GPT on Python's own manual, as train_gpt.py does.
"""

import argparse
import collections

import jax
import numpy as np
import optax
from demo import sample_batch
from train_gpt import read_text

import zerojax


def flags(doc, axis, meaning, **defaults):
    """Returns a parser of the usual flags, with one for the size of the mesh axis `axis`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(f"--{axis}", type=int, default=2, help=f"devices that {meaning}")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--tokens", type=int, default=64, help="length of a training sequence")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step, in all")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.set_defaults(**defaults)
    return parser


def optimizer(args):
    schedule = optax.warmup_cosine_decay_schedule(0, args.lr, 20, max(args.steps, 21))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))


def train(args, step, state, evaluate, loss_fn, arrange=lambda text: text):
    """Trains for `--steps`, and prints the loss on unseen text before and after.

    `step(state, batch)` returns the new state and metrics, `evaluate(state, batch)` a loss.
    `loss_fn(params, text)` is the loss on one device, with which the function compares the first
    step. `arrange(text)` makes a batch of sequences.
    """

    def batch_of(text):
        batch = arrange(text)
        mine = zerojax.run.process_slice(len(jax.tree.leaves(batch)[0]), like=state)
        return zerojax.shard_batch(jax.tree.map(lambda rows: rows[mine], batch), like=state)

    def say_loss(when):
        rng = np.random.default_rng(0)
        unseen = [sample_batch(validation, rng, args.batch, args.tokens) for _ in range(8)]
        loss = np.mean([float(evaluate(state, batch_of(text))) for text in unseen])
        zerojax.run.log(f"validation loss {loss:.3f} nats a byte {when}")

    training, validation = read_text()
    rng = np.random.default_rng(1)
    text = sample_batch(training, rng, args.batch, args.tokens)
    loss_and_norm = on_one_device(loss_fn, zerojax.gather_params(state), text)
    step = step.lower(state, batch_of(text)).compile()
    say_collectives(zerojax.audit(step, state, accumulate=args.accumulate))
    say_loss("before")
    meter = zerojax.tools.Meter(args.steps, per_step={"tokens": args.batch * args.tokens})
    for n in meter:
        state, metrics = step(state, batch_of(text))
        if n == 0:
            found = [metrics["loss"], metrics["grad_norm"]]
            np.testing.assert_allclose(found, loss_and_norm, rtol=1e-4)
            said = "loss {:.4f}, norm of the gradients {:.4f}, as on one device"
            zerojax.run.log(said.format(*found))
        meter.update(metrics)
        text = sample_batch(training, rng, args.batch, args.tokens)
    say_loss(f"after {args.steps} steps")
    return state


def on_one_device(loss_fn, params, text):
    """Returns the loss of a batch and the norm of its gradients without zerojax."""
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, text)
    return float(loss), float(optax.tree.norm(grads))


def say_layout(params, *names):
    """Prints how the mesh splits some parameters."""
    for name in names:
        array = params[name]
        part = array.addressable_shards[0].data.shape
        zerojax.run.log(f"{name} {array.shape} is split as {array.sharding.spec}, {part} a device")


def say_collectives(report):
    """Prints how much each device sends in a step, by kind of collective and mesh axes."""
    sent, runs = collections.Counter(), collections.Counter()
    for one in report.traffic:
        key = f"{one.kind} over {' x '.join(one.axes or ('?',))}"
        sent[key] += one.total_bytes
        runs[key] += one.trips
    large = [(key, nbytes) for key, nbytes in sent.most_common() if nbytes >= 2**10]
    said = [f"{runs[key]} {key} ({nbytes / 2**10:,.0f} KiB)" for key, nbytes in large]
    zerojax.run.log(f"a step's collectives: {', '.join(said)}")
