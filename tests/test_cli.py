"""The command line: what scripts can rely on."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest

import zerojax
from tests import stored
from tests.choose import test_choice
from tests.study import fakes
from zerojax import __main__ as cli
from zerojax._forecast import presets

STEP = str(stored.HERE / "step3-8xH100-jax0.12.hlo")
OK, NOT_OK, BAD_INPUT = 0, 1, 2


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == OK
    for command in ("forecast", "study", "audit", "doctor", "table"):
        assert command in out
        assert run(command, "--help")[0] == OK
    assert f"\n{zerojax.aot.install_command()}\n" in run("forecast", "--help")[1]
    assert run("--version")[:2] == (OK, zerojax.__version__ + "\n")


# -- table


def test_table_prints_the_papers(run):
    code, out, _ = run("table")
    assert code == OK
    rows = [line.split() for line in out.splitlines()[2:]]
    assert len(rows) == 18
    assert ["7.5B", "64", "120.00", "31.41", "16.64", "1.88"] in rows, "Figure 1"


def test_table_as_json(run):
    code, out, _ = run("table", "--json", "--params", "1e9", "--devices", "2", "8")
    rows = json.loads(out)
    assert code == OK and len(rows) == 8
    assert set(rows[0]) == {"params", "devices", "stage", "bytes_per_device"}
    assert rows[3] == {"params": 1e9, "devices": 2, "stage": 3, "bytes_per_device": 8e9}


def test_table_of_other_bytes(run):
    arguments = ("--param-bytes", "4", "--grad-bytes", "4", "--optimizer-bytes", "8")
    _, out, _ = run("table", "--json", "--params", "1e9", "--devices", "8", *arguments)
    assert [row["bytes_per_device"] / 1e9 for row in json.loads(out)] == [16, 9, 5.5, 2]


# -- audit


def test_audit_of_a_stored_program(run):
    code, out, err = run("audit", STEP)
    assert (code, err) == (OK, "")
    assert out.startswith("8 devices (gpu)") and "params/layers/w" in out
    code, out, _ = run("audit", STEP, "--gpu", "H100", "--json")
    found = json.loads(out)
    assert code == OK and found["findings"] == []
    assert found["step_seconds"] > 0
    assert sum(t["total_bytes"] for t in found["traffic"]) == found["wire_bytes"]


def test_audit_of_a_stored_program_on_other_links(run):
    def seconds(*links):
        code, out, _ = run("audit", STEP, "--gpu", "H100", "--per-host", "1", "--json", *links)
        assert code == OK
        return json.loads(out)["step_seconds"]

    assert seconds("--network", "50") == seconds() < seconds("--network", "0.05")


def test_audit_fails_where_the_contract_is_broken(run):
    code, out, _ = run("audit", STEP, "--max-peak-bytes", "1e3")
    assert code == NOT_OK
    assert "\nbroken: the peak is 1." in out and "above --max-peak-bytes 1000 B" in out
    code, out, _ = run("audit", STEP, "--min-overlap", "0.99", "--gpu", "H100", "--json")
    assert code == NOT_OK
    assert "below min_overlap=0.99" in json.loads(out)["findings"][0]


def test_audit_of_activations_that_move(run):
    code, out, _ = run("audit", str(stored.HERE / "exchange-8xH100-jax0.12.hlo"))
    assert code == NOT_OK and out.count("broken: ") == 2
    assert "broken: all-to-all all_to_all" in out and "collective-permute" in out


def test_audit_plots(run, tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    picture = tmp_path / "step.png"
    assert run("audit", STEP, "--gpu", "H100", "--plot", str(picture))[0] == OK
    assert picture.stat().st_size > 5000
    import matplotlib.pyplot as plt

    plt.close("all")


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
        return zerojax.train_step(loss, stage=2, accumulate=2), state, model()[2]

    def bare():
        tx = optax.adam(1e-3)
        params = {"w": jnp.zeros((256, 256))}
        made = {"params": params, "opt_state": tx.init(params)}
        return zerojax.train_step(loss, tx=tx), lambda: made, model()[2]

    def untraceable():
        return lambda params, batch: float(batch.sum()), state, jnp.ones((64, 256))

    def list_of_three():
        return [1, 2, 3]

    def failing():
        raise RuntimeError("no data\\nat all")
"""


@pytest.mark.gpu_code
def test_audit_and_forecast_of_a_users_module(run, module):
    name = module("mymodel", MODEL)
    code, out, err = run("audit", f"{name}:model", "--stage", "3", "--json", "--accumulate", "2")
    assert (code, err) == (OK, "")
    found = json.loads(out)
    assert found["stage"] == 3 and found["findings"] == []
    assert found["memory"]["parameters"] == 256 * 256 * 4 // 8
    code, out, err = run("forecast", f"{name}:model", "--stages", "2", "--json")
    (case,) = json.loads(out)["cases"]
    assert (code, err, case["stage"]) == (OK, "", 2) and case["fits"]
    assert case["parameters"] == 256 * 256 * 4


@pytest.mark.gpu_code
def test_audit_of_a_ready_step(run, module):
    """As it was made: with its stage, its microbatches and its optimizer."""
    name = module("mymodel", MODEL)
    code, out, err = run("audit", f"{name}:step", "--json", "--compute", "bfloat16")
    found = json.loads(out)
    assert (code, err, found["stage"], found["findings"]) == (OK, "", 2, [])
    assert found["memory"]["parameters"] == 256 * 256 * 4
    assert {2} <= {one["trips"] for one in found["traffic"]}, "of two microbatches"
    code, out, err = run("audit", f"{name}:bare", "--json", "--stage", "3")
    found = json.loads(out)
    assert (code, err, found["stage"], found["findings"]) == (OK, "", 3, [])
    assert found["memory"]["optimizer"] == 2 * 256 * 256 * 4 // 8 + 4


@pytest.mark.gpu_code
def test_a_users_module_computes_in_the_dtype_of_the_flag(run, module):
    name = module("mymodel", MODEL) + ":model"

    def cases(*flags):
        code, out, err = run("forecast", name, "--stages", "3", "--json", *flags)
        assert (code, err) == (OK, "")
        return json.loads(out)["cases"]

    (wide,), (narrow,) = cases(), cases("--compute", "bfloat16", "--reduce", "bfloat16")
    assert (wide["matmuls"], narrow["matmuls"]) == (["float32"], ["bfloat16"])
    assert narrow["link_bytes"] == pytest.approx(wide["link_bytes"] / 2, rel=1e-3)
    code, out, _ = run("audit", name, "--compute", "bfloat16", "--json")
    assert code == OK and json.loads(out)["wire_bytes"] < wide["link_bytes"]


@pytest.mark.gpu_code
def test_a_gpu_that_lacks_the_dtype_of_the_model(run, module):
    """XLA computes bfloat16 in float32 there, and its program does not tell, kept or not."""
    name = module("mymodel", MODEL) + ":model"
    given = (name, "--gpus", "8xT4", "--compute")
    lacks = "float32 (written in bfloat16, which a T4 does not have: compute in float16)"
    for flags in ("--no-cache",), (), ():
        code, out, err = run("forecast", *given, "bfloat16", "--stages", "3", *flags)
        assert (code, err) == (OK, "") and f"matmuls in {lacks}; " in " ".join(out.split())
    code, out, _ = run("audit", *given, "bfloat16")
    assert code == OK and "in float32: written in bfloat16, which a T4" in " ".join(out.split())
    code, out, _ = run("forecast", *given, "float16", "--stages", "3")
    assert code == OK and "matmuls in float16; " in " ".join(out.split()) and "T4 does" not in out


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

    def studied():
        return *over("batch")[:2], lambda rows: jax.ShapeDtypeStruct((rows, 256), jnp.float32)
"""


@pytest.mark.gpu_code
def test_a_loss_names_the_axis_of_the_mesh(run, module):
    module("mymodel", MODEL)
    name = module("named", NAMED)
    gpus = ("--gpus", "8xH100", "--json")
    for command in ("forecast", "audit"):
        code, out, err = run(command, f"{name}:one", *gpus)
        assert (code, out) == (BAD_INPUT, "")
        assert "the loss communicates over the axis 'batch'" in err and "pass --axis 'batch'" in err
    code, out, err = run("forecast", f"{name}:one", *gpus, "--stages", "3", "--axis", "batch")
    assert (code, err) == (OK, "") and json.loads(out)["cases"][0]["network_bytes"] == 0
    code, out, err = run("audit", f"{name}:one", *gpus, "--axis", "batch")
    assert (code, err, json.loads(out)["findings"]) == (OK, "", [])
    studied = ("study", f"{name}:studied", *gpus, "--stages", "3", "--rows", "8")
    code, out, err = run(*studied, "--axis", "batch")
    (cell,) = json.loads(out)["cells"]
    assert (code, err, cell["settings"], cell["failed"]) == (OK, "", "axis='batch'", "")
    code, _, err = run(*studied)
    assert code == BAD_INPUT and "pass --axis 'batch'" in err


@pytest.mark.gpu_code
def test_a_loss_names_the_axes_of_hosts_and_of_their_gpus(run, module):
    module("mymodel", MODEL)
    two = (module("named", NAMED) + ":two", "--gpus", "8xH100", "--per-host", "4", "--json")
    code, out, err = run("forecast", *two, "--axis", "host,card", "--groups", "params=card")
    (case,) = json.loads(out)["cases"]
    assert (code, err) == (OK, "") and case["groups"].startswith("params over card")
    assert case["parameters"] == 256 * 256 * 4 // 8 and case["network_bytes"] > 0
    for flags, said in (
        (("batch", "--groups", "params=gpu"), "--axis 'batch' is one axis over all GPUs"),
        (("batch", "--regather", "gpu"), "Name both in --axis"),
        (("a,b,c",), "must be the name of the mesh axis over all GPUs, such as 'batch'"),
        (("a,a",), "or two names: of the hosts, and of the GPUs of each"),
    ):
        code, _, err = run("forecast", *two, "--axis", *flags)
        assert code == BAD_INPUT and said in err


@pytest.mark.gpu_code
def test_audit_of_a_users_module_on_several_hosts(run, module):
    model = (module("mymodel", MODEL) + ":model", "--gpus", "8xH100", "--nodes", "2x4", "--json")

    def found(*flags):
        code, out, err = run("audit", *model, *flags)
        assert (code, err) == (OK, "")
        return json.loads(out)

    flat, hsdp = found(), found("--groups", HSDP)
    size = 256 * 256 * 4
    assert (flat["memory"]["parameters"], hsdp["memory"]["parameters"]) == (size // 8, size // 4)
    assert 0 < hsdp["network_bytes"] < flat["network_bytes"]
    assert found("--network", "0.05")["step_seconds"] > 10 * flat["step_seconds"]
    assert found("--master")["memory"]["parameters"] == size // 2 // 8


FLOPS = 3 * 2 * 60 * 256 * 256  # of the rows in `six`
HSDP = "params=gpu,grads=gpu,opt_state=gpu"
GROUPS = "params=gpu,grads=gpu,opt_state=gpu+node"


def test_nodes_groups_and_network_are_passed_on(run, module, monkeypatch):
    given = {}

    def forecast(*args, **options):
        given.update(options)
        raise ValueError("seen")

    monkeypatch.setattr(zerojax, "forecast", forecast)
    model = (module("mymodel", MODEL) + ":model", "--gpus", "64xA100")
    run("forecast", *model, "--nodes", "16x4", "--network", "12.5", "--groups", GROUPS)
    over = {"params": ("gpu",), "grads": ("gpu",), "opt_state": ("gpu", "node")}
    assert (given["groups"], given["per_host"], given["gpus"]) == (over, 4, "64xA100")
    known = zerojax._hlo.known.named("A100").rates
    assert given["rates"] == dataclasses.replace(known, network=12.5e9) != known
    run("forecast", *model, "--groups", "params=,opt_state=gpu")
    assert given["groups"] == {"params": (), "opt_state": ("gpu",)}
    run("forecast", *model, "--per-host", "2")
    assert given["groups"] is given["rates"] is given["stages"] is None and given["per_host"] == 2
    assert given["pad"] is True
    run("forecast", *model, "--no-pad")
    assert given["pad"] is False and given["offload"] is None
    run("forecast", *model, "--offload", "opt_state", "--host-link", "12")
    assert given["offload"] == ["opt_state"]
    # each GPU's, whatever the memory of its host
    assert given["rates"] == dataclasses.replace(known, host=12e9, host_memory=math.inf) != known
    assert given["rates"].to_host(8) == 12e9
    assert given["activations"] is given["update"] is None
    run("forecast", "--offload", "opt_state,params", "--activations", "host", *model)
    assert given["offload"] == ["opt_state", "params"] and given["activations"] == ["host"]
    run("forecast", *model, "--update", "backward")
    assert given["update"] == "backward"
    assert given["regather"] is given["precision"] is None and given["order"] == "microbatches"
    run("forecast", *model, "--regather", "gpu", "--gather", "int8", "--reduce", "int4")
    assert given["regather"] == ("gpu",)
    assert given["precision"] == zerojax.Precision(gather="int8", reduce="int4")
    run("forecast", *model, "--regather", "false", "--gather", "int8", "--master")
    narrow = {"compute": "bfloat16", "param": "bfloat16", "master": "float32"}
    assert given["regather"] is False
    assert given["precision"] == zerojax.Precision(gather="int8", **narrow)
    run("forecast", *model, "--compute", "bfloat16", "--reduce", "float32")
    assert given["precision"] == zerojax.Precision(compute="bfloat16", reduce="float32")
    code, _, err = run("forecast", *model, "--compute", "int8")
    assert code == BAD_INPUT and "Precision(compute='int8'): not a float dtype. Use one" in err
    run("forecast", *model, "--order", "microbatches", "layers")
    assert given["order"] == ["microbatches", "layers"]
    code, _, err = run("forecast", *model, "--gather", "int4")
    assert code == BAD_INPUT and "Precision(gather='int4'): 15 levels" in err
    code, _, err = run("forecast", *model, "--regather", "")
    assert code == BAD_INPUT and "is not true, false, or an axis such as gpu" in err


@pytest.mark.gpu_code
def test_gpus_that_do_not_divide_the_model(run, module):
    """Six pad 256 to 258."""
    name = module("mymodel", MODEL) + ":six"
    six = ("--gpus", "6xH100", "--json")
    code, out, err = run("forecast", name, *six, "--stages", "3")
    (case,) = json.loads(out)["cases"]
    assert (code, err, case["parameters"]) == (OK, "", 258 * 256 * 4 // 6)
    assert case["formula"] == 4 * case["parameters"] + 8  # with gradients, moments and counters
    assert case["mfu"] == pytest.approx(FLOPS / (case["step_seconds"] * 6 * 989e12))
    code, out, err = run("audit", name, *six)
    found = json.loads(out)
    assert (code, err, found["findings"]) == (OK, "", [])
    assert found["memory"]["parameters"] == case["parameters"]
    code, out, err = run("audit", name, *six, "--no-pad")
    assert (code, err) == (OK, "")
    assert json.loads(out)["memory"]["parameters"] == 256 * 256 * 4


@pytest.mark.gpu_code
@pytest.mark.filterwarnings("ignore:.* does not find slices of host memory")  # older JAX
def test_state_in_host_memory(run, module):
    name = module("mymodel", MODEL) + ":model"
    gpus = ("--gpus", "1xT4", "--offload", "opt_state", "--host-link", "1", "--json")
    code, out, err = run("forecast", name, *gpus, "--stages", "0")
    (case,) = json.loads(out)["cases"]
    moments = 2 * 256 * 256 * 4
    assert (code, err, case["optimizer"], case["on_host"]) == (OK, "", 4, moments)
    assert case["waited_seconds"] > moments / 1e9  # both ways, one after the other: no stack
    parts = case["compute_seconds"], case["exposed_seconds"], case["waited_seconds"]
    assert case["step_seconds"] == pytest.approx(sum(parts))
    code, out, err = run("audit", name, "--gpus", "1xT4", "--offload", "opt_state", "--json")
    found = json.loads(out)
    assert (code, err, found["findings"]) == (OK, "", [])
    assert found["memory"]["on_host"] == found["bytes_to_device"] == moments
    assert found["bytes_to_host"] == moments
    both = ("--gpus", "1xT4", "--offload", "opt_state,params", "--json")
    code, out, err = run("forecast", name, *both, "--stages", "0")
    (case,) = json.loads(out)["cases"]
    assert (code, err, case["parameters"], case["on_host"]) == (OK, "", 0, 1.5 * moments)
    code, _, err = run("forecast", name, *both, "--stages", "0", "--update", "before")
    assert (code, err) == (BAD_INPUT, "zerojax: --update must be 'backward', 'after' or 'auto', "
                           "got 'before'.\n")  # fmt: skip


@pytest.mark.gpu_code
def test_codes_and_weights_kept_in_the_node(run, module):
    name = module("mymodel", MODEL) + ":model"
    flags = ("--gpus", "16xH100", "--regather", "gpu", "--gather", "int8", "--reduce", "int8")
    found = {}
    for more in ((), flags[2:]):
        code, out, err = run("audit", name, *flags[:2], *more, "--json")
        assert (code, err) == (OK, "")
        found[more] = json.loads(out)
        code, out, err = run("forecast", name, *flags[:2], *more, "--stages", "3", "--json")
        (case,) = json.loads(out)["cases"]
        assert (code, err, found[more]["findings"]) == (OK, "", [])
        assert case["network_bytes"] == found[more]["network_bytes"]
    exact, coded = (one["network_bytes"] for one in found.values())
    assert 0 < coded < 0.5 * exact


@pytest.mark.parametrize("command", ["forecast", "audit"])
def test_rows_that_do_not_divide_into_microbatches(run, command):
    code, _, err = run(command, "124m", "--gpus", "8xH100", "--accumulate", "8")
    assert code == BAD_INPUT and "--accumulate 8 microbatches. Pass --rows 8, or a" in err


def test_what_is_chosen_is_printed(run, monkeypatch):
    given = {"peaks": [90, 30]}

    def choose(losses, make_state, batch, **options):
        given.update(options, losses=losses, rows=batch.shape[0])
        return test_choice.choice(test_choice.tried(test_choice.EXACT, 1.5, given["peaks"].pop()))

    monkeypatch.setattr(zerojax, "choose", choose)
    documented = "forecast 124m --gpus 16xH100 --network 12.5 --choose --axis batch"
    for wanted in (OK, NOT_OK):
        code, out, err = run(*documented.split(), "--rows", "2")
        assert (code, err) == (wanted, "") and "1 ways ranked" in out
        assert ("zerojax.train_step(losses" in out) == (wanted == OK)
    assert list(given["losses"]) == ["none", "dots", "full"] and given["rows"] == 32
    assert given["rates"].network == 12.5e9 and given["gpus"] == "16xH100"
    assert given["axis"] == "batch"


def test_what_chooses_is_not_told(run):
    given = ("--choose", "--stages", "3", "--gather", "int8")
    code, _, err = run("forecast", "124m", "--gpus", "8xH100", *given)
    assert code == BAD_INPUT and "--choose decides --stages, --gather itself" in err


# -- study


def test_a_study_is_printed_kept_and_drawn(run, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    peak = lambda stage, count, rows: 90 - 20 * stage + rows
    compiled = fakes.compiled_nowhere(monkeypatch, peak)
    monkeypatch.setitem(presets.PRESETS, "tiny", presets.Gpt(2, 32, 2, vocab=64, tokens=8))
    gpus = ("--gpus", "8xH100", "16xH100", "--stages", "1", "3", "--rows", "2", "largest")
    flags = (*gpus, "--remat", "dots", "--out", "study.json", "--plot", "study.png")
    code, out, err = run("study", "tiny", *flags)
    assert (code, err) == (OK, "")
    assert "remat dots" in out and "16xH100" in out and "max 40" in out
    assert (tmp_path / "study.png").stat().st_size > 5000
    count = len(compiled)
    code, out, err = run("study", "tiny", *flags, "--json")
    assert (code, err, len(compiled)) == (OK, "", count)
    cells = json.loads(out)["cells"]
    assert cells == json.loads((tmp_path / "study.json").read_text())["cells"] and len(cells) == 8
    code, out, _ = run("study", "tiny", "--set", "layers=3", "--gpus", "8xH100", "--stages", "0")
    assert code == NOT_OK and "Nothing fits of tiny layers=3. The least is 91.0 GiB" in out
    import matplotlib.pyplot as plt

    plt.close("all")


STUDIED = """
    import jax, jax.numpy as jnp, zerojax.nnx
    from tests import nnx_models
    from tests.study.fakes import batch, loss, make_state

    def of_nnx():
        step = zerojax.nnx.train_step(nnx_models.loss_fn, accumulate=2, order="layers")
        batch = lambda rows: jax.ShapeDtypeStruct((rows, 16), jnp.float32)
        return step, nnx_models.make, batch

    def model():
        return loss, make_state, batch

    def fixed():
        return loss, make_state, batch(8)

    def keyed():
        return loss, make_state, batch, 1
"""


def test_a_study_of_a_users_module(run, module, monkeypatch):
    compiled = fakes.compiled_nowhere(monkeypatch)
    name = module("mymodel", STUDIED)
    gpus = ("--gpus", "8xH100", "--stages", "3", "--rows", "4")
    code, out, err = run("study", f"{name}:model", *gpus, "--json")
    assert (code, err, compiled) == (OK, "", [(3, 8, 4)])
    assert json.loads(out)["cells"][0]["model"] == "mymodel:model"
    for flags, said in ((), 2), (("--accumulate", "4"), 4), (("--accumulate", "1"), 1):
        _, out, _ = run("study", f"{name}:of_nnx", *gpus, *flags, "--json")
        counted = "" if said == 1 else f"accumulate={said}, "
        assert json.loads(out)["cells"][0]["settings"] == f"{counted}order='layers'", flags
    for function in ("fixed", "keyed"):
        code, _, err = run("study", f"{name}:{function}", *gpus)
        assert code == BAD_INPUT and "with a function batch(rows) that returns a global" in err


def test_what_a_study_is_told_is_passed_on(run, monkeypatch):
    given = {}

    def study(models, **options):
        given.clear()
        given.update(options, models=models)
        raise ValueError("seen")

    monkeypatch.setattr(zerojax, "study", study)
    run("study", "7.5b", "60b", "--gpus", "64xA100")
    assert given.pop("models") == {name: presets.preset(name) for name in ("7.5b", "60b")}
    assert given == {
        "gpus": ["64xA100"], "stages": [1, 2, 3], "rows": ["largest"], "remat": "full",
        "per_host": 8, "cache": True, "pad": True,
    }  # fmt: skip
    more = ("--network", "12.5", "--no-cache", "--accumulate", "2", "--order", "layers")
    more += ("--master", "--gather", "int8", "--offload", "opt_state", "--regather", "gpu")
    run("study", "7.5b", "--set", "tokens=4096", "--gpus", "64xH100", "128xH100", *more)
    narrow = {"compute": "bfloat16", "param": "bfloat16", "master": "float32"}
    assert given["precision"] == zerojax.Precision(gather="int8", **narrow)
    assert given["rates"].network == 12.5e9 and not given["cache"]
    assert (given["accumulate"], given["order"]) == (2, "layers")
    assert (given["offload"], given["regather"]) == (["opt_state"], ("gpu",))
    assert given["models"]["7.5b tokens=4096"].tokens == 4096
    documented = (
        "study 60b --gpus 64xH100 128xH100 400xH100 --stages 3 --out study.json --plot study.png"
    )
    run(*documented.split())
    assert given["gpus"] == ["64xH100", "128xH100", "400xH100"] and given["stages"] == [3]
    assert given["rows"] == ["largest"] and str(given["out"]) == "study.json"
    assert "nic_speed_gbps" in os.environ["XLA_FLAGS"], "XLA is told of the slow network"


@pytest.mark.gpu_code
def test_forecast_of_groups(run, module):
    name = module("mymodel", MODEL)
    nodes = ("--gpus", "8xH100", "--nodes", "2x4", "--network", "0.000001")
    code, out, err = run("forecast", f"{name}:model", *nodes, "--groups", GROUPS, "--json")
    (case,) = json.loads(out)["cases"]
    assert (code, err, case["stage"]) == (OK, "", 3)
    assert case["groups"] == "params over gpu, grads over gpu, opt_state over gpu x node"
    assert case["parameters"] == 256 * 256 * 4 // 8, "where they are updated"
    assert case["optimizer"] == 2 * 256 * 256 * 4 // 8 + 4
    assert case["step_seconds"] == pytest.approx(case["network_bytes"] / 1e3, rel=0.01)
    assert run("forecast", f"{name}:model", *nodes, "--groups", "params=data")[2].startswith(
        "zerojax: --groups shards params over ('data',), but the batch"
    )


@pytest.mark.gpu_code
def test_forecast_of_what_does_not_fit(run, module, monkeypatch):
    """On a GPU of which others use nearly all memory."""
    monkeypatch.setattr(zerojax._hlo.gpus, "USABLE_MEMORY", 1e-6)
    name = module("mymodel", MODEL)
    code, out, _ = run("forecast", f"{name}:model", "--gpus", "8xA100-40GB", "--stages", "3")
    assert code == NOT_OK
    assert "Nothing fits. The least is" in out and "at stage 3" in out


# -- bad input: one line, exit code 2

BAD = {
    "unknown GPU": (("forecast", "124m", "--gpus", "8xV900"), "no facts about a GPU 'V900'. Name"),
    "no GPUs": (("forecast", "124m", "--gpus", "0xH100"), "does not say how many of which GPU"),
    "no devices": (("table", "--devices", "0"), "--devices [0] must be positive"),
    "no parameters": (("table", "--params", "-1"), "--params [-1.0] must be positive"),
    "negative bytes": (("table", "--grad-bytes", "-2"), "--grad-bytes -2.0 must not be neg"),
    "unknown preset": (("forecast", "3x"), "no preset '3x'. Name one of 124m"),
    "no module": (("forecast", "nosuch:model"), "nosuch:model cannot be imported: No module named"),
    "no function": (("forecast", "mymodel:nosuch"), "cannot be imported: module 'mymodel' has no"),
    "not three": (("forecast", "mymodel:list_of_three"), "returned list. Return (loss_fn, make_"),
    "failing": (("audit", "mymodel:failing"), "no data at all"),
    "syntax": (("forecast", "broken:model"), "broken:model cannot be imported: "),
    "chosen step": (("forecast", "mymodel:step", "--choose"), "to --choose, return (loss_fn, mak"),
    "untraceable": (("forecast", "mymodel:untraceable", "--stages", "3"), "oncret"),
    "no accumulation": (("forecast", "mymodel:model", "--accumulate", "0"), "--accumulate must be"),
    "hosts of none": (("forecast", "mymodel:model", "--per-host", "0"), "or --per-host.\n"),
    "no file": (("audit", "nosuch.hlo"), "nosuch.hlo cannot be read as HLO (No such file"),
    "empty": (("audit", "empty.hlo"), "this is not the text of an HLO module: it starts with ''"),
    "binary": (("audit", "binary.hlo"), "binary.hlo cannot be read as HLO (not text). Give a file"),
    "hosts of HLO": (("audit", STEP, "--per-host", "0"), "--per-host 0 must be a positive integer"),
    "tokens": (("forecast", "mymodel:model", "--tokens", "-1"), "--tokens -1 must be positive"),
    "no number": (("table", "--param-bytes", "nan"), "--param-bytes nan must not be negative"),
    "too many": (("forecast", "124m", "--gpus", "10000000xH100"), "more than 100,000 GPUs, and no"),
    "digits": (("forecast", "124m", "--gpus", "9" * 150 + "xH100"), "say how many of which GPU"),
    "no picture": (("audit", "124m", "--plot", "x.hlo"), "x.hlo does not name a picture file"),
    "plot nowhere": (("audit", "124m", "--plot", "no/x.png"), "there is no directory for no/x.png"),
    "no program": (("audit", "mymodel.py"), "this is not the text of an HLO module"),
    "damaged": (("audit", "damaged.hlo"), "the HLO text has no ENTRY computation: was it cut off"),
    "folder": (("audit", "."), ". cannot be read as HLO (Is a directory). Give a file"),
    "nodes": (("forecast", "124m", "--nodes", "8x4"), "8xH100 are 8. Pass --gpus 32xH100"),
    "set of HLO": (("audit", STEP, "--set", "n=1"), "is compiled already. Leave out --set."),
    "groups of HLO": (
        ("audit", STEP, "--master", "--groups", "params=gpu"), "Leave out --groups, --master."
    ),
    "links of none": (("audit", STEP, "--network", "9"), "links are those of a GPU. Name it, as"),
    "no argument": (("forecast", "mymodel:model", "--set", "n=1"), "mymodel:model(): got an unex"),
    "no field": (("forecast", "124m", "--set", "depth=1"), "--set depth: there is no 'depth' in"),
    "compute of a size": (
        ("forecast", "124m", "--compute", "float32"), "'124m' computes in the 16 bits of the GPU."
    ),
    "config of a size": (("audit", "124m", "--config", "c.json"), "is for module:function, and '1"),
    "study of none": (("study", "3x", "--gpus", "8xH100"), "no preset '3x'. Name one of 124m"),
    "study nowhere": (
        ("study", "124m", "--gpus", "8xH100", "--out", "no/x.json"),
        "--out 'no/x.json' cannot be written: name a file in a folder that exists",
    ),
    "foreign study": (
        ("study", "124m", "--gpus", "8xH100", "--out", "mymodel.py"),
        "--out 'mymodel.py' is no file of a study, or a damaged one (it is no JSON",
    ),
    "study plot": (
        ("study", "124m", "--gpus", "8xH100", "--plot", "x.hlo"),
        "x.hlo does not name a picture file",
    ),
    "rates of two": (
        ("study", "124m", "--gpus", "8xH100", "8xA100", "--network", "9"),
        "these are the rates of one GPU, and --gpus names A100-80GB, H100. Make a study",
    ),
    "study config": (
        ("study", "124m", "--gpus", "8xH100", "--config", "c.json"),
        "is for module:function, and '124m'",
    ),
    "plot of CPU": (("audit", STEP, "--plot", "x.png"), "no times to plot"),
}  # fmt: skip
COMPILED = ("untraceable", "no accumulation")  # found where the step is made for GPUs


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.gpu_code] * (c in COMPILED)) for c in BAD]
)
def test_bad_input_is_a_line_with_a_remedy(case, run, module, tmp_path):
    module("mymodel", MODEL)
    module("broken", "def model(:\n")
    (tmp_path / "damaged.hlo").write_text("HloModule x\n\n%f (a: f32[]) -> f32[] {\n")
    (tmp_path / "empty.hlo").write_text("")
    (tmp_path / "binary.hlo").write_bytes(bytes(range(128, 256)))
    arguments, message = BAD[case]
    code, out, err = run(*arguments)
    assert (code, out) == (BAD_INPUT, "")
    assert err.startswith("zerojax: ") and message in err
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nosuch",),
        ("table", "--stages", "4"),
        ("forecast",),
        ("table", "--params", "x"),
        ("forecast", "124m", "--nodes", "8"),
        ("forecast", "124m", "--nodes", "8x0"),
        ("forecast", "124m", "--network", "0"),
        ("forecast", "124m", "--groups", "params"),
        ("forecast", "124m", "--groups", "params=gpu,params=node"),
        ("study", "124m"),
        ("study", "--gpus", "8xH100"),
        ("study", "124m", "--gpus", "8xH100", "--rows", "most"),
        ("study", "124m", "--gpus", "8xH100", "--rows", "0"),
    ],
)
def test_bad_usage(arguments, run):
    code, out, err = run(*arguments)
    assert (code, out) == (BAD_INPUT, "") and "usage: zerojax" in err


def test_a_plot_without_matplotlib_is_refused_before_the_compile(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setattr(zerojax, "audit", lambda *_, **__: pytest.fail("compiled first"))
    code, out, err = run("audit", "124m", "--plot", "x.png")
    assert (code, out) == (BAD_INPUT, "")
    assert err == "zerojax: plots need matplotlib. Run: pip install matplotlib\n"


def test_flags_given_twice_count_once(run):
    code, out, _ = run("table", "--stages", "3", "3", "--devices", "64", "64", "--params", "7.5b")
    assert code == OK and out.splitlines()[2:] == ["      7.5B       64         1.88"]


def test_tracebacks_on_request(run, monkeypatch):
    monkeypatch.setenv("ZEROJAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="must be positive"):
        run("table", "--devices", "0")


def test_as_a_process():
    """python -m zerojax: the exit code, one line and no traceback."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", "audit", "nosuch.hlo"], env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == BAD_INPUT and done.stdout == ""
    assert done.stderr.startswith("zerojax: ") and len(done.stderr.splitlines()) == 1


def test_doctor_on_this_machine(run):
    code, out, _ = run("doctor")
    assert code == OK and "versions" in out and "8 (cpu)" in out
    code, out, _ = run("doctor", "--json")
    checks = json.loads(out)
    assert {check["status"] for check in checks} <= {"ok", "note", "warn"}
    assert {"name", "status", "text"} == set(checks[0])


def test_doctor_fails_scripts_where_something_is_wrong(run, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "nohost")
    code, out, _ = run("doctor")
    assert code == NOT_OK and "fail" in out


def test_terminals_get_bold_headings_and_red_findings():
    text = "a  b\n-  -\n1  2\nbroken: w is kept"
    assert cli.styled(text) == "\x1b[1ma  b\x1b[0m\n-  -\n1  2\n\x1b[31mbroken: w is kept\x1b[0m"


def test_errors_of_the_users_code_say_what_and_where(run, module):
    name = module("theirs", "def f():\n    return {}['missing']\n")
    code, out, err = run("forecast", f"{name}:f")
    assert (code, out) == (BAD_INPUT, "")
    assert err.startswith("zerojax: KeyError: 'missing' (") and "theirs.py:2)" in err


def test_sizes_in_words(run):
    _, out, _ = run("table", "--params", "7.5b", "--devices", "64", "--stages", "3")
    assert out.splitlines()[-1].split() == ["7.5B", "64", "1.88"]
