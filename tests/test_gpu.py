"""On a real GPU: `ZEROJAX_TEST_PLATFORM=cuda make test ARGS='-m gpu'`. Skipped without one."""

import functools
import importlib
import json

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import make_mesh
from tests.support.models import gpt_loss, gpt_params
from tests.support.processes import ROOT, output
from tests.support.schedules import scheduled

LOSS = functools.partial(gpt_loss, wrap=jax.checkpoint)
TOKENS = np.random.default_rng(0).integers(0, 1024, (8, 128)).astype(np.int32)


def on_gpu(test):
    missing = jax.default_backend() != "gpu"
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason="needs a real GPU")(test))


def make_state():
    params = gpt_params(layers=4, dim=256, vocab=1024, tokens=128)
    return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-4))


def placed(stage, offload=None):
    mesh = make_mesh(jax.device_count())
    return zerojax.shard_train_state(make_state, stage, mesh=mesh, offload=offload)


@on_gpu
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_step_is_that_of_plain_jax(stage):
    plain = make_state()
    loss, grads = jax.jit(jax.value_and_grad(LOSS))(plain.params, TOKENS)
    updates, _ = jax.jit(plain.tx.update)(grads, plain.opt_state, plain.params)
    state, metrics = zerojax.train_step(LOSS)(placed(stage), TOKENS)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-3)
    moved = jax.tree.map(lambda a, b: a - b, state.params, plain.params)
    for mine, theirs in zip(jax.tree.leaves(moved), jax.tree.leaves(updates), strict=True):
        assert float(abs(mine - theirs).mean()) < 0.05 * float(abs(theirs).mean())


@on_gpu
@pytest.mark.parametrize("activations", [None, "host"])
@pytest.mark.parametrize("params", [False, True])
@jax.default_matmul_precision("highest")  # two programs round TF32 in two ways
def test_what_rests_in_host_memory_gives_the_same_numbers(params, activations):
    def run(offload, **options):
        step, state = zerojax.train_step(LOSS, **scheduled(options)), placed(3, offload)
        # Copies: what `jax.device_get` returns of host memory is that memory, which is donated.
        start = jax.tree.map(np.array, state.params)
        for _ in range(3):
            state, _ = step(state, TOKENS)
        return step, state, start

    _, plain, start = run(None)
    step, state, _ = run(zerojax.Offload(params=params, min_bytes=0), activations=activations)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    zerojax.audit(step, state, TOKENS).check()
    for name, wanted in (("params", plain.params), ("opt_state", plain.opt_state)):
        mine, wanted = jax.device_get((getattr(state, name), wanted))
        before = start if name == "params" else jax.tree.map(np.zeros_like, wanted)
        for a, b, c in zip(*map(jax.tree.leaves, (mine, wanted, before)), strict=True):
            assert abs(a - b).mean() <= 0.01 * abs(b - c).mean()


@on_gpu
def test_the_audit_knows_the_device_and_the_step_is_verified():
    state, step = placed(3), zerojax.train_step(LOSS)
    report = zerojax.audit(step, state, TOKENS).check()
    assert report.backend == "gpu" and report.memory.donated > 0.9 * report.memory.state
    assert zerojax.verify(step, state, TOKENS).ok


# -- its benchmark, where there is no GPU


def benchmark(*options):
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return output(ROOT / "benchmarks" / "gpu.py", *options, **env)[0]


@pytest.mark.ci
def test_the_benchmark_says_that_there_is_no_gpu(tmp_path):
    printed = benchmark("--json", tmp_path / "out.json")
    assert "nothing to measure" in printed and not list(tmp_path.iterdir())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "count", "shown"),
    [
        ((), 6, "the largest that trains (0.00e9 parameters)"),
        (("--host",), 5, "| opt_state, params | "),
        (("--more",), 4, "| 7 bytes a parameter, 0.00e9 parameters | "),
        (("--ways",), 7, "| stage 3, weights travel in int8 | "),
    ],
)
def test_the_benchmark_is_rehearsed_to_its_rows(options, count, shown, tmp_path, monkeypatch):
    """All that a lent GPU will do, by tiny models on CPUs, up to the tables."""
    benchmark("--rehearse", *options, "--json", tmp_path / "gpu_rehearsed.json")
    record = json.loads((tmp_path / "gpu_rehearsed.json").read_text())
    cases = record["cases"]
    assert len(cases) == count and record["device"] == ("2 x CPU" if "--ways" in options else "CPU")
    for case in cases.values():
        assert "step_ms" not in case or (case["step_ms"] > 0 and case["params"] > 1e5)
    if not options:
        assert cases["search"]["layers"] == 5 and 3 <= cases["search"]["expected_layers"] <= 7
        assert cases["tests"]["passed"]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    render = importlib.import_module("render")
    monkeypatch.setattr(render, "HERE", tmp_path)
    assert shown in (render.ways if "--ways" in options else render.gpu)()


@pytest.mark.ci
def test_a_rehearsal_is_not_kept_among_measurements():
    with pytest.raises(AssertionError, match="name another file"):
        benchmark("--rehearse", "--json")
