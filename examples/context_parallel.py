"""Trains a GPT whose sequences are split over one axis of the mesh, with ZeRO over both axes.

    python examples/context_parallel.py                          # 4 x 2 emulated CPU devices
    python examples/context_parallel.py --sequence 4 --stage 1   # 2 x 4

The loss is demo.py's, written for whole sequences on one device. With `sequence=`, each device
along that axis computes its block of every sequence. Most of a GPT treats tokens one by one. For
attention, the devices exchange tokens for heads, or gather keys and values, whichever sends less.
For the labels, which are the inputs shifted by one, each sends one token to its neighbour. At the
end, the program prints what a device receives for all that.

With the defaults the validation loss ends below 2.4 nats per byte, on unseen text.
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import demo
import meshes
from flax.training.train_state import TrainState

import zerojax

parser = meshes.flags(__doc__, "sequence", "share each sequence", tokens=128, batch=16)
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")


def main():
    args = parser.parse_args()
    zerojax.initialize()

    def make_state():
        params = demo.init_params(jax.random.key(0), args.layers, args.dim, args.tokens)
        return TrainState.create(apply_fn=None, params=params, tx=meshes.optimizer(args))

    mesh = zerojax.mesh(data=-1, sequence=args.sequence)
    state = zerojax.shard_train_state(make_state, args.stage, mesh=mesh, sequence="sequence")
    step = zerojax.train_step(demo.loss_fn, accumulate=args.accumulate)
    evaluate = zerojax.eval_step(demo.loss_fn)

    meshes.say_layout(state.params["blocks"], "up")
    loss_of = lambda state, batch: evaluate(state, batch)["loss"]
    meshes.train(args, step, state, loss_of, demo.loss_fn)
    zerojax.run.log(str(step))


if __name__ == "__main__":
    main()
