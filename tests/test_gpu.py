"""On a real GPU: `ZEROJAX_TEST_PLATFORM=cuda make test ARGS='-m gpu'`. Skipped without one."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from zerojax._forecast import presets as _presets

ROOT = pathlib.Path(__file__).parents[1]
MODEL = _presets.Gpt(4, 256, 4, vocab=1024, tokens=128)
LOSS = MODEL.losses(("full",))["full"]
has_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a real GPU")


def make_state():
    leaves, treedef = jax.tree.flatten(MODEL.shapes())
    keys = jax.random.split(jax.random.key(0), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    params = treedef.unflatten([0.02 * jax.random.normal(k, s.shape) for k, s in pairs])
    return MODEL.make_state().replace(params=params)


def placed(stage, offload=None):
    mesh = make_mesh(jax.device_count())
    return zerojax.shard_train_state(make_state, stage, mesh=mesh, offload=offload)


def tokens():
    return np.random.default_rng(0).integers(0, 1024, (8, 128)).astype(np.int32)


@pytest.mark.gpu
@has_gpu
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_step_is_that_of_plain_jax(stage):
    tx, plain = optax.adamw(1e-4), make_state()
    loss, grads = jax.jit(jax.value_and_grad(LOSS))(plain.params, tokens())
    updates, _ = jax.jit(tx.update)(grads, plain.opt_state, plain.params)
    state, metrics = zerojax.train_step(LOSS)(placed(stage), tokens())
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-3)
    moved = jax.tree.map(lambda a, b: a - b, state.params, plain.params)
    for mine, theirs in zip(jax.tree.leaves(moved), jax.tree.leaves(updates), strict=True):
        assert float(abs(mine - theirs).mean()) < 0.05 * float(abs(theirs).mean())


@pytest.mark.gpu
@has_gpu
@pytest.mark.parametrize("activations", [None, "host"])
@pytest.mark.parametrize("params", [False, True])
def test_what_rests_in_host_memory_gives_the_same_numbers(params, activations):
    def run(offload, **options):
        step, state = zerojax.train_step(LOSS, **options), placed(3, offload)
        start = jax.device_get(state.params)
        for _ in range(3):
            state, _ = step(state, tokens())
        return step, state, start

    _, plain, start = run(None)
    step, state, _ = run(zerojax.Offload(params=params, min_bytes=0), activations=activations)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    zerojax.audit(step, state, tokens()).check()
    for name, wanted in (("params", plain.params), ("opt_state", plain.opt_state)):
        mine, wanted = jax.device_get((getattr(state, name), wanted))
        before = start if name == "params" else jax.tree.map(np.zeros_like, wanted)
        for a, b, c in zip(*map(jax.tree.leaves, (mine, wanted, before)), strict=True):
            assert abs(a - b).mean() <= 0.01 * abs(b - c).mean()


@pytest.mark.gpu
@has_gpu
def test_the_audit_knows_the_device():
    state = placed(3)
    step = zerojax.train_step(LOSS)
    report = zerojax.audit(step, state, tokens())
    report.check()
    assert report.backend == "gpu" and report.memory.donated > 0.9 * report.memory.state


@pytest.mark.gpu
@has_gpu
def test_verify_on_the_gpu():
    state = placed(3)
    assert zerojax.verify(zerojax.train_step(LOSS), state, tokens()).ok


def run_benchmark(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_benchmark_says_that_there_is_no_gpu(tmp_path):
    said = run_benchmark("--json", str(tmp_path / "out.json"))
    assert "nothing to measure" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["tiny", pytest.param("largest", marks=pytest.mark.slow)])
def test_the_benchmarks_cases_run(case):
    found = json.loads(run_benchmark("--case", case))
    assert found["params"] == 117056 and found["step_ms"] > 0 and found["to_by_hand"] < 5


@pytest.mark.slow
def test_the_benchmarks_cases_with_host_memory_run():
    found = json.loads(run_benchmark("--case", "host: all three"))
    assert found["params"] == 117056 and found["step_ms"] > 0 and "host_gib" in found
    rates = json.loads(run_benchmark("--case", "copies"))
    assert min(rates["to_device"], rates["to_host"], rates["both_at_once"]) > 0
