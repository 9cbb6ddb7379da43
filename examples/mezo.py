"""Fine-tunes a GPT without gradients (MeZO): two forward passes a step, in the memory of inference.

    python examples/mezo.py                   # trains a small base first if there is none
    python examples/mezo.py --steps 500 --accumulate 4
    python examples/mezo.py --way lezo        # or sparse, zo2
    python examples/mezo.py --compare         # all four: bytes of each device, and loss

A step moves all parameters along a random direction, forth and back, and takes the difference of
the two losses as the slope. It draws the direction anew from its key each time, shard by shard, and
gets the same numbers on any number of devices. There are no gradients, there is no optimizer, and
nothing waits for backward: the step needs the memory of evaluation.

With the defaults both need 3.6 MiB on each of 8 devices, and training with Adam 14.9. The loss on
unseen code falls from 2.31 to 2.30 nats per byte in 100 steps.

Three relatives differ in the direction, or in how they walk the layers. In brackets are the peak on
each device and the loss after 100 steps, 3.63 MiB and 2.299 for MeZO:

- lezo (LeZO, arXiv 2410.09823): each step moves a random quarter of the layers (3.63, 2.295).
- sparse (Sparse MeZO, 2402.15751): only small weights move, those below the median of their matrix.
  A shard's mask is kept for the step (4.03, 2.295).
- zo2 (ZO2, 2503.12668): parameters stay in host memory, and a layer comes to the devices once a
  step, for both losses and the update of the step before: `zo2.py`. It has MeZO's losses. Each
  device draws the direction of a whole layer, which this model feels (8.23, 2.299). A model of 2.4B
  has 0.65 GiB on an H100 and 9.0 on its host, where MeZO needs 9.6 on the GPU; one of 29B has 6.1
  and 108. To compile these, without a GPU:

    python examples/mezo.py --way zo2 --gpus 1xH100 --layers 48 --dim 2048 --batch 8
    python examples/mezo.py --way zo2 --gpus 1xH100 --layers 64 --dim 6144 --batch 8
"""

import argparse

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import numpy as np
import optax
import train_gpt
import zo2
from finetune_lora import add_base, read_code, train_missing_base
from flax.training.train_state import TrainState

import zerojax

WAYS = ("mezo", "lezo", "sparse", "zo2")
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dim", type=int, default=128, help="a multiple of 32")
parser.add_argument("--tokens", type=int, default=128, help="length of a training sequence")
parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="directions per step")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--eps", type=float, default=1e-3, help="how far a step moves the parameters")
parser.add_argument("--eval-every", type=int, default=50, help="steps")
parser.add_argument("--way", choices=WAYS, default="mezo")
parser.add_argument("--share", type=float, default=0.25, help="of the layers that lezo moves")
parser.add_argument("--compare", action="store_true", help="all methods, by memory and loss")
parser.add_argument("--gpus", help="compile a step for these, such as 1xH100, for its memory")
add_base(parser)

# ---- the direction


def is_stack(path):
    return path[0].key == "blocks"


def drawn(key, leaf, layered):
    """Returns numbers for a leaf; those of each layer come from a key of its own."""
    if not layered:
        return jax.random.normal(key, leaf.shape, leaf.dtype)
    keys = jax.random.split(key, len(leaf))
    return jax.vmap(lambda key: jax.random.normal(key, leaf.shape[1:], leaf.dtype))(keys)


def moved(params, key, by, share=1.0, still=None):
    """Returns the parameters moved along the direction of this key.

    `share` of the layers move, drawn anew for each key. Where `still` is true, a weight stays.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    keys = jax.random.split(key, len(leaves))
    masks = [False] * len(leaves) if still is None else jax.tree.leaves(still)
    results = []
    for (path, leaf), mask, key_of_leaf in zip(leaves, masks, keys, strict=True):
        if is_stack(path) and share < 1:
            chosen = jax.random.permutation(key, len(leaf))[: round(share * len(leaf))]
            along = drawn(key_of_leaf, leaf[chosen], layered=True)
            results.append(leaf.at[chosen].add(by * along))
        else:
            along = drawn(key_of_leaf, leaf, is_stack(path))
            results.append(jnp.where(mask, leaf, leaf + by * along))
    return jax.tree.unflatten(tree, results)


def medians(params):
    """Returns the size below which half of a leaf's weights are, layer by layer."""
    axes = lambda path, leaf: tuple(range(is_stack(path), leaf.ndim))
    of_leaf = lambda path, leaf: jnp.median(abs(leaf), axes(path, leaf), keepdims=True)
    return jax.tree_util.tree_map_with_path(of_leaf, params)


# ---- the step


def mezo_step(loss_fn, plan, lr, eps, directions=1, share=1.0, largest=None):
    """Returns a jitted `(state, batch, key) -> (state, metrics)` for a state {"params": ...}.

    Weights above `largest` stay as they are.
    """
    evaluate = zerojax.eval_step(loss_fn, plan=plan)

    def along(state, key, by, still):
        params = moved(plan.scatter(state)["params"], key, by, share, still)  # without padding
        return plan.constrain({"params": params})

    def step(state, batch, key):
        losses, slopes, still = [], [], None
        if largest is not None:  # a byte for each weight of a shard, as the step moves them
            params = plan.scatter(state)["params"]
            still = jax.tree.map(lambda leaf, most: abs(leaf) > most, params, largest)
        for n in range(directions):
            direction, at = jax.random.fold_in(key, n), []
            for by in (eps, -2 * eps):
                state = along(state, direction, by, still)
                at.append(evaluate(state, batch)["loss"])
                # One after another, because the direction is drawn anew, not kept.
                state, at, direction = jax.lax.optimization_barrier((state, at, direction))
            slopes.append((at[0] - at[1]) / (2 * eps))
            state = along(state, direction, eps - lr / directions * slopes[-1], still)
            losses += at
        return state, {"loss": jnp.mean(jnp.stack(losses)), "slope": jnp.stack(slopes)}

    return jax.jit(step, donate_argnums=0)


# ---- training


def make_params(model):
    return model.init(jax.random.key(0), jnp.zeros((1, model.tokens), "int32"))["params"]


def peak_mib(step, state, batch, *key, plan=None):
    return zerojax.audit(step, state, batch, *key, plan=plan).memory.peak / 2**20


def compare_memory(args, model, loss_fn, plan, mezo, batch):
    """Prints the peak memory of each device for a step of each kind."""

    def with_adam():
        return TrainState.create(apply_fn=None, params=make_params(model), tx=optax.adam(1e-3))

    adam = zerojax.plan(with_adam, stage=args.stage).abstract()
    evaluation = peak_mib(zerojax.eval_step(loss_fn, plan=plan), plan.abstract(), batch)
    training = peak_mib(zerojax.train_step(loss_fn), adam, batch)
    zerojax.run.log(
        f"peak per device: evaluation {evaluation:.2f} MiB, MeZO {mezo:.2f}, Adam {training:.2f}"
    )


def planned(args, model, way, mesh=None):
    offload = zerojax.Offload(params=True, min_bytes=1024) if way == "zo2" else None
    make_state = lambda: {"params": make_params(model)}
    return zerojax.plan(make_state, stage=args.stage, mesh=mesh, offload=offload)


def compiled(args, model, loss_fn):
    """Prints what a step takes on GPUs that need not be here."""
    plan = planned(args, model, args.way, zerojax.aot.mesh(args.gpus))
    step, state = mezo_step(loss_fn, plan, args.lr, args.eps, args.accumulate), plan.abstract()
    if args.way == "zo2":
        step, _ = zo2.steps(model, plan, args.lr, args.eps)
        state |= jax.eval_shape(zo2.begun, {})
    text = jax.ShapeDtypeStruct((args.batch, args.tokens + 1), jnp.int32)
    inputs = zerojax.aot.batch(text, plan), jax.eval_shape(lambda: jax.random.key(0))
    memory = zerojax.audit(step, state, *inputs, plan=plan).memory
    host = memory.on_host + memory.host_temporary
    device, host = memory.peak / 2**20, host / 2**20
    print(f"{args.way}, of each GPU: {device:.1f} MiB on the device, {host:.1f} MiB on the host")


def train(args, model, loss_fn, way):
    """Returns the peak memory in MiB of each device, and the validation loss in the end."""
    training, validation = read_code()
    plan = planned(args, model, way)
    state = {"params": zerojax.checkpoint.import_safetensors(args.base, like=plan)}
    kind = {"share": args.share} if way == "lezo" else {}
    if way == "sparse":
        kind["largest"] = medians(state["params"])
    step = mezo_step(loss_fn, plan, args.lr, args.eps, args.accumulate, **kind)
    abstract, settle = plan.abstract(), lambda state: state
    if way == "zo2":
        step, settle = zo2.steps(model, plan, args.lr, args.eps)
        state, abstract = zo2.begun(state), abstract | jax.eval_shape(zo2.begun, {})
    eval_step = zerojax.eval_step(loss_fn, plan=plan)
    data = train_gpt.batches(training, args.batch, args.tokens + 1)
    batch = zerojax.shard_batch(next(data))
    peak = peak_mib(step, abstract, batch, jax.random.key(0), plan=plan)
    if not args.compare:
        compare_memory(args, model, loss_fn, plan, peak, batch)

    def say(n, state):
        unseen = train_gpt.batches(validation, args.batch, args.tokens + 1)
        params = {"params": state["params"]}
        losses = [eval_step(params, zerojax.shard_batch(next(unseen)))["loss"] for _ in range(4)]
        zerojax.run.log(f"step {n}: validation loss {np.mean(losses):.4f}")
        return np.mean(losses)

    for n in range(args.steps):
        if n % args.eval_every == 0:
            state = settle(state)
            say(n, state)
        key = jax.random.fold_in(jax.random.key(1), n)
        state, _ = step(state, zerojax.shard_batch(next(data)), key)
    return peak, say(args.steps, settle(state))


def main():
    args = parser.parse_args()
    zerojax.initialize()
    model = train_gpt.GPT(args.layers, args.dim, args.tokens)
    loss_fn = lambda params, text: train_gpt.next_byte_loss(model, params, text)
    if args.gpus:
        return compiled(args, model, loss_fn)
    train_missing_base(args)
    for way in WAYS if args.compare else [args.way]:
        peak, loss = train(args, model, loss_fn, way)
        zerojax.run.log(f"{way}: {peak:.2f} MiB per device, validation loss {loss:.4f}")


if __name__ == "__main__":
    main()
