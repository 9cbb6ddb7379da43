"""Traces beside the modelled step: one of CPU devices, and one with the names that GPUs' have."""

import os

import jax
import pytest

import zerojax
from tests import steps

# Some names say nothing of what an instruction is, and some the wrong thing.
PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=2

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %all-reduce_fusion = f32[4]{0} negate(f32[4]{0} %p)
}

%condition (q: f32[4]) -> pred[] {
  %q = f32[4]{0} parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: f32[4]) -> f32[2] {
  %x = f32[4]{0} parameter(0)
  %gemm = f32[4]{0} multiply(f32[4]{0} %x, f32[4]{0} %x)
  %up.1 = (f32[4]{0}, f32[8]{0}) all-gather-start(f32[4]{0} %gemm), replica_groups={{0,1}}
  %up.2 = f32[8]{0} all-gather-done((f32[4]{0}, f32[8]{0}) %up.1)
  %w = f32[4]{0} while(f32[4]{0} %gemm), condition=%condition, body=%body
  ROOT %reduce_scatter.4 = f32[2]{0} reduce-scatter(f32[4]{0} %w), replica_groups={{0,1}}
}
"""
# In microseconds, on streams: a matmul, an all-gather that begins beside it, a loop's body that
# runs twice, a reduce-scatter that begins beside that.
OPS = {1: "gemm", 2: "up.1", 3: "all-reduce_fusion", 4: "reduce_scatter.4"}
STEP = [(13, 1, 0, 40), (20, 2, 20, 60), (13, 3, 60, 15), (13, 3, 80, 15), (20, 4, 90, 20)]


def event(op, start, length):
    stats = f"stats {{ metadata_id: 1 ref_value: {10 + op} }}"
    return (
        f"events {{ metadata_id: {op} offset_ps: {int(1e6 * start)} "
        f"duration_ps: {int(1e6 * length)} {stats} stats {{ metadata_id: 2 ref_value: 20 }} }}"
    )


def plane(device, module="jit_step", ops=OPS, period=150):
    """The text of a GPU's plane; stream 20 runs NCCL's kernels."""
    streams = {13: "Stream #13(Compute)", 20: "Stream #20(Compute,MemcpyD2D)"}
    events = {
        stream: [
            event(op, n * period + start, length)
            for n in range(2)
            for on, op, start, length in STEP
            if on == stream
        ]
        for stream in streams
    }
    # A summary that TensorBoard draws: read, it would count everything again.
    streams[99], events[99] = "XLA Ops", [event(1, 0, 900)]
    text = [f'lines {{ id: {n} name: "{streams[n]}" {" ".join(events[n])} }}' for n in streams]
    text += [
        f'event_metadata {{ key: {op} value {{ id: {op} name: "kernel_{op}" }} }}' for op in ops
    ]
    names = {1: "hlo_op", 2: "hlo_module", 20: module} | {10 + op: ops[op] for op in ops}
    text += [
        f'stat_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
        for key, name in names.items()
    ]
    return f'planes {{ name: "{device}" {" ".join(text)} }}'


@pytest.fixture
def written(tmp_path):
    def write(*planes, host="host", second=0):
        text = " ".join(planes)
        data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
        folder = tmp_path / "plugins" / "profile" / f"2026_01_01_00_00_0{second}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{host}.xplane.pb").write_bytes(data)
        os.utime(folder / f"{host}.xplane.pb", (second, second))
        return tmp_path

    return write


@pytest.fixture
def report():
    return zerojax.audit(PROGRAM, gpu="H100")


def table(found):
    """The cells of each row of a printed comparison."""
    return {line[:21].strip(): line[21:].split() for line in str(found).splitlines()[4:]}


def test_streams_of_gpus(written, report):
    """Steps begin every 150 µs and take 110; the last one's gap is not seen."""
    path = written(plane("/device:GPU:0"), plane("/device:GPU:1"), plane("/host:CPU"))
    found = report.compare(path)
    assert (found.steps, found.devices) == (2, 2)
    measured = found.measured
    assert measured.step == pytest.approx(130e-6)  # from the first kernel to the last, 260
    assert measured.compute == pytest.approx(70e-6)
    # The gather from 40 to 60 and, beside the loop, to 80; the scatter from 95 to 110.
    assert measured.exposed == pytest.approx((20 + 5 + 15) * 1e-6)
    assert measured.idle == pytest.approx(130e-6 - 110e-6)
    assert measured.kinds == pytest.approx({"all-gather": 60e-6, "reduce-scatter": 20e-6})
    assert str(found).splitlines()[0] == "2 steps of 2 devices, measured; times of one step"
    *_, value, unit, ratio = table(found)["step"]
    assert (value, unit) == ("130.0", "µs")
    assert float(ratio) == pytest.approx(130e-6 / report.step_seconds, rel=0.01)
    modelled = {one.kind: one.seconds for one in report.traffic}
    assert found.to_dict()["modelled"]["kinds"] == pytest.approx(modelled)
    assert f"<td>{ratio}</td>" in found._repr_html_()


@pytest.mark.parametrize(
    ("planes", "message"),
    [
        ([plane("/device:GPU:0", module="jit_other")], "has no instruction of jit_step"),
        ([plane("/device:GPU:0", ops=dict.fromkeys(OPS, "command_buffer.1"))],
         "whole command buffers of jit_step .* XLA_FLAGS=--xla_gpu_enable_command_buffer="),
        ([plane("/device:GPU:0", ops=OPS | {1: "a", 2: "b", 3: "c"})],
         "is of another program called jit_step: it has instructions such as 'a'"),
        ([plane("/device:GPU:0", ops=dict.fromkeys(OPS, "all-reduce_fusion"))],
         "does not say how many steps .* only such as 'all-reduce_fusion'. Trace whole steps"),
    ],
)  # fmt: skip
def test_traces_that_do_not_fit(written, report, planes, message):
    with pytest.raises(ValueError, match=message):
        report.compare(written(*planes))


def test_a_loop_whose_inside_is_not_in_the_trace(written, report):
    """It is compute, unless it has collectives: these would count as compute as well."""
    path = written(plane("/device:GPU:0", ops=OPS | {3: "w"}))
    measured = report.compare(path).measured
    assert measured.compute == pytest.approx(70e-6)
    path = written(plane("/device:GPU:0", ops=dict.fromkeys(OPS, "w")))  # all that it shows
    found = report.compare(path)
    assert found.steps * found.measured.compute == pytest.approx(2 * 110e-6)
    reduces = PROGRAM.replace("negate(", "all-reduce(")
    with pytest.raises(ValueError, match=r"has 'w' and nothing that runs in it, .* fewer steps"):
        zerojax.audit(reduces).compare(path)


def test_files_that_cannot_be_read(written, report, tmp_path):
    with pytest.raises(ValueError, match=r"no .xplane.pb at .*passed to jax.profiler.trace"):
        report.compare(tmp_path)
    (file,) = written(plane("/device:GPU:0")).rglob("*.xplane.pb")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"host.xplane.pb cannot be read .* or trace again"):
        report.compare(tmp_path)


def test_a_trace_of_cpu_devices(tmp_path):
    """The real thing, though not of GPUs: steps are counted, and collectives found."""
    row = steps.row("padded3")
    state, _ = jax.block_until_ready(row.step(row.fresh(), *row.args))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            state, _ = jax.block_until_ready(row.step(state, *row.args))
    found = row.report.compare(tmp_path)
    assert (found.steps, found.devices, found.modelled) == (3, 3, None)
    times = found.measured
    assert times.kinds.keys() >= {"all-gather", "reduce-scatter"}
    assert 0 < times.compute < times.step
    assert times.compute + times.exposed + times.idle == pytest.approx(times.step)
    report = zerojax.audit(row.compiled, plan=row.plan, gpu="H100")
    gathers = [one for one in report.traffic if one.kind == "all-gather"]
    assert max(one.trips for one in gathers) > 1
    modelled = report.compare(tmp_path).modelled.kinds["all-gather"]
    assert modelled == pytest.approx(sum(one.seconds * one.trips for one in gathers))
