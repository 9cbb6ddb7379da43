"""The loops of nnx and Equinox as programs: they learn, save, and go on at another stage."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SMALL = ["--layers=2", "--dim=32", "--tokens=16", "--batch=16", "--lr=2e-2", "--save-every=10"]


def run(script, *arguments):
    if "equinox" in script:
        pytest.importorskip("equinox", reason="the example needs equinox")
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, f"examples/{script}.py", *map(str, arguments)], cwd=ROOT, timeout=600,
        env={**inherited, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "script", ["nnx_loop", pytest.param("equinox_loop", marks=pytest.mark.slow)]
)
def test_loop_learns_and_goes_on_at_another_stage(script, tmp_path):
    loss_in = lambda said: float(re.search(r"validation loss (\d\.\d+)", said)[1])
    saved = ["--checkpoints", tmp_path]
    first, _ = run(script, *SMALL, *saved, "--steps", 10)
    assert "1 process, 8 devices" in first and "starts anew" in first
    assert re.search(r"up-projections .*\((2, 4, 128|2, 16, 32)\) a device", first)
    more, bar = run(script, *SMALL, *saved, "--steps", 100, "--stage", 1, "--accumulate", 2)
    assert "goes on from step 10" in more
    assert loss_in(first) < 5.4  # ln 256, nothing learned, is 5.5
    assert loss_in(more) < 2.9  # the bytes' frequencies alone give 3.2
    # The loss of one small batch, of another text with each version of Python.
    assert re.search(r"100/100 .*loss=[23]\.\d+, tokens/s=[\d,]+, memory=\d+\.\d MiB", bar)
    assert re.search(r"up-projections .*\((2, 32, 128|2, 128, 32)\) a device", more)


@pytest.mark.parametrize("script", ["nnx_loop", "equinox_loop"])
def test_loop_is_short_and_explains_its_options(script):
    said, _ = run(script, "--help")
    assert said.startswith("usage:") and "--accumulate" in said
    assert len((ROOT / "examples" / f"{script}.py").read_text().splitlines()) < 250
