"""Compiles the programs that tests/hlo counts by hand.

    python tests/programs/make.py

Run it with both ends of the JAX versions: each writes its own files. The compile-only GPU packages
must be there. Shapes are powers of two, so that every number can be followed on paper.
"""

import functools
import os
import pathlib
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import zerojax

HERE = pathlib.Path(__file__).parent
VERSION = "jax" + ".".join(jax.__version__.split(".")[:2])
LAYERS, DIM, ROWS = 4, 256, 64
P = PartitionSpec


def cpu_mesh(shape=(8,), names=("data",)):
    return Mesh(
        np.array(jax.devices()).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)
    )


def struct(shape, mesh, spec, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def sharded(function, mesh, in_specs, out_specs):
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


# -- the programs: each returns a function and the shapes to compile it for


def layers(mesh):
    """A scan that gathers one layer (256, 256) at a time, and one all-reduce of its loss."""

    def run(stack, x):
        def layer(x, shard):
            whole = jax.lax.all_gather(shard, "data", axis=0, tiled=True)
            return jnp.tanh(x @ whole), None

        x, _ = jax.lax.scan(layer, x, stack)
        return jax.lax.psum(jnp.sum(x.astype(jnp.float32)), "data")

    stack = struct((LAYERS, DIM, DIM), mesh, P(None, "data"))
    rows = struct((ROWS * mesh.size, DIM), mesh, P("data"))
    return sharded(run, mesh, (P(None, "data"), P("data")), P()), (stack, rows)


def nested(mesh):
    """Two microbatches; in each, a scan over layers whose gradients are reduce-scattered."""

    def run(stack, x):
        def microbatch(total, rows):
            def layer(_, weights):
                return None, jax.lax.psum_scatter(rows.T @ (rows @ weights), "data", tiled=True)

            return total + jax.lax.scan(layer, None, stack)[1], None

        zeros = jnp.zeros((LAYERS, DIM // mesh.size, DIM), stack.dtype)
        return jax.lax.scan(microbatch, zeros, x)[0]

    stack = struct((LAYERS, DIM, DIM), mesh, P())
    rows = struct((2, ROWS * mesh.size, DIM), mesh, P(None, "data"))
    return sharded(run, mesh, (P(), P(None, "data")), P(None, "data")), (stack, rows)


def combined(mesh):
    """Gradients of two matrices and a vector, all-reduced; XLA joins them in one operation."""

    def run(weights, x):
        def loss(w):
            return jnp.mean((jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]) ** 2)

        return jax.lax.psum(jax.grad(loss)(weights), "data")

    weights = {
        "up": struct((DIM, 2 * DIM), mesh, P(), "float32"),
        "down": struct((2 * DIM, DIM), mesh, P(), "float32"),
        "bias": struct((2 * DIM,), mesh, P(), "float32"),
    }
    rows = struct((ROWS * mesh.size, DIM), mesh, P("data"), "float32")
    return sharded(run, mesh, (P(), P("data")), P()), (weights, rows)


def axes(mesh):
    """A 2 x 4 mesh: gathers along the inner axis, an all-reduce along the outer, both at once."""

    def run(w, x):
        whole = jax.lax.all_gather(w, "model", axis=0, tiled=True)  # groups of 4 neighbours
        grads = x.T @ jnp.tanh(x @ whole)
        grads = jax.lax.psum(grads, "data")  # groups of 2, four apart
        return grads, jax.lax.psum_scatter(grads * 2, ("data", "model"), tiled=True)

    w = struct((DIM, DIM), mesh, P("model"), "float32")
    rows = struct((ROWS, DIM), mesh, P("data"), "float32")
    specs = (P(None, None), P(("data", "model")))
    return sharded(run, mesh, (P("model"), P("data")), specs), (w, rows)


def partitioned(mesh):
    """No collective in the source: XLA's partitioner puts them in, and names groups its own way."""

    def run(w, x):
        return jnp.tanh(x @ w).sum(0)

    w = struct((DIM, DIM), mesh, P("model"), "float32")
    return run, (w, struct((ROWS, DIM), mesh, P("data", "model"), "float32"))


def loss(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w.astype(x.dtype)), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch.astype(jnp.bfloat16), params["layers"]["w"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step(mesh, stage, accumulate=1):
    """A whole training step of zerojax: momentum, LAYERS x (256, 256) in fp32, bf16 compute."""
    import optax
    from flax.training.train_state import TrainState

    def make_state():
        stack = jnp.zeros((LAYERS, DIM, DIM))
        params = {"layers": {"w": stack, "b": jnp.zeros((LAYERS, DIM))}}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1, momentum=0.9))

    plan = zerojax.plan(make_state, stage=stage, mesh=mesh)
    batch = struct((ROWS * mesh.size, DIM), mesh, P("data"), "float32")
    # Without the XLA options that steps choose: loops unrolled twice are long to store and read.
    return zerojax.train_step(loss, accumulate=accumulate)._without_options, (
        plan.abstract(),
        batch,
    )


OLDEST, NEWEST = "jax0.10", "jax0.12"
BY_AXES = functools.partial(cpu_mesh, (2, 4), ("data", "model"))
PROGRAMS = {
    "layers-cpu8": (layers, cpu_mesh, (OLDEST, NEWEST)),
    "layers-8xH100": (layers, "8xH100", (OLDEST, NEWEST)),
    "layers-16xH100": (layers, "16xH100", (NEWEST,)),
    "nested-16xH100": (nested, "16xH100", (OLDEST, NEWEST)),
    "combined-cpu8": (combined, cpu_mesh, (NEWEST,)),
    "combined-8xH100": (combined, "8xH100", (OLDEST, NEWEST)),
    "axes-cpu8": (axes, BY_AXES, (OLDEST, NEWEST)),
    "partitioned-cpu8": (partitioned, BY_AXES, (NEWEST,)),
    "step3-8xH100": (functools.partial(step, stage=3), "8xH100", (NEWEST,)),
    "step2-16xH100": (functools.partial(step, stage=2, accumulate=2), "16xH100", (OLDEST,)),
}


def stripped(text: str) -> str:
    """Without the paths of the machine that compiled it, and what no audit reads."""
    text = re.sub(r'"/[^"]*/site-packages/', '"lib/', text)
    text = re.sub(r'"/[^"]*/((?:zerojax|tests)/[^"]*)"', r'"src/\1"', text)
    text = re.sub(r'"/[^"]*/([^"/]+)"', r'"lib/\1"', text)
    text = re.sub(r' ?scheduling_name="[^"]*"|, control-predecessors=\{[^}]*\}', "", text)
    return "\n".join(map(_short, text.splitlines())) + "\n"


def _short(line: str) -> str:
    if not re.search(r" (parameter|all|reduce-scatter|collective|while)[\w-]*\(", line):
        line = re.sub(r", metadata=\{[^}]*\}", "", line)
    kept = [
        found[0]
        for name in ("known_trip_count", "operation_queue_id", "lhs_contracting_dimensions")
        if (found := re.search(rf'"{name}":(?:"[^"]*"|\[[^\]]*\]|\{{[^}}]*\}})', line))
    ]
    config = ", backend_config={" + ",".join(kept) + "}" if kept else ""
    return re.sub(r", backend_config=\{.*\}", lambda _: config, line)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    for name, (program, where, versions) in PROGRAMS.items():
        if VERSION not in versions or (len(sys.argv) > 1 and sys.argv[1] not in name):
            continue
        mesh = zerojax.aot.mesh(where) if isinstance(where, str) else where()
        function, args = program(mesh)
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        text = stripped(jitted.lower(*args).compile().as_text())
        path = HERE / f"{name}-{VERSION}.hlo"
        path.write_text(text)
        print(path.name, len(text))


if __name__ == "__main__":
    main()
