"""The command line: what scripts can rely on."""

import gc
import json
import math
import os
import subprocess
import sys

import pytest

import zerojax
from tests.forecast import fakes
from tests.support import stored

STEP = str(stored.HERE / "step3-8xH100-jax0.12.hlo")
OK, NOT_OK, BAD_INPUT = 0, 1, 2
SIZE = 256 * 256 * 4  # bytes of the matrix in MODEL
TINY = "layers=2 hidden=32 heads=2 tokens=8 vocab=64"
TINY = [word for field in TINY.split() for word in ("--set", field)]


@pytest.fixture
def mymodel(module):
    return module("mymodel", fakes.MODEL)


@pytest.fixture
def told(run):
    """Runs a command that prints JSON, with CPU devices for GPUs."""

    def told(*command, ends=OK):
        with fakes.cpus_for_gpus():
            code, out, err = run(*command, "--json")
        assert (code, err) == (ends, "")
        return json.loads(out)

    return told


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == OK
    for command in ("forecast", "study", "audit", "launch", "table"):
        assert command in out
        assert run(command, "--help")[0] == OK
    assert f"\n{zerojax.aot._install_command()}\n" in run("forecast", "--help")[1]
    assert run("--version")[:2] == (OK, zerojax.__version__ + "\n")


# -- table


def test_table(run):
    code, out, _ = run("table")
    rows = [line.split() for line in out.splitlines()[2:]]
    assert code == OK and len(rows) == 18
    assert ["7.5B", "64", "120.00", "31.41", "16.64", "1.88"] in rows, "Figure 1"
    twice = ("--stages", "3", "3", "--devices", "64", "64", "--params", "7.5b")
    (row,) = run("table", *twice)[1].splitlines()[2:]
    assert row.split() == ["7.5B", "64", "1.88"]
    others = ("--param-bytes", "4", "--grad-bytes", "4", "--optimizer-bytes", "8")
    (row,) = json.loads(run("table", "--json", "--params", "1e9", "--devices", "8", *others)[1])
    assert row.pop("parameters") == "1B" and row.pop("devices") == 8
    assert row == dict(zip((f"stage {n}, GB" for n in range(4)), (16, 9, 5.5, 2), strict=True))


# -- audit


def test_python_seldom_looks_for_garbage(run):
    gc.set_threshold(2000)
    run("table", "--params", "7.5e9", "--devices", "64")
    assert gc.get_threshold()[0] == 100_000


def test_audit_of_a_stored_program(run, told):
    code, out, err = run("audit", STEP)
    assert (code, err) == (OK, "")
    assert out.startswith("8 devices (gpu)") and "params/layers/w" in out
    report = told("audit", STEP, "--gpu", "H100")
    assert report["findings"] == [] and report["step_seconds"] > 0
    assert sum(t["total_bytes"] for t in report["traffic"]) == report["wire_bytes"]
    alone = ("audit", STEP, "--gpu", "H100", "--per-host", "1", "--network")
    fast, slow = (told(*alone, network)["step_seconds"] for network in ("50", "0.05"))
    assert fast < slow


def test_audit_fails_where_the_contract_or_a_limit_is_broken(run, told):
    code, out, _ = run("audit", STEP, "--max-peak-bytes", "1e3")
    assert code == NOT_OK
    assert "\nbroken: the peak is 1." in out and "above max_peak_bytes=1000 B" in out
    report = told("audit", STEP, "--min-overlap", "0.99", "--gpu", "H100", ends=NOT_OK)
    assert "below min_overlap=0.99" in report["findings"][0]
    code, out, _ = run("audit", str(stored.HERE / "combined-8xH100-jax0.12.hlo"))
    assert code == NOT_OK and out.count("broken: ") == 1
    assert "broken: all-reduce all-reduce.3 sums f32[262656], 1.0 MiB" in out


def test_audit_plots(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    picture = tmp_path / "step.png"
    assert run("audit", STEP, "--gpu", "H100", "--plot", str(picture))[0] == OK
    assert picture.stat().st_size > 5000
    import matplotlib.pyplot as plt

    plt.close("all")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setattr(zerojax, "forecast", lambda *_, **__: pytest.fail("compiled first"))
    missing = "zerojax: plots need matplotlib. Run: pip install matplotlib\n"
    assert run("audit", "124m", "--plot", "x.png") == (BAD_INPUT, "", missing)


PADDED = 258 * 256 * 4 // 6


@pytest.mark.parametrize(
    ("model", "flags", "stage", "parameters", "optimizer", "trips"),
    [
        ("model", "--gpus 2xH100", 3, SIZE // 2, SIZE + 4, 1),
        ("model", "--gpus 2xH100 --master", 3, SIZE // 4, SIZE + SIZE // 2 + 4, 1),
        ("model", "--gpus 8xH100 --per-host 4 --groups params=gpu", 3, SIZE // 8, SIZE // 4 + 4, 1),
        ("six", "--gpus 6xH100", 3, PADDED, 2 * PADDED + 4, 1),
        # A step as it was made: with its microbatches and its optimizer.
        ("step", "--gpus 2xH100 --stage 2", 2, SIZE, SIZE + 4, 2),
        ("bare", "--gpus 2xH100 --stage 3", 3, SIZE // 2, SIZE + 4, 1),
    ],
)
def test_audit_of_a_users_module(model, flags, stage, parameters, optimizer, trips, told, mymodel):
    report = told("audit", f"{mymodel}:{model}", *flags.split())
    memory = report["memory"]
    assert (report["stage"], report["findings"]) == (stage, [])
    assert (memory["parameters"], memory["optimizer"]) == (parameters, optimizer)
    assert max(one["trips"] for one in report["traffic"]) == trips


# -- forecast


def test_forecast_of_a_users_module(told, run, mymodel, monkeypatch):
    six = "forecast", f"{mymodel}:six", "--gpus", "6xH100", "--stages", "3"
    (case,) = told(*six)["cases"]
    assert (case["stage"], case["fits"], case["parameters"]) == (3, True, PADDED)
    assert case["formula"] == 4 * case["parameters"] + 8  # with gradients, moments and counters
    flops = 3 * 2 * 60 * 256 * 256
    assert case["mfu"] == pytest.approx(flops / (case["step_seconds"] * 6 * 989e12))
    nothing = fakes.recorded(monkeypatch, "forecast", fakes.forecast(fakes.case(3, 90)))
    code, out, _ = run(*six)
    assert code == NOT_OK and nothing and "Nothing fits. The least is 90.0 GiB" in out


NAMED = """
    import jax, jax.numpy as jnp, zerojax
    from mymodel import model, state

    def over(name):
        def loss(params, batch):  # as BatchNorm does
            return jnp.mean((batch @ params["w"] - jax.lax.pmean(batch.mean(), name)) ** 2)

        return loss, state, model()[2]

    def one():
        return over("batch")

    def two():
        return over(("host", "card"))
"""


def test_a_loss_names_the_axis_of_the_mesh(run, told, module, mymodel):
    name = module("named", NAMED)
    gpus, axis = ("--gpus", "2xH100"), ("--axis", "batch")
    for command in ("forecast", "audit"):
        with fakes.cpus_for_gpus():
            code, out, err = run(command, f"{name}:one", *gpus)
        assert (code, out) == (BAD_INPUT, "")
        assert "the loss communicates over the axis 'batch'" in err and "pass axis='batch'" in err
    assert told("audit", f"{name}:one", *gpus, *axis)["findings"] == []
    two = f"{name}:two", "--gpus", "8xH100", "--per-host", "4"
    (case,) = told("forecast", *two, "--axis", "host,card", "--groups", "params=card")["cases"]
    assert case["parameters"] == SIZE // 8


PRECISION = zerojax.Precision
NARROW = {"compute": "bfloat16", "param": "bfloat16", "master": "float32"}
SPLIT = NARROW | {"master": "split"}
USUAL = {"gpus": "64xA100", "per_host": 8}
FLAGS = {
    "": USUAL,
    "--per-host 4 --network 12.5 --groups params=gpu,grads=gpu,opt_state=gpu+node --regather gpu "
    "--gather int8 --reduce int4 --no-pad --update backward --stages 1 3 --accumulate 1 4": {
        "per_host": 4,
        "rates": zerojax.tools.rates_of("A100", network=12.5e9),
        "groups": {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")},
        "schedule": zerojax.Schedule(regather="gpu", update="backward"),
        "precision": PRECISION(gather="int8", reduce="int4"),
        "pad": False,
        "stages": [1, 3],
        "accumulate": [1, 4],
    },
    "--per-host 2 --host-link 12 --groups params=,opt_state=gpu --regather false --gather int8 "
    "--master --offload opt_state,params --activations host --tokens 9 --order layers "
    "microbatches": {
        "per_host": 2,
        # each GPU's, whatever the memory of its host
        "rates": zerojax.tools.rates_of("A100", host=12e9, host_memory=math.inf),
        "groups": {"params": (), "opt_state": "gpu"},
        "precision": PRECISION(gather="int8", **NARROW),
        "offload": ("opt_state", "params"),
        "tokens": 9,
        "schedule": [
            zerojax.Schedule(order=order, regather=False, activations="host")
            for order in ("layers", "microbatches")
        ],
    },
    "--sequence 4": {"sequence": 4},
    "--sequence 8,0.2": {"sequence": (8, 0.2)},
    "--mesh data=-1,heads=2,parts=4 --axis data --sequence parts": {
        "mesh": {"data": -1, "heads": 2, "parts": 4},
        "axis": "data",
        "sequence": "parts",
    },
    "--split --moments int8": {"precision": PRECISION(moments="int8", **SPLIT)},
    "--compute bfloat16 --reduce float32 --axis host,card --prefetch 0 --skip-nonfinite "
    "--no-donate --mutable batch_stats": {
        "precision": PRECISION(compute="bfloat16", reduce="float32"),
        "axis": ("host", "card"),
        "schedule": zerojax.Schedule(prefetch=False),
        "skip_nonfinite": True,
        "donate": False,
        "mutable": "batch_stats",
    },
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_of_a_forecast_are_passed_on(flags, run, mymodel, monkeypatch):
    calls = fakes.recorded(monkeypatch, "forecast", fakes.forecast(fakes.case(3, 30)))
    code, _, err = run("forecast", f"{mymodel}:model", "--gpus", "64xA100", *flags.split())
    assert (code, err) == (OK, "")
    ((_, given),) = calls
    assert given == USUAL | FLAGS[flags]


def test_what_is_chosen_is_printed(run, monkeypatch):
    documented = "forecast 124m --gpus 16xH100 --network 12.5 --choose --axis batch"
    for peak, wanted in ((30, OK), (90, NOT_OK)):
        calls = fakes.recorded(monkeypatch, "choose", fakes.choice(fakes.tried(1.5, peak)))
        code, out, err = run(*documented.split(), "--rows", "2")
        assert (code, err) == (wanted, "")
        assert "1 configurations, of 1 microbatch; 1 compiled" in " ".join(out.split())
        assert ("zerojax.train_step(losses" in out) == (wanted == OK)
    (((losses, _, batch, _), given),) = calls
    assert list(losses) == ["none", "dots", "full"] and batch.shape[0] == 32
    assert given["rates"].network == 12.5e9
    assert (given["gpus"], given["axis"]) == ("16xH100", "batch")
    code, _, err = run("forecast", "124m", "--choose", "--stages", "3", "--gather", "int8")
    assert code == BAD_INPUT and "--choose takes no --gather, --stages: it finds" in err


# -- study


def test_a_study_is_printed_and_drawn(run, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    peak = lambda stage, count, rows: 90 - 20 * stage + rows
    compiled = fakes.compiled_nowhere(monkeypatch, peak)
    gpus = ("--gpus", "8xH100", "16xH100", "--stages", "1", "3", "--rows", "2", "largest")
    flags = (*TINY, *gpus, "--remat", "dots", "--plot", "study.png")
    code, out, err = run("study", "124m", *flags)
    assert (code, err) == (OK, "")
    assert "remat dots" in out and "16xH100" in out and "max 40" in out
    assert (tmp_path / "study.png").stat().st_size > 5000
    assert len(compiled) == len(set(compiled)), "each number of rows once"
    code, out, err = run("study", "124m", *flags, "--json")
    assert (code, err, len(json.loads(out)["cases"])) == (OK, "", 8)
    assert run("study", "124m", *TINY, "--gpus", "8xH100", "--stages", "0")[0] == NOT_OK
    import matplotlib.pyplot as plt

    plt.close("all")


STUDIED = """
    import zerojax
    from tests.forecast.fakes import batch, loss, make_state

    def step():
        return zerojax.train_step(loss, accumulate=2), make_state, batch

    def model():
        return loss, make_state, batch

    def keyed():
        return loss, make_state, batch, 1
"""


def test_a_study_of_a_users_module(run, module, monkeypatch):
    compiled = fakes.compiled_nowhere(monkeypatch)
    name = module("mymodel", STUDIED)
    gpus = ("--gpus", "8xH100", "--stages", "3", "--rows", "4")

    def cell(function, *flags):
        code, out, err = run("study", f"{name}:{function}", *gpus, *flags, "--json")
        assert (code, err) == (OK, "")
        return json.loads(out)["cases"][0]

    assert cell("model")["model"] == "mymodel:model" and compiled == [(3, 8, 4)]
    assert cell("step")["settings"] == "accumulate=2"
    assert cell("step", "--accumulate", "4")["settings"] == "accumulate=4"
    code, _, err = run("study", f"{name}:keyed", *gpus)
    assert code == BAD_INPUT and "with a function batch(rows) that returns a global" in err


def test_what_a_study_is_told_is_passed_on(run, monkeypatch):
    calls = fakes.recorded(monkeypatch, "study", fakes.study(fakes.cell()))
    assert run("study", "7.5b", "60b", "--gpus", "64xA100")[0] == OK
    (models,), given = calls.pop()
    assert list(models) == ["7.5b", "60b"] and models["60b"].layers == 132
    assert given == {"per_host": 8, "cache": True, "gpus": ["64xA100"]}
    run("study", "7.5b", "--set", "tokens=4096", "--gpus", "64xH100", "--no-cache")
    (models,), given = calls.pop()
    assert models["7.5b tokens=4096"].tokens == 4096 and not given["cache"]
    monkeypatch.setattr(type(fakes.study()), "plot", lambda self, path: calls.append(path))
    documented = "study 60b --gpus 64xH100 128xH100 400xH100 --stages 3 --plot study.png"
    run(*documented.split())
    path, (_, given) = calls.pop(), calls.pop()
    assert given["gpus"] == ["64xH100", "128xH100", "400xH100"] and given["stages"] == [3]
    assert path == "study.png"


def test_a_study_of_the_largest_model(run, module, monkeypatch):
    calls = fakes.recorded(monkeypatch, "study", fakes.study(fakes.cell(size=37, n_params=8e9)))
    name = module(
        "deep",
        "from tests.forecast.fakes import batch, loss, make_state\n"
        "def model(layers, width=1):\n    return loss, make_state, lambda rows: (layers, width)\n",
    )
    flags = ("--gpus", "2xT4", "--rows", "4", "--set", "layers=largest")
    code, out, err = run("study", "7.5b", f"{name}:model", *flags)
    assert (code, err) == (OK, "") and " 37: 8B " in out and "Best for 7.5b: 37, 8 bill" in out
    (models,), given = calls.pop()
    preset, own = models["7.5b layers"], models["deep:model layers"]
    assert (preset(12).layers, preset(12).hidden, given["rows"]) == (12, 4096, [4])
    assert own(3)[2](1) == (3, 1)
    code, _, err = run("study", "7.5b", *flags, "--set", "hidden=largest")
    assert code == BAD_INPUT and "--set has the largest layers and hidden. Name one" in err
    for command in ("forecast", "audit"):
        code, _, err = run(command, "7.5b", "--gpus", "2xT4", "--set", "layers=largest")
        assert code == BAD_INPUT
        assert "zerojax study 7.5b --gpus 2xT4 --rows 4 --set layers=largest." in err


# -- what GPUs alone have


@pytest.mark.gpu_code
def test_audit_and_forecast_of_several_hosts(run, mymodel, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    hosts = (f"{mymodel}:model", "--gpus", "8xH100", "--per-host", "4", "--json")
    groups = ("--groups", "params=gpu,grads=gpu,opt_state=gpu")
    codes = ("--regather", "gpu", "--gather", "int8", "--reduce", "int8")
    found = []
    for flags in ((), ("--network", "0.05"), groups, codes):
        code, out, err = run("audit", *hosts, "--network", "12.5", *flags)
        assert (code, err) == (OK, "")
        found.append(json.loads(out))
    flat, slow, hsdp, coded = found
    kept = list((tmp_path / "cache").iterdir())
    assert len(kept) == 3, "other links are modelled from the same program"
    assert slow["step_seconds"] > 10 * flat["step_seconds"]
    assert (flat["memory"]["parameters"], hsdp["memory"]["parameters"]) == (SIZE // 8, SIZE // 4)
    assert 0 < hsdp["network_bytes"] < flat["network_bytes"]
    assert 0 < coded["network_bytes"] < 0.5 * flat["network_bytes"]
    code, out, err = run("forecast", *hosts, *codes, "--stages", "3")
    (case,) = json.loads(out)["cases"]
    assert (code, err, case["network_bytes"]) == (OK, "", coded["network_bytes"])


@pytest.mark.gpu_code
@pytest.mark.filterwarnings("ignore:.* miscompiles loops that slice host memory")  # older JAX
def test_state_in_host_memory(run, mymodel):
    gpus = (f"{mymodel}:model", "--gpus", "1xT4", "--json")
    there = ("--offload", "opt_state", "--host-link", "1")
    code, out, err = run("forecast", *gpus, *there, "--stages", "0")
    (case,) = json.loads(out)["cases"]
    assert (code, err, case["optimizer"], case["on_host"]) == (OK, "", 4, 2 * SIZE)
    assert case["waited_seconds"] > 2 * SIZE / 1e9  # both ways, one after the other: no stack
    parts = case["compute_seconds"], case["exposed_seconds"], case["waited_seconds"]
    assert case["step_seconds"] == pytest.approx(sum(parts))
    code, out, err = run("forecast", *gpus, "--offload", "opt_state,params", "--stages", "0")
    (case,) = json.loads(out)["cases"]
    assert (code, err, case["parameters"], case["on_host"]) == (OK, "", 0, 3 * SIZE)
    code, out, err = run("audit", *gpus, "--offload", "opt_state")
    found = json.loads(out)
    assert (code, err, found["findings"]) == (OK, "", [])
    moved = found["memory"]["on_host"], found["bytes_to_device"], found["bytes_to_host"]
    assert moved == (2 * SIZE, 2 * SIZE, 2 * SIZE)


# -- around the commands


def test_as_a_process():
    """python -m zerojax: the exit code, one line and no traceback."""
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "zerojax", "audit", "nosuch.hlo"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == BAD_INPUT and done.stdout == ""
    assert done.stderr.startswith("zerojax: ") and len(done.stderr.splitlines()) == 1
