"""The bytes of the ZeRO paper's Table 1 on each device: XLA's argument bytes of the updates.

`argument_bytes.py < cells.json` reads a list of (parameters, devices, stage), and prints a number
for each. It emulates up to 1024 CPU devices, which takes a fresh process.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"], os.environ["JAX_PLATFORMS"] = "", "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh

import zerojax


def argument_bytes(params, count, stage):
    """Parameters and gradients in bf16; the optimizer state has fp32 copies and both moments."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",), axis_types=(AxisType.Auto,))
    shape = (1024, int(params) // 1024)
    precision = zerojax.Precision(param="bfloat16", master="float32")

    def make_state():
        tree = {"w": jnp.zeros(shape, jnp.bfloat16)}
        tx = zerojax.manual.master_weights(optax.adam(1e-3), "float32")
        return TrainState.create(apply_fn=None, params=tree, tx=tx)

    plan = zerojax.plan(make_state, stage=stage, mesh=mesh, precision=precision)
    state = plan.abstract()
    places = [leaf.update if plan.groups.grads else leaf.rest for leaf in plan.leaves]
    shardings = [place.sharding(plan.mesh) for place in places]
    (where,) = (s for s, leaf in zip(shardings, plan.leaves, strict=True) if leaf.kind == "params")
    grads = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)}
    # Without keep_unused, parameters that an update of masters does not read would vanish.
    update = lambda state, grads: plan.scatter(state).apply_gradients(grads=grads)
    stats = jax.jit(update, keep_unused=True).lower(state, grads).compile().memory_analysis()
    counters = sum(leaf.nbytes for leaf in plan.leaves if not leaf.shape)
    return stats.argument_size_in_bytes - counters


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 1024)
    print(json.dumps([argument_bytes(*cell) for cell in json.load(sys.stdin)]))
