"""Results of forecasts, studies and choices whose numbers are made up, and compilers for them.

What tests need of private modules to print and to compare results is imported here, and only here.
"""

import contextlib
import dataclasses
import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh

import zerojax
from tests.hlo.modules import gpu_named
from zerojax.tools._forecast.case import Case, Forecast
from zerojax.tools._forecast.choose import Choice, Tried
from zerojax.tools._forecast.forecast import Workload, WorkOptions
from zerojax.tools._forecast.study import Study
from zerojax.tools._forecast.ways import WayToTrain

GIB = 2**30
H100 = gpu_named("H100")
WIDTH = 16


def loss(params, batch):
    return jnp.mean(
        jax.lax.scan(lambda x, w: (x @ w.astype(x.dtype), None), batch, params["w"])[0] ** 2
    )


def make_state(rate=1e-3, width=WIDTH, optimizer=optax.sgd):
    params = {"w": jnp.zeros((3, width, width))}
    return TrainState.create(apply_fn=None, params=params, tx=optimizer(rate))


def batch(rows, width=WIDTH):
    return jax.ShapeDtypeStruct((rows, width), jnp.float32)


# A module of a user's.
MODEL = """
    import jax, jax.numpy as jnp, optax, zerojax
    from flax.training.train_state import TrainState

    def loss(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)

    def state():
        params = {"w": jnp.zeros((256, 256))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    def model():
        return loss, state, jax.ShapeDtypeStruct((64, 256), jnp.float32)

    def six():
        return loss, state, jax.ShapeDtypeStruct((60, 256), jnp.float32)

    def step():
        return zerojax.train_step(loss, accumulate=2), state, model()[2]

    def bare():
        tx = optax.adam(1e-3)
        params = {"w": jnp.zeros((256, 256))}
        made = {"params": params, "opt_state": tx.init(params)}
        return zerojax.train_step(loss, tx=tx), lambda: made, model()[2]

    def untraceable():
        return lambda params, batch: float(batch.sum()), state, jnp.ones((64, 256))

    def failing():
        raise RuntimeError("no data\\nat all")
"""


# -- compilers that need no packages


@contextlib.contextmanager
def cpus_for_gpus():
    """Has CPU devices stand for GPUs that are not there: as many of them, on one host."""

    def mesh(gpus, shape=None, axis_names="data", *, per_host=8):
        count = int(re.match(r"\d+", gpus)[0])
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        devices = np.array(jax.devices()[:count]).reshape(shape or count)
        return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zerojax.aot, "mesh", mesh)
        patch.setattr(zerojax.aot, "_check_packages", lambda: None)
        yield


def compiled_nowhere(monkeypatch, peak=lambda stage, count, rows: rows):
    """Has steps of studies need `peak` GiB, and returns what was compiled: (stage, GPUs, rows of
    each)."""
    seen = []

    def compiled(work, variant, stage, accumulate, order):
        count = work.mesh.size
        rows = work.batch.shape[0] // count
        seen.append((stage, count, rows))
        # Half of the time of one row is the same for many, and more GPUs take a little longer.
        seconds = 0.5 + 0.5 * rows + count / 1000
        costs = {"step_seconds": seconds, "flops": 0.5 * rows * 989e12, "gpus": work.gpus}
        costs |= {"link_bytes": 3, "network_bytes": 4, "parameters": GIB, "optimizer": 2 * GIB}
        return case(stage, peak(stage, count, rows), **costs)

    monkeypatch.setattr(Workload, "case", compiled)
    mesh = lambda gpus, *_, **__: types.SimpleNamespace(size=int(gpus.partition("x")[0]))
    monkeypatch.setattr(zerojax.aot, "mesh", mesh)
    monkeypatch.setattr(zerojax.aot, "_check_packages", lambda: None)
    return seen


def recorded(monkeypatch, name, result):
    """Has a tool return a result, and returns what it is called with: (args, options)."""
    calls = []

    def called(*args, **options):
        calls.append((args, options))
        return result

    return replaced(monkeypatch, name, called) or calls


def replaced(monkeypatch, name, function):
    """Has the command line call another function in the place of `zerojax.<name>` or of tools'."""
    home = zerojax if hasattr(zerojax, name) else zerojax.tools
    function.__signature__ = inspect.signature(getattr(home, name))
    monkeypatch.setattr(home, name, function)


# -- forecasts


def gpu(name="H100", network=None):
    known = gpu_named(name)
    if network is None:
        return known
    return dataclasses.replace(known, given_rates=zerojax.tools.rates_of(name, network=network))


def case(stage, peak, **changed):
    """A case that needs `peak` GiB of an H100."""
    sizes = {"parameters": 20, "optimizer": 5, "gradients": 2, "peak": peak}
    sizes = {use: size * GIB for use, size in sizes.items()} | {"usable": H100.usable}
    times = {"compute_seconds": 0.5, "exposed_seconds": 0.1, "step_seconds": 0.6}
    named = {"gpus": "64xH100", "stage": stage, "variant": "full"}
    return Case(**named | sizes | times | changed)


def forecast(*cases, name="H100", network=None, settings=()):
    return Forecast(f"64x{name}", gpu(name, network), cases, settings)


# -- choices


def tried(seconds, peak=30, **way):
    """A way that was compiled, and takes so long."""
    compiled = case(3, peak, step_seconds=seconds, gpus="8xH100")
    return Tried(WayToTrain("full", **way), seconds, peak * GIB, case=compiled)


def options_of(way, **options):
    """The options of a step that trains in a way."""
    return way.on(WorkOptions(**options))


def untried(**way):
    return Tried(WayToTrain(**way), 0.1, 1)


def changed(one, **fields):
    """A compiled way with other numbers."""
    return dataclasses.replace(one, case=dataclasses.replace(one.case, **fields))


def choice(*ways, network=None, is_nnx=False, **options):
    rates = gpu(network=network).given_rates
    return Choice("8xH100", WorkOptions(rates=rates, per_host=4, **options), ways, is_nnx)


# -- studies


def cell(gpus="64xH100", stage=3, asked=4, model="7.5b", failed="", peak=30, **given):
    """A case of a study: each GPU does 400 TFLOP/s, and a step takes a second."""
    asked_for = {"model": model, "asked": asked, "settings": "remat full"}
    if failed:
        return Case(gpus, stage, failed=failed, **asked_for)
    count = Case(gpus, stage).count
    rows = given.pop("rows", asked)
    numbers = {"examples": rows * count, "tokens": 65536 * rows}
    numbers |= {"flops": given.pop("tflops", 400.0) * 1e12}
    times = {"step_seconds": 1.0, "exposed_seconds": 0.1, "waited_seconds": 0.1}
    sizes = {"parameters": GIB, "optimizer": 2 * GIB, "peak": peak * GIB, "usable": H100.usable}
    return Case(gpus, stage, **asked_for | numbers | times | sizes | given)


def study(*cases):
    return Study(cases)
