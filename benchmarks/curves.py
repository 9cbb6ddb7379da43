"""Compares loss curves of a small GPT with quantized wires or state and with exact ones.

python benchmarks/curves.py           # prints the rows, a minute or two each
python benchmarks/curves.py --json    # stores them too

Four emulated devices act as two nodes of two. The data are walks in which two symbols decide which
two may come next, so no model gets below log(2).
"""

import itertools
import pathlib

import figures  # before JAX: it says what JAX may look for
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from flax.training.train_state import TrainState

import zerojax
from zerojax.tools._forecast import presets as _presets

STEPS, EVERY, SEEDS = 2000, 100, (0, 1, 2)
SYMBOLS, SUCCESSORS, TOKENS, ROWS = 32, 2, 32, 16
STORED = pathlib.Path(__file__).parent / "curves.json"
SETTINGS = {
    "exact": {},
    "gather int8": {"gather": "int8"},
    "gather float8_e4m3fn": {"gather": "float8_e4m3fn"},
    "reduce int8": {"reduce": "int8"},
    "reduce int4": {"reduce": "int4"},
    "gather int8, reduce int8": {"gather": "int8", "reduce": "int8"},
    "gather int8, reduce int4": {"gather": "int8", "reduce": "int4"},
    "master float32": {"param": "bfloat16", "master": "float32"},
    "master split": {"param": "bfloat16", "master": "split"},
    "master split, moments int8": {"param": "bfloat16", "master": "split", "moments": "int8"},
}
NAMED = {f"{name}, seed {seed}": (name, seed) for name, seed in itertools.product(SETTINGS, SEEDS)}


class Walks:
    """Yields batches of walks: each pair of symbols has equally many, equally likely successors."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        # The walks are the same for all seeds of the model, which only differ in their start.
        self.next = np.random.default_rng(0).integers(0, SYMBOLS, (SYMBOLS, SYMBOLS, SUCCESSORS))

    def batch(self):
        walks = np.zeros((ROWS, TOKENS), np.int32)
        walks[:, :2] = self.random.integers(0, SYMBOLS, (ROWS, 2))
        for at in range(2, TOKENS):
            choice = self.random.integers(0, SUCCESSORS, ROWS)
            walks[:, at] = self.next[walks[:, at - 2], walks[:, at - 1], choice]
        return walks


def make_state(model, seed):
    key, (leaves, treedef) = jax.random.key(seed), jax.tree.flatten(model.shapes())
    is_norm = lambda shape: len(shape) == 1 or shape == (model.layers, model.hidden)
    values = [
        jnp.ones(leaf.shape)
        if is_norm(leaf.shape)
        else 0.05 * jax.random.normal(jax.random.fold_in(key, i), leaf.shape)
        for i, leaf in enumerate(leaves)
    ]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 100, STEPS)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return TrainState.create(apply_fn=None, params=treedef.unflatten(values), tx=tx)


def measured(setting, seed):
    """Trains once, and returns the losses: means over 100 steps, and that of unseen batches."""
    model = _presets.Gpt(2, 128, 4, vocab=SYMBOLS, tokens=TOKENS, compute=jnp.float32)
    mesh, precision = zerojax.mesh(node=2, gpu=2), zerojax.Precision(**SETTINGS[setting])
    state = zerojax.shard_train_state(
        make_state(model, seed), mesh=mesh, axis=mesh.axis_names, precision=precision
    )
    step, walks, losses = zerojax.train_step(model.loss), Walks(seed + 1), []
    for _ in range(STEPS):
        state, metrics = step(state, walks.batch())
        losses.append(float(metrics["loss"]))
    means = np.mean(np.reshape(losses, (-1, EVERY)), axis=1)
    params, unseen = zerojax.gather_params(state.params), Walks(1000)
    loss = jax.jit(model.loss)
    final = np.mean([float(loss(params, unseen.batch())) for _ in range(20)])
    return {"losses": [round(float(mean), 4) for mean in means], "unseen": round(float(final), 4)}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    versions = figures.versions(("jaxlib", "flax", "optax"))
    results.main(__doc__, STORED, NAMED, versions, lambda row: measured(*row))
