"""Studies that compile nothing: their steps take what a formula says."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.forecast import test_result
from zerojax._hlo import known as _known
from zerojax._study import study as _study
from zerojax._study.cell import Cell, Figures

GIB = 2**30
WIDTH = 16
H100 = _known.GPUS["H100"]


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def make_state(rate=1e-3):
    params = {"w": jnp.zeros((WIDTH, WIDTH))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(rate))


def batch(rows):
    return jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


MINE = {"mine": (loss, make_state, batch)}


def compiled_nowhere(monkeypatch, peak=lambda stage, count, rows: rows):
    """Has steps need `peak` GiB, and returns what was compiled: (stage, GPUs, rows of each)."""
    seen = []

    class Work:
        def __init__(self, make_state, batch, rng, tokens, gpu, planned, options):
            self.batch, self.planned, self.options = batch, planned, options

        def case(self, variant, loss, stage, accumulate, order):
            count = self.planned["mesh"].size
            rows = self.batch.shape[0] // count
            seen.append((stage, count, rows))
            made = test_result.case(stage, peak(stage, count, rows))
            # Half of the time of one row is the same for many, and more GPUs take a little longer.
            seconds = 0.5 + 0.5 * rows + count / 1000
            return dataclasses.replace(made, step_seconds=seconds, mfu=0.5 * rows / seconds)

    monkeypatch.setattr(_study, "Workload", Work)
    mesh = lambda gpus, *_: types.SimpleNamespace(size=_known.parse_count(gpus)[0])
    monkeypatch.setattr(_study, "mesh_of", mesh)
    monkeypatch.setattr(_study.aot, "check_packages", lambda: None)
    return seen


def figures(rows=4, tflops=400.0, peak=30, **changed):
    made = Figures(
        rows=rows, parameters=GIB, optimizer=2 * GIB, peak=peak * GIB, usable=H100.usable,
        step_seconds=1.0, compute_seconds=0.8, exposed_seconds=0.1, waited_seconds=0.1,
        examples_per_second=64.0 * rows, tokens_per_second=65536.0 * rows, tflops=tflops,
        mfu=tflops / 989, wire_bytes=2.0, network_bytes=1.0, compile_seconds=20.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changed)


def cell(gpus="64xH100", stage=3, asked=4, model="7.5b", failed="", **given):
    rows = {} if asked == "largest" else {"rows": asked}
    made = None if failed else figures(**rows | given)
    return Cell(model, gpus, stage, asked, "remat full", "key", made, failed)
