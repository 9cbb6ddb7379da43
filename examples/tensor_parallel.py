"""Trains a GPT with tensor parallelism over one or two axes of the mesh and ZeRO over another.

    python examples/tensor_parallel.py                       # 8 emulated CPU devices: 4 x 2
    python examples/tensor_parallel.py --tensor 4 --stage 1  # 2 x 4
    python examples/tensor_parallel.py --grid 2x2            # 2 x 2 x 2

As in Megatron, the devices along `tensor` share each matmul: each has some heads of attention and
some hidden features of the MLP, and both end in a sum over `tensor`. The loss is demo.py's, written
for one device. The parameters say which dimension `tensor` splits, and XLA splits the matmuls
accordingly. ZeRO shards another dimension over `data`; its collectives run only over `data`.

The devices along `tensor` have the same layer input. With `activations="tensor"` each keeps a part
of it until backward: the ZeRO paper's P_a. (benchmarks/megatron.py splits the vocabulary too.)

On a grid (Optimus, arXiv 2104.05343) a device has a block of each matrix and a block of each
activation: rows of the batch along `row`, features along `column`. For a matmul it gathers the
others of its row or column. With `--tensor 4` and the other defaults a device sends 15.0 MiB a step
along `tensor` and needs 12.4 MiB (11.4 with P_a); on a grid of 2 x 2 it sends 19.5 and needs 11.0.

With the defaults the validation loss ends below 2.4 nats per byte, on unseen text.
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import demo
import meshes
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax

parser = meshes.flags(__doc__, "tensor", "share each matmul")
parser.add_argument("--grid", help="rows and columns of devices that share each matmul: 2x2")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--whole", action="store_true", help="keep whole layer inputs, without P_a")

# For stacks (layers, in, out). `tensor` splits the outputs of the first matmul of a pair, and the
# inputs of the second. ZeRO shards all other parameters over `data` alone.
ON_A_LINE = {
    "blocks/(qkv|up)": P(None, "data", "tensor"),
    "blocks/(proj|down)": P(None, "tensor", "data"),
}
# On a grid both dimensions of a matrix are split, and ZeRO shards the other parameters only.
ON_A_GRID = {"blocks/(qkv|up|proj|down)": P(None, "row", "column")}


def loss_on_a_grid(params, text):
    """demo.py's loss, with each layer's input in blocks."""
    block_of = lambda x: jax.lax.with_sharding_constraint(x, P("row", None, "column"))

    def block(x, p):
        x, _ = demo.block(block_of(x), p)
        return block_of(x), None

    inputs, targets = text[:, :-1], text[:, 1:]
    x = params["embed"][inputs] + params["position"]
    x, _ = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
    logits = demo.norm(x, params["norm"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main():
    args = parser.parse_args()
    zerojax.initialize()

    def make_state():
        params = demo.init_params(jax.random.key(0), args.layers, args.dim, args.tokens)
        return TrainState.create(apply_fn=None, params=params, tx=meshes.optimizer(args))

    axes, overrides, loss_fn = {"tensor": args.tensor}, ON_A_LINE, demo.loss_fn
    activations = None if args.whole else "tensor"
    if args.grid:
        rows, columns = map(int, args.grid.split("x"))
        axes, overrides, loss_fn = {"row": rows, "column": columns}, ON_A_GRID, loss_on_a_grid
        activations = None  # each device has a block as it is
    mesh = zerojax.mesh(data=-1, **axes)
    state = zerojax.shard_train_state(
        make_state, args.stage, mesh=mesh, axis="data", overrides=overrides
    )
    step = zerojax.train_step(
        loss_fn, accumulate=args.accumulate, schedule=zerojax.Schedule(activations=activations)
    )
    evaluate = zerojax.eval_step(loss_fn)

    meshes.say_layout(state.params["blocks"], "up", "down")
    loss_of = lambda state, batch: evaluate(state, batch)["loss"]
    meshes.train(args, step, state, loss_of, demo.loss_fn)


if __name__ == "__main__":
    main()
