"""Trains a GPT with a mixture of experts, which stay on the devices of one axis of the mesh.

    python examples/mixture_of_experts.py                         # 8 emulated CPU devices: 4 x 2
    python examples/mixture_of_experts.py --expert 4 --experts 16 # 2 x 4
    python examples/mixture_of_experts.py --seats 2.0

The loss is written for one device with all experts. With `experts=`, each device along that axis
keeps some of them. Each token goes to one of several MLPs, which a router chooses (a Switch
Transformer): zerojax sends tokens to the devices of their experts, and what these return back. At
the end, the program prints what a device receives for that. ZeRO shards each device's experts over
`data`, and all other parameters over both axes.

No token is dropped: sorted by their experts, tokens are rows of `jax.lax.ragged_dot`. With
`--seats`, an expert has so many seats, times its equal share, for the tokens of each sequence, and
further ones skip it.

A second loss keeps the experts equally busy: for each expert, the share of tokens that choose it
times its mean probability. `zerojax.mean` takes both means over the whole batch, as on one device.
A product of means is no mean over microbatches: with `--accumulate`, each microbatch of a device
balances its own.

With the defaults the validation loss ends below 2.4 nats per byte, on unseen text.
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

import zerojax

parser = meshes.flags(__doc__, "expert", "have different experts")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--experts", type=int, default=8, help="no fewer than --expert")
parser.add_argument("--seats", type=float, help="of an expert, times its equal share of the tokens")
parser.add_argument("--balance", type=float, default=0.01, help="weight of the balancing loss")


def init_experts(key, args):
    """Returns the parameters of demo.py with several MLPs in place of one, and routers."""
    keys = jax.random.split(key, args.experts + 1)
    router = 0.02 * jax.random.normal(keys[0], (args.layers, args.dim, args.experts))
    whole = [init_params(key, args.layers, args.dim, args.tokens) for key in keys[1:]]
    mlps = {name: jnp.stack([p["blocks"][name] for p in whole], 1) for name in ("up", "down")}
    return {**whole[0], "blocks": {**whole[0]["blocks"], **mlps, "router": router}}


def dropless(x, p, number):
    """Applies to each token the expert that it chose."""
    rows, number = x.reshape(-1, x.shape[-1]), number.reshape(-1)
    order = number.argsort()
    sizes = jnp.bincount(number, length=p["router"].shape[-1])
    hidden = jax.nn.gelu(jax.lax.ragged_dot(rows[order], p["up"], sizes))
    return jax.lax.ragged_dot(hidden, p["down"], sizes)[order.argsort()].reshape(x.shape)


def seated(x, p, number, seats):
    """Applies to each token the expert that it chose, if that has a seat left, and else returns 0.

    A token's seat is the number of earlier tokens of its sequence that chose the same expert.
    """
    chosen = jax.nn.one_hot(number, p["router"].shape[-1])
    seat = (chosen * (chosen.cumsum(1) - 1)).sum(-1).astype("int32")
    sits = chosen[..., None] * jax.nn.one_hot(seat, seats)[:, :, None]
    inputs = jnp.einsum("rtes,rtd->resd", sits, x)
    hidden = jax.nn.gelu(jnp.einsum("resd,edh->resh", inputs, p["up"]))
    return jnp.einsum("rtes,resd->rtd", sits, jnp.einsum("resh,ehd->resd", hidden, p["down"]))


def mixture(x, p, seats):
    """Applies the experts to `x`, and returns the means over its tokens for the balance, too."""
    probabilities = jax.nn.softmax(x @ p["router"])
    number = probabilities.argmax(-1)
    y = dropless(x, p, number) if seats is None else seated(x, p, number, seats)
    chosen = jax.nn.one_hot(number, p["router"].shape[-1])
    means = {"share": chosen.mean((0, 1)), "probability": probabilities.mean((0, 1))}
    return y * probabilities.max(-1, keepdims=True), means


def loss_fn(params, text, args):
    seats = args.seats and math.ceil(args.seats * args.tokens / args.experts)

    def block(x, p):
        x = x + attention(norm(x, p["norm1"]), p)
        y, means = mixture(norm(x, p["norm2"]), p, seats)
        return x + y, means

    inputs, targets = text[:, :-1], text[:, 1:]
    x = params["embed"][inputs] + params["position"]
    x, means = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
    logits = norm(x, params["norm"]) @ params["embed"].T
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    if args.accumulate == 1:  # means over this device's tokens become means over all tokens
        means = jax.tree.map(jnp.vectorize(zerojax.mean), means)
    balance = args.experts * (means["share"] * means["probability"]).sum(-1).mean()
    return nats + args.balance * balance, {"nats": nats, "balance": balance}


def main():
    args = parser.parse_args()
    zerojax.initialize()

    def make_state():
        params = init_experts(jax.random.key(0), args)
        return TrainState.create(apply_fn=None, params=params, tx=meshes.optimizer(args))

    mesh = zerojax.mesh(data=-1, expert=args.expert)
    experts = {"expert": "blocks/(up|down)"}
    state = zerojax.shard_train_state(make_state, args.stage, mesh=mesh, experts=experts)
    loss = functools.partial(loss_fn, args=args)
    step, evaluate = zerojax.train_step(loss, accumulate=args.accumulate), zerojax.eval_step(loss)

    meshes.say_layout(state.params["blocks"], "up", "router")
    nats = lambda state, batch: evaluate(state, batch)["aux"]["nats"]
    meshes.train(args, step, state, nats, lambda *args: loss(*args)[0])
    zerojax.run.log(str(step))


if __name__ == "__main__":
    main()
