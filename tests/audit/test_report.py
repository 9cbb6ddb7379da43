"""An audit as text, as a dictionary, in a notebook and as a picture."""

import dataclasses
import json
import sys

import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.support import steps
from tests.support.stored import stored


def test_audits_in_notebooks_name_cells_by_their_lines():
    report = zerojax.audit(stored("layers-cpu8-jax0.12"))
    assert f"<td>{report.traffic[0].serves}</td>" in report._repr_html_()
    one = dataclasses.replace(report.traffic[0], parts=(), source="/tmp/ipykernel_12/34.py:5")
    assert one.serves == "cell line 5"


MATMULS = """HloModule mixed, is_scheduled=true

FileNames
1 "/home/me/model.py"
2 "/lib/site-packages/flax/linen/linear.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=422 end_line=422 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY %main (a: bf16[64,64], b: f32[32,64]) -> f32[32,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %b = f32[32,64]{1,0} parameter(1)
  %c = f32[64,64]{1,0} constant({...})
  %most = bf16[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}
  %d = f32[1,64]{1,0} constant({...})
  %few = f32[1,64]{1,0} dot(%d, %c), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot"}
  ROOT %some = f32[32,64]{1,0} dot(%b, %c), lhs_contracting_dims={1}, metadata={stack_frame_id=2}
}
"""


def test_matmuls_in_float32_beside_narrower_ones_are_named_by_their_line():
    report = zerojax.audit(MATMULS)
    assert report.matmuls == ("bfloat16", "float32")
    assert report.wide_matmuls == "34% of FLOPs in float32, most at model.py:12"
    assert "in bfloat16 and float32: 34% of FLOPs in float32, most at mod" in str(report)
    named = MATMULS.replace("stack_frame", 'op_name="jit(f)/big" stack_frame')
    for starts in ("<frozen runpy>", "/venv/bin/zerojax"):  # a command: the rest is zerojax's own
        found = zerojax.audit(named.replace("/home/me/model.py", starts)).wide_matmuls
        assert found == "34% of FLOPs in float32, most at jit(f)/big"
    alone = MATMULS.replace("bf16", "f32")
    assert zerojax.audit(alone).matmuls == ("float32",) and not zerojax.audit(alone).wide_matmuls


def mixed(params, x):
    h = jnp.tanh(x @ params["w"])
    h = h * jnp.ones(64, jnp.float32)  # makes all that follows float32
    return jnp.mean((h @ params["v"]).astype(jnp.float32) ** 2)  # of five matmuls, three are


@pytest.mark.parametrize(
    "stored, precision, share",
    [
        ("float32", zerojax.Precision(compute="bfloat16"), "60%"),
        ("bfloat16", None, "100%"),  # the batch is float32
        ("float32", None, ""),
    ],
)
def test_matmuls_in_float32_where_narrower_ones_were_asked_for(stored, precision, share):
    params = dict.fromkeys("vw", jnp.ones((64, 64), stored))
    make = lambda: TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    plan = zerojax.plan(make, stage=3, precision=precision)
    x = zerojax.aot.batch(jnp.ones((64, 64)), plan)
    report = zerojax.audit(zerojax.train_step(mixed), plan.abstract(), x)
    where = f"most at test_report.py:{mixed.__code__.co_firstlineno + 3}"
    wanted = f"{share} of FLOPs in float32, not the bfloat16 asked for, {where}" if share else ""
    assert report.wide_matmuls == wanted and (wanted in str(report)) and not report.findings()
    compiled = zerojax.audit(MATMULS.replace("bf16", "f32"), plan=plan).wide_matmuls
    assert compiled.startswith("100% of FLOPs in float32, not the bf") == bool(share)


def test_it_prints_as_a_table_and_turns_into_json():
    report = steps.row("stage3").report
    text = str(report)
    assert text.startswith("ZeRO stage 3, 4 devices (cpu)\nmemory per device  ")
    assert "donated and reused" in text and "modelled step" not in text
    assert "all-gather 2" in text and ", reduce-scatter 115.5 KiB, all-reduce 1.4 KiB" in text
    rows = text.split("\n\n")[1].splitlines()
    (row,) = (r for r in rows if r.endswith("params/blocks/qkv") and r.startswith("reduce"))
    # (32, 96) in fp32: 12 KiB, less the own quarter
    assert " ".join(row.split()) == "reduce-scatter f32 9.0 KiB 3 1 data sync params/blocks/qkv"
    told = json.loads(json.dumps(report.to_dict()))
    assert told["stage"] == 3 and told["devices"] == 4 and told["step_seconds"] is None
    assert sum(t["total_bytes"] for t in told["traffic"]) == report.wire_bytes
    assert told["memory"]["parameters"] == report.memory.parameters
    long = dataclasses.replace(report, traffic=list(report.traffic) * 40)
    assert str(long).splitlines()[-2] == f"... and {len(long.traffic) - 40} smaller ones"
    assert len(long.to_dict()["traffic"]) == len(long.traffic)


def test_it_says_whether_the_contract_holds():
    report, broken = steps.row("stage3").report, {"not_donated": ("x",)}
    for changes, verdict in (
        ({}, "keeps what stage 3 promises"),
        (broken, "breaks what stage 3 promises in 1 place: report.check()"),
        (broken | {"placement": (("x", "replicated"),)}, "in 2 places: report.check()"),
        ({"memory": dataclasses.replace(report.memory, parameters=0)}, "cannot be checked"),
    ):
        changed = dataclasses.replace(report, **changes)
        assert verdict in str(changed).split("\n\n")[0] and verdict in changed._repr_html_()


# -- pictures


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    report = zerojax.audit(steps.row("stage3").compiled, gpu="H100")
    figure = report.plot(str(tmp_path / "step.png"))
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    (axes,) = figure.axes
    labels = {t.get_text() for t in axes.get_legend().get_texts()}
    assert labels >= {"compute", "all-gather", "reduce-scatter", "exposed"}
    assert any(t.get_text() == "x 3" for t in axes.texts), "loops say how often they run"
    caveat = "compiled for CPUs, where no collective runs beside compute"
    assert caveat in axes.get_title() and f"; {caveat})" in str(report)
    # One thing runs after another, and the later runs of a loop take no room.
    drawn = sum(s.end - s.start for s in report.replay.spans if s.stream != "exposed")
    assert axes.get_xlim()[1] == pytest.approx(1e3 * drawn) and drawn < report.step_seconds
    plt.close(figure)


def test_pictures_that_cannot_be_drawn(monkeypatch):
    with pytest.raises(ValueError, match=r"no times to plot: .* for cpu. Pass gpu='H100' to audit"):
        steps.row("stage3").report.plot()
    report = zerojax.audit(stored("step3-8xH100-jax0.12"), gpu="H100")
    assert report.gpu is not None and not report.caveat and "CPU" not in str(report)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match="Run: pip install matplotlib"):
        report.plot()
