"""Trains a GPT in a pipeline over one axis of the mesh, written by hand, with ZeRO over the other.

    python examples/pipeline.py                              # 8 emulated CPU devices: 4 x 2
    python examples/pipeline.py --pipe 4 --accumulate 8      # 2 x 4

Along `pipe` each device has some of the layers, a stage. Microbatches pass through the stages one
after another, as in GPipe: in each tick a stage runs its layers and hands on the result. M
microbatches and S stages take M + S - 1 ticks, and in S - 1 of them a stage has nothing to do.

All of it is one `jax.shard_map` over both axes, in which a device has its part of the parameters:
ZeRO-3 over `data`. A stage gathers its weights once for all ticks. The derivative of an all-gather
is a reduce-scatter, so backward sums their gradients over `data`, once.

With the defaults the validation loss ends below 2.4 nats per byte, as in tensor_parallel.py, which
takes the same steps.
"""

import functools

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import meshes
import optax
from demo import block, init_params, loss_fn, norm
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax

parser = meshes.flags(__doc__, "pipe", "are the stages of a pipeline", accumulate=4)

OVERRIDES = {"blocks/": P("pipe", "data")}  # stacks: layers over `pipe`, the next dimension by ZeRO


def pipelined_loss(params, text, microbatches):
    """Returns the mean loss on the last stage, and 0 on the others; `params` are one stage's."""
    stages, stage = jax.lax.axis_size("pipe"), jax.lax.axis_index("pipe")
    onward = [(i, i + 1) for i in range(stages - 1)]
    parts = text.reshape(microbatches, -1, text.shape[1])
    inputs, targets = parts[..., :-1], parts[..., 1:]

    def tick(received, now):
        new = jnp.minimum(now, microbatches - 1)  # at the end, the first stage gets nothing new
        first = params["embed"][inputs[new]] + params["position"]
        x = jnp.where(stage == 0, first, received)
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
        return jax.lax.ppermute(x, "pipe", onward), x

    def head():
        logits = norm(outputs, params["norm"]) @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    nothing = jnp.zeros((*inputs.shape[1:], params["norm"].size))
    _, outputs = jax.lax.scan(tick, nothing, jnp.arange(microbatches + stages - 1))
    outputs = outputs[stages - 1 :]  # the last stage gets its first microbatch in this tick
    return jax.lax.cond(stage == stages - 1, head, lambda: 0.0)


def gathered(shard, spec):
    """Returns a stage's whole parameter, from the parts that devices along `data` have."""
    if "data" not in spec:  # it is small
        return shard
    return jax.lax.all_gather(shard, "data", axis=spec.index("data"), tiled=True)


def summed(grad, spec):
    """Returns the sum of a gradient over the devices that share the parameter."""
    shared = tuple(axis for axis in ("data", "pipe") if axis not in spec)
    return jax.lax.psum(grad, shared) if shared else grad


def main():
    args = parser.parse_args()
    zerojax.initialize()

    def make_state():
        params = init_params(jax.random.key(0), args.layers, args.dim, args.tokens)
        return TrainState.create(apply_fn=None, params=params, tx=meshes.optimizer(args))

    mesh = zerojax.mesh(data=-1, pipe=args.pipe)
    plan = zerojax.plan(make_state, stage=3, mesh=mesh, overrides=OVERRIDES, pad=False)
    state = plan.place(make_state)
    specs = jax.tree.map(lambda x: x.sharding.spec, state.params)

    def share(params, text):
        """Returns this device's share of the mean over `data`."""
        params = jax.tree.map(gathered, params, specs)
        return pipelined_loss(params, text, args.accumulate) / plan.size

    def device_gradients(params, text):
        value, grads = jax.value_and_grad(share)(params, text)
        return jax.lax.psum(value, mesh.axis_names), jax.tree.map(summed, grads, specs)

    def device_loss(params, text):
        return jax.lax.psum(share(params, text), mesh.axis_names)

    def on_mesh(function, out_specs):
        return jax.shard_map(
            function, mesh=mesh, in_specs=(specs, P("data")), out_specs=out_specs, check_vma=False
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, text):
        loss, grads = on_mesh(device_gradients, (P(), specs))(state.params, text)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return plan.constrain(state.apply_gradients(grads=grads)), metrics

    @jax.jit
    def evaluate(state, text):
        return on_mesh(device_loss, P())(state.params, text)

    meshes.say_layout(state.params["blocks"], "up")
    meshes.train(args, step, state, evaluate, loss_fn)


if __name__ == "__main__":
    main()
