"""Programs of a newer XLA, with a line that cannot be read: all else is told, nothing passes."""

import json
import re

import pytest

import zerojax
from tests.forecast import fakes
from tests.support import steps
from tests.support.stored import stored
from zerojax.tools._audit import audit as _audit

NAME = "step3-8xH100-jax0.12"
REPORT = "report this line to zerojax"


def change(pattern, new):
    def changed(text):
        result, count = re.subn(pattern, new, text, count=1)
        assert count, pattern
        return result

    return changed


# What a newer XLA may write, and what is said of it.
PLANTED = {
    "an opcode": (change(r" add\(", " tensor-add("), "its opcode, tensor-add, is not known"),
    "a dtype": (change(r"= f32\[", "= mx9["), "its type, mx9, is not known"),
    "a type": (change(r"= f32\[[\d,]*\]\S* add", "= f32<8> add"), "its type, f32<8>, is not known"),
    "garbage": (change(r"\n  (?=%?[\w.-]+ = )", "\n  @!\n  "), "line N, '@!': it is no instr"),
    "garbage between computations": (change(r"\n\n", "\n\n@ x {\n"), "line N, '@ x {': it is no"),
    "the end is missing": (lambda text: text[: text.rindex("ROOT")], "main.* has no ROOT"),
    "most is missing": (lambda text: text[: text.index("ENTRY")], "no ENTRY computation, as if it"),
}


@pytest.fixture(params=PLANTED)
def planted(request):
    """(a change of a program's text, what an audit says of it)"""
    change, says = PLANTED[request.param]
    return change, says.replace("line N", r"line \d+")


class Changed:
    """A compiled step whose text is changed."""

    def __init__(self, compiled, change):
        self.compiled, self.text = compiled, change(compiled.as_text())
        self.memory_analysis = compiled.memory_analysis

    def as_text(self):
        return self.text


def test_what_is_known_is_told_and_nothing_passes(planted):
    change, says = planted
    row = steps.row("stage3")
    report = zerojax.audit(Changed(row.compiled, change), plan=row.plan, gpu="H100")
    assert re.search(says, report.unread) and REPORT in report.unread
    assert "\n" not in report.unread
    # Known: the state by the plan, the peak and temporary memory by the compiler.
    memory, whole, stats = report.memory, row.report.memory, row.compiled.memory_analysis()
    assert (memory.parameters, memory.optimizer) == (whole.parameters, whole.optimizer)
    assert memory.temporary == stats.temp_size_in_bytes and memory.donated == whole.donated
    assert 0 <= memory.peak - whole.peak < 1024  # the compiler counts the results' pointers
    # Unknown.
    assert memory.activations is memory.gathered is memory.gradients is memory.batch is None
    unknown = ("step_seconds", "exposed_seconds", "overlap", "wire_bytes", "network_bytes")
    assert {getattr(report, name) for name in unknown} == {None}
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert {values[name] for name in (*unknown, "matmul_flops", "bytes_to_host")} == {None}
    assert values["unread"] == report.unread and report.matmuls == ()
    # Said, and never passed.
    text = " ".join(str(report).split())
    assert report.unread in text and "sent per device -" in text and "modelled" not in text
    assert "activations -" in text and "what stage 3 promises cannot be checked" in text
    with pytest.raises(AssertionError, match="stage 3 promises cannot be checked:\n  - .*" + says):
        report.check()
    with pytest.raises(AssertionError, match=r"above max_peak_bytes=1 B"):
        report.check(max_peak_bytes=1, min_overlap=0)
    with pytest.raises(ValueError, match=f"no times to plot: .*{says}"):
        report.plot()


def test_texts_alone_have_no_memory(planted, tmp_path, run):
    change, says = planted
    text = change(stored(NAME))
    report = zerojax.audit(text, gpu="H100")
    assert re.search(says, report.unread) and report.memory.peak is None and report.devices == 8
    with pytest.raises(AssertionError, match=says):
        report.check(max_peak_bytes=2**50)
    (tmp_path / "step.hlo").write_text(text)
    code, out, err = run("audit", str(tmp_path / "step.hlo"), "--gpu", "H100")
    assert code == 1 and not err and REPORT in " ".join(out.split())


def test_collectives_of_groups_that_cannot_be_read():
    text = change(r"replica_groups=\S+", "replica_groups=<all but one>,")(stored(NAME))
    assert "its replica_groups are not known" in zerojax.audit(text).unread


@pytest.fixture
def newer(monkeypatch, planted):
    """CPU devices stand for GPUs, and their compiler writes something new."""
    whole = _audit.compiled

    def compiled(lowered):
        program, warnings = whole(lowered)
        return Changed(program, planted[0]), warnings

    monkeypatch.setattr(_audit, "compiled", compiled)
    with fakes.cpus_for_gpus():
        yield


def test_forecasts_tell_memory_without_times(newer, planted):
    arguments = fakes.loss, fakes.make_state, fakes.batch(16)
    found = zerojax.forecast(*arguments, gpus="8xH100", stages=3)
    (case,) = found.cases
    assert re.search(planted[1], case.unread)
    assert case.fits and case.peak > case.parameters > 0 and found.best is None
    figures = ("step_seconds", "tflops", "mfu", "wire_bytes", "activations", "examples_per_second")
    assert {getattr(case, name) for name in figures} == {None}
    text = " ".join(str(found).split())
    assert case.unread in text and "The fastest that fits is unknown." in text
    found.plot()
    with pytest.raises(ValueError, match=f"choose has no times to compare: .*{planted[1]}"):
        zerojax.tools.choose(*arguments, gpus="8xH100")
    models = {"mine": (*arguments[:2], fakes.batch)}
    study = zerojax.tools.study(models, gpus="8xH100", stages=3, rows=2, cache=False)
    assert re.search(planted[1], study.cases[0].failed)


def test_a_case_of_unknown_time_is_never_the_best():
    times = dict.fromkeys(("compute_seconds", "exposed_seconds", "step_seconds"))
    unknown = fakes.changed(fakes.tried(1.0, stage=0), **times)
    choice = fakes.choice(unknown, fakes.tried(2.0))
    assert choice.best.case.step_seconds == 2.0 and "  -  " in str(choice)
    assert fakes.choice(unknown).best is None
    assert fakes.forecast(unknown.case, fakes.case(3, 30)).best.stage == 3
