"""Memory of 20 models with their optimizers, by stage: the state against the formula, and the peak.

    python benchmarks/memory.py                                  # prints a table
    python benchmarks/memory.py --json benchmarks/memory_8xH100.json

With P parameters of 4 bytes, an optimizer with K bytes for each, and N devices, the formula is
(4 + K) P at stage 0, 4 P + K P / N at stages 1 and 2, and (4 + K) P / N at stage 3. The other
figures come from the compiled step.
"""

import argparse
import itertools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import optax
import results
from flax.training.train_state import TrainState

import zerojax
from zerojax.tools._forecast import presets as _presets

ROWS = 8  # of the batch, per device
WIDTHS = (512, 2048, 2048, 512)


def mlp_params():
    return [{"w": jnp.zeros((a, b)), "b": jnp.zeros(b)} for a, b in itertools.pairwise(WIDTHS)]


def mlp_loss(params, x):
    y = x
    for layer in params:
        y = jnp.tanh(y @ layer["w"] + layer["b"])
    return jnp.mean((y - x) ** 2)


def decoder(model):
    zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), model.shapes())
    return zeros, model.losses(("full",))["full"], model.batch


MODELS = {
    "MLP, 6M": (mlp_params, mlp_loss, lambda rows: jax.ShapeDtypeStruct((rows, 512), jnp.float32)),
    "GPT, 28M": decoder(_presets.Gpt(8, 512, 8, vocab=4096, tokens=256)),
    "GPT of many thin layers, 26M": decoder(_presets.Gpt(32, 256, 4, vocab=4096, tokens=256)),
    "GPT, large vocabulary, 30M": decoder(_presets.Gpt(4, 512, 8, vocab=32768, tokens=256)),
    "Llama, 23M": decoder(
        _presets.Llama(8, 512, 8, vocab=4096, tokens=256, kv_heads=2, inner=1408)
    ),
}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(1e-3),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3),
}


def measure(model, optimizer, mesh):
    make_params, loss, batch_of = MODELS[model]
    make = lambda: TrainState.create(apply_fn=None, params=make_params(), tx=OPTIMIZERS[optimizer])
    state = jax.eval_shape(make)
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    params, own, n = size(state.params), size(state.opt_state), mesh.size
    formula = [params + own, params + own / n, params + own / n, (params + own) / n]
    row = {"model": model, "optimizer": optimizer, "params": params // 4, "stages": []}
    for stage in range(4):
        plan = zerojax.plan(make, stage=stage, mesh=mesh)
        batch = zerojax.aot.batch(batch_of(ROWS * n), plan)
        memory = zerojax.audit(zerojax.train_step(loss), plan.abstract(), batch, plan=plan).memory
        row["stages"].append(
            {
                "formula": round(formula[stage]),
                "state": memory.state,
                "temporary": memory.temporary,
                "peak": memory.peak,
            }
        )
    return row


def shown(row):
    mib = lambda count: f"{count / 2**20:.1f}"
    cells = (
        f"{s['state'] / s['formula']:.3f}, {mib(s['temporary'])}, {mib(s['peak'])}"
        for s in row["stages"]
    )
    return f"{row['model']:30}{row['optimizer']:10}" + "".join(f"{cell:>22}" for cell in cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", default="8xH100")
    parser.add_argument("--json", type=results.file)
    parser.add_argument("--only", type=results.expression, default="", help=results.ONLY)
    args = parser.parse_args()
    mesh = zerojax.aot.mesh(args.gpus)
    pairs = {f"{m}, {o}": (m, o) for m, o in itertools.product(MODELS, OPTIMIZERS)}
    name_of = lambda row: f"{row['model']}, {row['optimizer']}"
    kept = results.Results(args.json, pairs, {"gpus": args.gpus, "jax": jax.__version__}, name_of)
    print(f"state / formula, temporary MiB, peak MiB of {args.gpus}, JAX {jax.__version__}")
    print(f"{'':40}" + "".join(f"{f'stage {stage}':>22}" for stage in range(4)))
    for name in results.chosen(args.only, pairs):
        row = measure(*pairs[name], mesh)
        print(shown(row), flush=True)
        kept.put(name, row)


if __name__ == "__main__":
    main()
