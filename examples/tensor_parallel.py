"""Trains a GPT with tensor parallelism over one axis of the mesh and ZeRO over the other.

    python examples/tensor_parallel.py                       # 8 emulated CPU devices: 4 x 2
    python examples/tensor_parallel.py --tensor 4 --stage 1  # 2 x 4

As in Megatron, the devices along `tensor` share each matmul: each has some heads of attention and
some hidden features of the MLP, and both end in a sum over `tensor`. The loss is demo.py's, written
for one device. The parameters say which dimension `tensor` splits, and XLA splits the matmuls
accordingly. ZeRO shards another dimension over `data`; its collectives run only over `data`.

The devices along `tensor` have the same layer input. With `activations="tensor"` each keeps a part
of it until backward: the ZeRO paper's P_a. (benchmarks/megatron.py splits the vocabulary too.)

With the defaults the validation loss ends below 2.4 nats per byte, on unseen text.
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import meshes
from demo import init_params, loss_fn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax

parser = meshes.flags(__doc__, "tensor", "share each matmul")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--whole", action="store_true", help="keep whole layer inputs, without P_a")

# For stacks (layers, in, out). `tensor` splits the outputs of the first matmul of a pair, and the
# inputs of the second. ZeRO shards all other parameters.
OVERRIDES = {
    "blocks/(qkv|up)": P(None, "data", "tensor"),
    "blocks/(proj|down)": P(None, "tensor", "data"),
}


def main():
    args = parser.parse_args()
    zerojax.initialize()

    def make_state():
        params = init_params(jax.random.key(0), args.layers, args.dim, args.tokens)
        return TrainState.create(apply_fn=None, params=params, tx=meshes.optimizer(args))

    mesh = zerojax.mesh(data=-1, tensor=args.tensor)
    state = zerojax.shard_train_state(make_state, args.stage, mesh=mesh, overrides=OVERRIDES)
    activations = None if args.whole else "tensor"
    step = zerojax.train_step(loss_fn, accumulate=args.accumulate, activations=activations)
    evaluate = zerojax.eval_step(loss_fn)

    meshes.say_layout(state.params["blocks"], "up", "down")
    loss_of = lambda state, batch: evaluate(state, batch)["loss"]
    meshes.train(args, step, state, loss_of, loss_fn)


if __name__ == "__main__":
    main()
