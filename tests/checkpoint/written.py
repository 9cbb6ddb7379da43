"""Writes the checkpoints that every later version of zerojax opens, bit for bit.

    python -m tests.checkpoint.written    # tests/data/written_by_VERSION.tar.xz, once a release

Run it with the oldest JAX and Orbax that the release supports: nobody promises that these read what
later ones wrote. An archive has a directory for each of `CASES`, as zerojax wrote it on four
devices, and beside it the bits of its leaves, without padding, and those that codes stand for. Do
not change what a case makes: give a new release new cases. `test_written.py` opens all archives.
"""

import os
import pathlib
import sys
import tarfile
import tempfile

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import zerojax
import zerojax.nnx
from zerojax.manual import dequantize

DATA = pathlib.Path(__file__).parents[1] / "data"
DEVICES = 4
STEP, RNG = 12, 34  # saved beside the state
EXTRAS = {"data": b"\x00at 12", "metadata": {"run": "a", "shape": (2, [3]), "none": None}}
SHAPES = {"w": (13, 11), "v": (9, 70), "scale": (3,)}  # of which 4 devices divide none


def numbers(*shape):
    """Of full mantissas, the same everywhere."""
    return (np.sin(np.arange(1.0, 1 + np.prod(shape))) / 2).reshape(shape).astype(np.float32)


PARAMS = {name: numbers(*shape) for name, shape in SHAPES.items()}
BATCH = numbers(24, 13)


class Saved(TrainState):
    key: jax.Array = struct.field(default=None)  # type: ignore[assignment]


def make_state():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = jax.tree.map(jnp.asarray, PARAMS)
    return Saved.create(apply_fn=None, params=params, tx=tx, key=jax.random.key(7))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["w"] * params["scale"][0])
    return jnp.mean(hidden**2) + jnp.mean(params["v"] ** 2) + params["scale"].sum()


def make_quantized():
    """Frozen weights in codes, beside adapters that train."""
    params = {"base": numbers(13, 64), "a": numbers(13, 4), "b": numbers(4, 64)}
    codes = zerojax.quantize(jax.tree.map(jnp.asarray, params), where="base")
    frozen = {name: name == "base" for name in params}
    tx = optax.selective_transform(optax.adam(1e-2), freeze_mask=frozen)
    return TrainState.create(apply_fn=None, params=codes, tx=tx)


def adapted(params, batch):
    return jnp.mean((batch @ params["base"] + batch @ params["a"] @ params["b"]) ** 2)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(13, 11, rngs=rngs)
        self.norm = nnx.BatchNorm(11, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(jnp.tanh(self.first(x))))


def nnx_state(mesh, train=False):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, stage=3, mesh=mesh)
    if train:
        step = zerojax.nnx.train_step(lambda model, batch: jnp.mean(model(batch) ** 2))
        step(model, optimizer, BATCH)
    return zerojax.nnx.state(model, optimizer)


def placed(make, loss, **options):
    def state(mesh, train=False):
        made = zerojax.shard_train_state(make, mesh=mesh, **options)
        return zerojax.train_step(loss)(made, BATCH)[0] if train else made

    return state


SEVEN = zerojax.Precision(param="bfloat16", master="split", moments="int8")
GROUPS = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
CASES = {
    "padded": placed(make_state, loss_fn, stage=3),
    "groups": placed(make_state, loss_fn, groups=GROUPS),
    "split": placed(make_state, loss_fn, stage=3, precision=SEVEN),
    "quantized": placed(make_quantized, adapted, stage=3),
    "nnx": nnx_state,
}
DECODED = ("split", "quantized")
IN_A_LOOP = "nnx"  # saved by `Checkpoints`, in a directory of its step


def mesh_of(case, devices=DEVICES):
    """A mesh of so many devices; that of groups has two nodes."""
    found = np.array(jax.devices()[:devices])
    return Mesh(found.reshape(2, -1), ("node", "gpu")) if case == "groups" else Mesh(found, "data")


def bits(state):
    """The bits of a state's leaves by name; of keys, their words."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        raw = array.view(f"u{array.itemsize}") if array.dtype != bool else array
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = raw
    return found


def decoded(folder, case):
    """What a checkpoint in codes means: the same bits could come to mean other numbers."""
    if case == "split":
        return zerojax.unpad(zerojax.restore(folder / case, CASES["padded"](mesh_of(case))))
    return dequantize(zerojax.restore(folder / case, CASES[case](mesh_of(case))).params)


def write(folder):
    """Saves each case and notes its bits."""
    extras = {"rng": jax.random.key(RNG), **EXTRAS}
    for name, make in CASES.items():
        state = make(mesh_of(name), train=True)
        if name == IN_A_LOOP:
            with zerojax.Checkpoints(folder / name, every=1, best="loss") as checkpoints:
                checkpoints.save(STEP, state, metrics={"loss": 0.5}, **extras)
        else:
            zerojax.save(folder / name, state, step=STEP, **extras)
        np.savez(folder / f"{name}.npz", **bits(zerojax.unpad(state)))
    for name in DECODED:
        np.savez(folder / f"{name}_decoded.npz", **bits(decoded(folder, name)))


def anonymous(entry):
    entry.uname = entry.gname = ""
    entry.uid = entry.gid = entry.mtime = 0
    return entry


def main():
    target = DATA / f"written_by_{zerojax.__version__}.tar.xz"
    if target.exists():
        sys.exit(f"{target} exists: what a release has written stays as it is")
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder))
        with tarfile.open(target, "w:xz", preset=9) as archive:  # Orbax writes much twice
            for path in sorted(pathlib.Path(folder).iterdir()):
                archive.add(path, path.name, filter=anonymous)
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
