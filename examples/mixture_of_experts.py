"""Trains a GPT with a mixture of experts, split over one axis of the mesh, and ZeRO over the other.

    python examples/mixture_of_experts.py                         # 8 emulated CPU devices: 4 x 2
    python examples/mixture_of_experts.py --expert 4 --experts 16 # 2 x 4
    python examples/mixture_of_experts.py --ragged

Each token goes to one of several MLPs, which a router chooses (a Switch Transformer). Along
`expert`, a device has some of the experts and some of the sequences, and all-to-alls bring tokens
to their experts and back. ZeRO shards each device's experts, and all other parameters, over `data`.

An expert has room for a fixed number of tokens of each sequence; further tokens skip it. So the
shapes of the all-to-alls, and of the matmuls of each expert, do not depend on the router's choice.

With `--ragged` the experts of a device share its room, so that fewer tokens skip them, and multiply
their seats by `jax.lax.ragged_dot`. With two devices along `expert`, rooms of 2.0 have a seat for
each token. But on GPUs XLA multiplies every seat by every expert of a device. With 8 experts, no
seat to spare and bfloat16, that is 4 times the FLOPs of the batched matmuls with rooms of 2.0,
forward and backward, and 4 times their modelled time.

A second loss keeps the experts equally busy: for each expert, the share of tokens that choose it
times its mean probability. `zerojax.mean` takes both means over the whole batch, as on one device.
A product of means must see the whole batch at once, so there is no `--accumulate`.

With the defaults the validation loss ends below 2.6 nats per byte, on unseen text; a tenth of the
tokens skip their experts.
"""

import functools
import math

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import meshes
import optax
from demo import attention, init_params, norm
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax

parser = meshes.flags(__doc__, "expert", "have different experts")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--experts", type=int, default=8, help="a multiple of --expert")
parser.add_argument("--room", type=float, default=2.0, help="times its equal share of the tokens")
parser.add_argument("--ragged", action="store_true", help="the experts of a device share its room")
parser.add_argument("--balance", type=float, default=0.01, help="weight of the balancing loss")

# Of stacks (layers, experts, in, out).
OVERRIDES = {"blocks/(up|down)": P(None, "expert", "data")}


def init_experts(key, args):
    """Returns the parameters of demo.py with several MLPs in place of one, and routers."""
    keys = jax.random.split(key, args.experts + 1)
    router = 0.02 * jax.random.normal(keys[0], (args.layers, args.dim, args.experts))
    whole = [init_params(key, args.layers, args.dim, args.tokens) for key in keys[1:]]
    mlps = {name: jnp.stack([p["blocks"][name] for p in whole], 1) for name in ("up", "down")}
    return {**whole[0], "blocks": {**whole[0]["blocks"], **mlps, "router": router}}


def over_experts(x, dim):
    """Splits a dimension over `expert`, and leaves the others open. On one device there is no such
    axis."""
    if "expert" not in jax.sharding.get_abstract_mesh().shape:
        return x
    spec = [P.UNCONSTRAINED] * x.ndim
    spec[dim] = "expert"
    return jax.lax.with_sharding_constraint(x, P(*spec))


def exchanged(x, old, new):
    """Splits `x` along another dimension than before, with an all-to-all."""
    return over_experts(over_experts(x, old), new)


def batched(x, p):
    """Applies each expert to its seats, (row, expert, seat)."""
    hidden = jax.nn.gelu(jnp.einsum("resd,edh->resh", x, p["up"]))
    return jnp.einsum("resh,ehd->resd", hidden, p["down"])


def ragged(x, p, which):
    """Applies each device's experts to its seats, (row, device, seat).

    `which` has the expert of each seat; a free seat has the number after the last expert's.
    """
    rows, devices, seats, dim = x.shape
    by_device = lambda x: x.swapaxes(0, 1).reshape(devices, rows * seats, -1)

    def on_one(x, which, up, down):
        order = which.argsort()  # seats in the order of experts, free ones last
        sizes = jax.nn.one_hot(which, len(up), dtype="int32").sum(0)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], up, sizes))
        return jax.lax.ragged_dot(hidden, down, sizes)[order.argsort()]

    seats_of = by_device(x), by_device(which)[..., 0]
    if "expert" in jax.sharding.get_abstract_mesh().shape:
        here = lambda x, which, up, down: on_one(x[0], which[0], up, down)[None]
        by = {"in_specs": P("expert"), "out_specs": P("expert"), "axis_names": {"expert"}}
        y = jax.shard_map(here, **by, check_vma=False)(*seats_of, p["up"], p["down"])
    else:  # one device, with all experts
        split = lambda stack: stack.reshape(devices, -1, *stack.shape[1:])
        y = jax.vmap(on_one)(*seats_of, split(p["up"]), split(p["down"]))
    return y.reshape(devices, rows, seats, dim).swapaxes(0, 1)


def mixture(x, p, room, devices):
    """Applies the experts to `x`, and returns the means over its tokens for the losses too.

    Each expert has a room; with `devices`, each of so many devices has one.
    """
    experts = p["router"].shape[-1]
    probabilities = jax.nn.softmax(x @ p["router"])
    number = probabilities.argmax(-1)
    chosen = jax.nn.one_hot(number, experts)
    local = experts // devices if devices else 1
    rooms = chosen.reshape(*number.shape, -1, local).sum(-1)
    # A token's seat in its room is the number of earlier tokens that chose the room. `seated` has
    # rows, tokens, rooms and seats: 1 where the token sits, 0 everywhere if the room is full.
    seat = (rooms * (rooms.cumsum(1) - 1)).sum(-1).astype("int32")
    seated = rooms[..., None] * jax.nn.one_hot(seat, room)[:, :, None]

    inputs = exchanged(jnp.einsum("rtes,rtd->resd", seated, x), 0, 1)  # tokens go to their experts
    if devices:
        which = local - jnp.einsum("rtes,rt->res", seated, local - number % local)
        outputs = ragged(inputs, p, exchanged(which.astype("int32"), 0, 1))
    else:
        outputs = batched(inputs, p)
    outputs = exchanged(outputs, 1, 0)  # and back
    y = jnp.einsum("rtes,resd->rtd", seated * probabilities.max(-1)[..., None, None], outputs)
    share, probability = chosen.mean((0, 1)), probabilities.mean((0, 1))
    return y, {"share": share, "probability": probability, "seated": seated.sum((2, 3)).mean()}


def loss_fn(params, text, args):
    devices = args.expert if args.ragged else None
    room = math.ceil(args.room * args.tokens / (devices or args.experts))

    def block(x, p):
        x = over_experts(x, 0)
        x = x + attention(norm(x, p["norm1"]), p)
        y, means = mixture(norm(x, p["norm2"]), p, room, devices)
        return x + y, means

    inputs, targets = text[:, :-1], text[:, 1:]
    x = params["embed"][inputs] + params["position"]
    x, means = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
    logits = norm(over_experts(x, 0), params["norm"]) @ params["embed"].T
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    # For each layer and expert, means over this device's tokens become means over all tokens.
    means = jax.tree.map(jnp.vectorize(zerojax.mean), means)
    balance = args.experts * (means["share"] * means["probability"]).sum(-1).mean()
    aux = {"nats": nats, "balance": balance, "seated": means["seated"].mean()}
    return nats + args.balance * balance, aux


def main():
    args = parser.parse_args()
    if args.accumulate != 1:
        parser.error(
            f"--accumulate {args.accumulate}: the balancing loss multiplies two means over the "
            "whole batch, which is not a mean over microbatches. Leave --accumulate out, and take "
            "a smaller --batch if memory is short."
        )
    zerojax.initialize()

    def make_state():
        params = init_experts(jax.random.key(0), args)
        return TrainState.create(apply_fn=None, params=params, tx=meshes.optimizer(args))

    mesh = zerojax.mesh(data=-1, expert=args.expert)
    state = zerojax.shard_train_state(make_state, args.stage, mesh=mesh, overrides=OVERRIDES)
    loss = functools.partial(loss_fn, args=args)
    step, evaluate = zerojax.train_step(loss, accumulate=args.accumulate), zerojax.eval_step(loss)

    meshes.say_layout(state.params["blocks"], "up", "router")
    nats = lambda state, batch: evaluate(state, batch)["aux"]["nats"]
    state = meshes.train(args, step, state, nats, lambda *args: loss(*args)[0])


if __name__ == "__main__":
    main()
