"""How long planning, tracing and compiling take, by the number of layers and of arrays.

    python benchmarks/scaling.py                                # prints a table
    python benchmarks/scaling.py --json benchmarks/scaling_cpu.json

Stage 3 on 8 emulated devices, CPU time as a multiple of what `jax.jit` takes for the same loss,
gradients and optimizer on one device, in the same process; planning, of both of them together.
"""

import argparse
import datetime
import json
import pathlib
import re
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax

DIM = 64
BATCH = jax.ShapeDtypeStruct((16, DIM), jnp.float32)


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
    """Arrays that are read once and cheaply: what is left is zerojax's and JAX's own work."""
    loss = lambda p, x: sum(jnp.vdot(w[0], x[0]) for w in p)
    return [jnp.zeros((8, DIM))] * count, loss


CASES = [
    *((scanned, n) for n in (4, 16, 64, 256)),
    *((unrolled, n) for n in (4, 16, 64)),
    *((many_leaves, n) for n in (10, 100, 1000, 10000)),
]


def clock(function):
    """CPU seconds of all threads, whatever else the machine does."""
    started = time.process_time()
    result = function()
    return time.process_time() - started, result


def measure(kind, count):
    params, loss = kind(count)
    tx = optax.sgd(1e-3)
    make = lambda: TrainState.create(apply_fn=None, params=params, tx=tx)

    def plain(state, x):
        value, grads = jax.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    seconds = {}
    seconds["jit traces"], lowered = clock(
        lambda: jax.jit(plain).lower(jax.eval_shape(make), BATCH)
    )
    seconds["jit compiles"], _ = clock(lowered.compile)
    seconds["plans"], plan = clock(lambda: zerojax.plan(make, stage=3))
    assert all(leaf.dim is not None for leaf in plan.params), "what is not cut is not scaling"
    step, batch = zerojax.train_step(loss), zerojax.aot.batch(BATCH, plan)
    seconds["traces"], lowered = clock(lambda: step.lower(plan.abstract(), batch))
    seconds["compiles"], _ = clock(lowered.compile)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--most", type=int, default=10000, help="layers or arrays")
    parser.add_argument("--only", default="", help="cases whose name matches this expression")
    args = parser.parse_args()
    rows = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text())["rows"]
    print(
        f"{'':22}{'plan':>8}{'trace':>8}{'compile':>9}   of what jit takes, JAX {jax.__version__}"
    )
    for kind, count in CASES:
        if count > args.most or not re.search(args.only, kind.__name__):
            continue
        took = measure(kind, count)
        whole = took["jit traces"] + took["jit compiles"]
        ratios = {
            "plan": round(took["plans"] / whole, 2),
            "trace": round(took["traces"] / took["jit traces"], 2),
            "compile": round(took["compiles"] / took["jit compiles"], 2),
        }
        which = {"what": kind.__name__, "count": count}
        rows = [row for row in rows if {**row, **which} != row] + [{**which, **ratios}]
        cells = f"{ratios['plan']:8.2f}{ratios['trace']:8.2f}{ratios['compile']:9.2f}"
        print(f"{kind.__name__:14}{count:8}{cells}", flush=True)
        if args.json:
            today = str(datetime.date.today())
            record = {"device": "8 x cpu", "jax": jax.__version__, "date": today, "rows": rows}
            args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
