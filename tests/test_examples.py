"""The examples: what they promise in small, in full with `-m slow`; what starts them on hosts."""

import gc
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import zerojax
from tests.processes import free_port

ROOT = pathlib.Path(__file__).parents[1]
ON_TWO_AXES = {  # what each of them sends over the second one
    "mixture_of_experts": {"all-to-all over expert"},
    "tensor_parallel": {"all-reduce over tensor", "all-gather over tensor"},
    "context_parallel": {"all-to-all over sequence"},
    "pipeline": {"collective-permute over pipe"},
}
PROGRAMS = [path for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()]
SCRIPTS = sorted(path for path in PROGRAMS if path.stem not in ON_TWO_AXES)
SMALL = ["--layers", "2", "--dim", "64", "--tokens", "64"]
GPT = ["examples/train_gpt.py", *SMALL, "--lr", "1e-2", "--steps", "40", "--eval-every", "20"]


def run(program, *arguments, code=0, timeout=600, **env):
    """(standard output, standard error) of a program, started as from a user's shell."""
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    python = [sys.executable] if str(program).endswith(".py") else []
    done = subprocess.run(
        [*python, program, *map(str, arguments)], cwd=ROOT, timeout=timeout, check=False,
        env={**inherited, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def figures(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def losses(output):
    """Of validation: those on the way, and the last."""
    return figures(r"validation loss (\d+\.\d+)", output)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_short_and_explain_their_options(script):
    assert len(script.read_text().splitlines()) < 250
    said, _ = run(script, "--help")
    assert said.startswith("usage:") and "--accumulate" in said


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """A short run of train_gpt.py: its directory and what it printed."""
    out = tmp_path_factory.mktemp("gpt")
    saving = ["--checkpoints", out / "saved", "--save-every", 20, "--export", out / "base"]
    return out, *run(*GPT, "--sample", 40, *saving)


def test_gpt_learns_and_writes(gpt):
    _, said, bar = gpt
    start, _, end = losses(said)
    assert start > 5.4 and end < 2.9  # ln 256 is 5.5; the bytes' frequencies alone give 3.2
    written = said.split("The model writes:\n")[1]
    assert len(written) > 30 and " " in written
    assert re.search(r"40/40 .*loss=2\.\d+, tokens/s=[\d,]+, memory=\d+\.\d MiB", bar)


def test_gpt_goes_on_where_it_was(gpt, tmp_path):
    """The data too: the resumed run ends with the same model, to the last byte that it writes."""
    out, said, _ = gpt
    shutil.copytree(out / "saved" / "20", tmp_path / "20")
    again, _ = run(*GPT, "--sample", 40, "--checkpoints", tmp_path, "--save-every", 20)
    assert "goes on from step 20" in again
    assert again.split("validation loss")[-1] == said.split("validation loss")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_convnet", "finetune_lora"])
def test_others_go_on_where_they_were(script, gpt, tmp_path):
    """The data, and what dropout draws: the last batch's loss is the same to three digits."""
    lora = [*SMALL, "--base", gpt[0] / "base", "--sample", 40]
    sizes = {"train_convnet": ["--width", 8, "--batch", 32], "finetune_lora": lora}
    options = [*sizes[script], "--steps", 8, "--eval-every", 4, "--save-every", 4, "--checkpoints"]
    said, bar = run(f"examples/{script}.py", *options, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "4", tmp_path / "half" / "4")
    again, its_bar = run(f"examples/{script}.py", *options, tmp_path / "half")
    assert "goes on from step 4" in again
    assert again.split("validation")[-1] == said.split("validation")[-1]
    assert figures(r"loss=(\d\.\d+)", its_bar)[-1] == figures(r"loss=(\d\.\d+)", bar)[-1]


def stub(directory, name, script):
    """A command of that name, first on the PATH."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (directory / name).chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}", "PYTHON": sys.executable}


@pytest.fixture
def ssh(tmp_path):
    """Runs on this machine what it is to run on a host."""
    return stub(tmp_path / "bin", "ssh", 'exec bash -c "${@: -1}"') | {"PORT": str(free_port())}


@pytest.mark.slow  # a minute
def test_several_processes_train_the_same_gpt_with_no_edit(gpt, ssh):
    """Two of them, 16 devices in all, started as on two hosts."""
    said, _ = run("examples/multihost_ssh.sh", "127.0.0.1 other", *GPT, "--sample", 0, **ssh)
    assert said.startswith("zerojax: 2 processes, 16 devices")
    assert losses(said) == pytest.approx(losses(gpt[1]), abs=2e-3)
    assert said.count("nats a byte") == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", ["nnx_loop", "equinox_loop"])
def test_several_processes_run_the_same_loop(script, ssh):
    """Without dropout, which draws differently for each device."""
    small = ["--layers", "2", "--dim", "32", "--tokens", "16", "--batch", "16", "--dropout", "0"]
    program = [f"examples/{script}.py", *small, "--steps", "5"]
    alone, _ = run(*program)
    said, _ = run("examples/multihost_ssh.sh", "127.0.0.1 other", *program, **ssh)
    assert "zerojax: 2 processes, 16 devices" in said
    assert losses(said) == pytest.approx(losses(alone), abs=2e-3)
    assert said.count("nats a byte") == 1


def test_hosts_port_and_arguments_reach_the_other_shell_as_they_are(ssh, tmp_path):
    program = tmp_path / "a program.py"
    names = ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"]
    values = f"[*map(os.getenv, {names}), *sys.argv[1:]]"
    program.write_text(
        f"import os, sys; os.write(1, str({values}).encode() + b'\\n')"
    )  # in one piece
    hosts, env = "me@$(date);a\n-oB", ssh | {"PORT": "1;exit"}
    said, _ = run("examples/multihost_ssh.sh", hosts, program, "a  b", "$HOME", **env)
    assert said == f"{['$(date);a', '1;exit', '2', 'a  b', '$HOME']}\n" * 2
    _, said = run("examples/multihost_ssh.sh", "", program, code=1, **env)
    assert 'the hosts are missing, as in "host1 host2"' in said


def test_one_host_that_fails_ends_all(ssh, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(30)"
    )
    started = time.monotonic()
    run("examples/multihost_ssh.sh", "127.0.0.1 other", program, code=3, **ssh)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("code", [0, 1, 143])
def test_slurm_requeues_what_was_saved_before_its_end(tmp_path, code):
    env = stub(tmp_path / "bin", "srun", 'shift; exec "$@"')
    stub(tmp_path / "bin", "scontrol", f'echo "$@" > {tmp_path}/asked')
    program = tmp_path / "program.py"
    program.write_text(f"raise SystemExit({code})")
    run("examples/multihost_slurm.sh", program, code=code, SLURM_JOB_ID="17", **env)
    assert (tmp_path / "asked").exists() == (code == 143)
    if code == 143:
        assert (tmp_path / "asked").read_text() == "requeue 17\n"


@pytest.mark.slow
def test_lora_learns_with_the_base_frozen(gpt, tmp_path):
    base, adapters = gpt[0] / "base", tmp_path / "adapters"
    options = ["--steps", 20, "--eval-every", 20, "--sample", 0, "--accumulate", 2]
    said, _ = run(
        "examples/finetune_lora.py", *SMALL, "--base", base, "--export", adapters, *options
    )
    before, after = losses(said)
    assert after < before - 0.1
    trained = 2 * 8 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))  # two layers, of rank 8
    assert f"trains {trained:,} of" in said
    assert figures(r"(\d+) KiB of optimizer", said)[0] == round(8 * trained / 8 / 1024)
    with safe_open(next(adapters.glob("*.safetensors")), framework="np") as file:
        assert len(file.keys()) == 8 and all("lora_" in name for name in file.keys())  # noqa: SIM118


REDUCED = """
import sys
sys.path.insert(0, "examples")
import finetune_lora, jax, numpy as np, zerojax

args = finetune_lora.parser.parse_args(sys.argv[1:])
_, make_state, loss_fn = finetune_lora.with_adapters(args)
plan = zerojax.plan(make_state, stage=args.stage)
text = np.zeros((args.batch, args.tokens + 1), np.int32)
report = zerojax.audit(zerojax.train_step(loss_fn), plan.abstract(), text).check()
for one in report.traffic:
    if one.kind == "reduce-scatter":
        print(*one.paths)
"""


def test_lora_reduces_gradients_of_adapters_alone(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(REDUCED)
    said, _ = run(program, *SMALL)
    assert len(said.split()) == 8 and all("/lora_" in path for path in said.split())


def test_convnet_learns():
    said, _ = run("examples/train_convnet.py", "--width", 16, "--steps", 40, "--stage", 2)
    start, end = figures(r"accuracy (\d+\.\d+)%", said)
    assert start < 30 and end > 85


@pytest.mark.parametrize(
    "script", ["nnx_loop", pytest.param("equinox_loop", marks=pytest.mark.slow)]
)
def test_loop_learns_and_goes_on_at_another_stage(script, tmp_path):
    small = ["--layers=2", "--dim=32", "--tokens=16", "--batch=16", "--lr=2e-2"]
    program = [f"examples/{script}.py", *small, "--save-every=10", "--checkpoints", tmp_path]
    first, _ = run(*program, "--steps", 10)
    assert "1 process, 8 devices" in first and "starts from scratch" in first
    assert re.search(r"up-projections .*\((2, 4, 128|2, 16, 32)\) a device", first)
    more, bar = run(*program, "--steps", 100, "--stage", 1, "--accumulate", 2)
    assert "goes on from step 10" in more
    assert losses(first)[-1] < 5.4  # ln 256, nothing learned, is 5.5
    assert losses(more)[-1] < 2.9  # the bytes' frequencies alone give 3.2
    # The loss of one small batch, of another text with each version of Python.
    assert re.search(r"100/100 .*loss=[23]\.\d+, tokens/s=[\d,]+, memory=\d+\.\d MiB", bar)
    assert re.search(r"up-projections .*\((2, 32, 128|2, 128, 32)\) a device", more)


@pytest.mark.slow
def test_stages_compare_as_zero_says():
    said, _ = run("examples/compare_stages.py", *SMALL, "--steps", 1)
    table = [line.split() for line in said.splitlines() if re.match(r" +[0-3]  ", line)]
    params, optimizer, state, peak = (
        [float(row[column]) for row in table] for column in range(1, 5)
    )
    assert params[0] == params[1] == params[2] == pytest.approx(8 * params[3], rel=0.1)
    assert optimizer[0] == pytest.approx(8 * optimizer[1], rel=0.1)
    assert optimizer[1] == optimizer[2] == optimizer[3]
    assert state[0] == pytest.approx(params[0] + optimizer[0], abs=0.02)
    assert peak[0] > peak[1] > peak[3] > state[3]
    # Two layers' gradients, each in its loop, and those of the rest.
    assert table[0][5:] == ["3", "x,", table[0][7], "-", "-", "1.00", "x"]


def test_the_meter_counts_tokens_and_mfu(monkeypatch):
    """Ten steps, one a second after the first; of 4 FLOP/s that there are, 3 are used."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    meter = importlib.import_module("meter")
    monkeypatch.setattr(zerojax, "peak_flops", lambda: 4.0)
    clock = iter([100.0, 109.0])
    monkeypatch.setattr(meter, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    bar = meter.Meter(12, start=2, unit="tokens", per_step=1000, flops=3.0)
    for n in bar:
        bar.show({"loss": jnp.float32(n)})
    assert bar.bar.postfix.startswith("loss=11.000, tokens/s=1,000, MFU=75.0%, memory=")


def test_the_meter_shows_what_a_device_holds(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    meter = importlib.import_module("meter")
    gc.collect()  # of other tests' arrays
    before = meter.device_bytes()
    batch = zerojax.shard_batch(np.zeros((64, 1024), np.float32))
    assert meter.device_bytes() - before == batch.nbytes // 8


OTHERS = ["tensor_parallel", "context_parallel", "pipeline"]


@pytest.mark.parametrize("script", [
    "mixture_of_experts", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)
])  # fmt: skip
def test_on_two_axes_the_step_is_that_of_one_device(script):
    """They raise where it is not; `make examples` runs all."""
    said, _ = run(f"examples/{script}.py", *SMALL, "--batch", 16, "--steps", 1)
    assert "as on one device" in said
    assert ON_TWO_AXES[script] <= set(re.findall(r"[a-z-]+ over \w+", said))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["tensor_parallel", "pipeline"])
def test_on_two_axes_they_reach_their_stated_loss(script):
    said, _ = run(f"examples/{script}.py", timeout=3600)
    assert losses(said)[-1] < 2.4


@pytest.mark.slow
def test_gpt_reaches_its_stated_loss():
    said, _ = run("examples/train_gpt.py", timeout=3600)
    assert losses(said)[-1] < 1.5


@pytest.mark.slow
def test_convnet_reaches_its_stated_accuracy():
    said, _ = run("examples/train_convnet.py", timeout=3600)
    assert figures(r"accuracy (\d+\.\d+)%", said)[-1] > 98


@pytest.mark.slow
@pytest.mark.parametrize(("script", "stated"), [("nnx_loop", 2.4), ("equinox_loop", 2.3)])
def test_loops_reach_their_stated_losses(script, stated):
    said, _ = run(f"examples/{script}.py", timeout=3600)
    assert losses(said)[-1] < stated


@pytest.mark.slow
def test_lora_trains_its_own_base_and_reaches_its_stated_loss(tmp_path):
    said, _ = run("examples/finetune_lora.py", "--base", tmp_path / "base", timeout=3600)
    before, *_, after = losses(said.split("trains")[1])
    assert before > 2.1 and after < 1.95
