"""Times to plan, trace and compile, by the number of layers and of arrays.

    python benchmarks/scaling.py                                # prints a table
    python benchmarks/scaling.py --json benchmarks/scaling_cpu.json

Stage 3 on 8 emulated devices. CPU times are multiples of the time that `jax.jit` takes to trace or
compile the same loss, gradients and optimizer on one device in the same process; for planning, of
the time for both. With 10,000 arrays nothing compiles, and planning is a multiple of only tracing.
"""

import argparse
import statistics
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import optax
import results
from flax.training.train_state import TrainState

import zerojax

DIM = 64
RUNS = 5
# Arrays. XLA compiles `jax.jit`'s program of 1000 in 6 s and of 2000 in 40 s. With 10,000, its
# program and ours had not ended after 77 minutes.
COMPILED = 1000
# 16 rows a device: XLA:CPU compiles each matmul with fewer rows by itself, in `jax.jit` too.
BATCH = jax.ShapeDtypeStruct((128, DIM), jnp.float32)


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def scanned(layers):
    stack = {"up": jnp.zeros((layers, DIM, DIM)), "down": jnp.zeros((layers, DIM, DIM))}
    return stack, lambda p, x: jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, p)[0] ** 2)


def unrolled(layers):
    def loss(params, x):
        for w in params:
            x, _ = jax.checkpoint(layer)(x, w)
        return jnp.mean(x**2)

    return [{"up": jnp.zeros((DIM, DIM)), "down": jnp.zeros((DIM, DIM))}] * layers, loss


def many_leaves(count):
    """Makes arrays that the loss reads once and cheaply, to leave zerojax's and JAX's own work."""
    loss = lambda p, x: sum(jnp.vdot(w[0], x[0]) for w in p)
    return [jnp.zeros((8, DIM))] * count, loss


CASES = [
    *((scanned, n) for n in (4, 16, 64, 256)),
    *((unrolled, n) for n in (4, 16, 64)),
    *((many_leaves, n) for n in (10, 100, 1000, 10000)),
]


def clock(function):
    """Returns the CPU seconds of all threads of this process, and the result."""
    started = time.process_time()
    result = function()
    return time.process_time() - started, result


def measure(kind, count):
    jax.clear_caches()  # from an earlier run, which help `jax.jit` more
    params, loss = kind(count)
    tx = optax.sgd(1e-3)
    make = lambda: TrainState.create(apply_fn=None, params=params, tx=tx)

    def plain(state, x):
        value, grads = jax.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    jit_traces, plainly = clock(lambda: jax.jit(plain).lower(jax.eval_shape(make), BATCH))
    plans, plan = clock(lambda: zerojax.plan(make, stage=3))
    assert all(leaf.dim is not None for leaf in plan.params), "a replicated array does not scale"
    step, batch = zerojax.train_step(loss), zerojax.aot.batch(BATCH, plan)
    traces, lowered = clock(lambda: step.lower(plan.abstract(), batch))
    ratios = {"trace": traces / jit_traces}
    if count > COMPILED:
        return {"plan": plans / jit_traces, **ratios}
    jit_compiles, _ = clock(plainly.compile)
    compiles, _ = clock(lowered.compile)
    whole = jit_traces + jit_compiles
    return {"plan": plans / whole, **ratios, "compile": compiles / jit_compiles}


def repeated(kind, count):
    """Returns medians of several runs. For the largest cases one is enough, because runs agree."""
    runs = [measure(kind, count) for _ in range(1 if count > 100 else RUNS)]
    return {what: round(statistics.median(run[what] for run in runs), 2) for what in runs[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=results.file)
    parser.add_argument("--most", type=int, default=10000, help="layers or arrays")
    parser.add_argument("--only", type=results.expression, default="", help=results.ONLY)
    args = parser.parse_args()
    cases = {f"{kind.__name__} {count}": (kind, count) for kind, count in CASES}
    made_by = {"device": "8 x cpu", "jax": jax.__version__}
    name_of = lambda row: f"{row['what']} {row['count']}"
    kept = results.Results(args.json, cases, made_by, name_of)
    print(
        f"{'':20}{'plan':>8}{'trace':>8}{'compile':>9}   of what jit takes, JAX {jax.__version__}"
    )
    for name in results.chosen(args.only, cases):
        kind, count = cases[name]
        if count > args.most:
            continue
        row = {"what": kind.__name__, "count": count, **repeated(kind, count)}
        compiles = f"{row['compile']:9.2f}" if "compile" in row else f"{'-':>9}"
        print(f"{name:20}{row['plan']:8.2f}{row['trace']:8.2f}{compiles}", flush=True)
        kept.put(name, row)


if __name__ == "__main__":
    main()
