"""Traces beside the modelled step: one of CPU devices, and one with the names that GPUs' have."""

import os
import types

import jax
import pytest

import zerojax
from tests import audits
from zerojax._audit import trace as _trace
from zerojax._hlo.module import Module

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


def plane(device, module="jit_step", ops=OPS, period=150):
    """The text of a GPU's plane; stream 20 runs NCCL's kernels."""
    lines = []
    for stream, what in ((13, "Compute"), (20, "Compute,MemcpyD2D")):
        events = [
            f"events {{ metadata_id: {op} offset_ps: {int(1e6 * (n * period + start))} "
            f"duration_ps: {int(1e6 * length)} stats {{ metadata_id: 1 ref_value: {10 + op} }} "
            "stats { metadata_id: 2 ref_value: 20 } }"
            for n in range(2)
            for line, op, start, length in STEP
            if line == stream
        ]
        lines.append(
            f'lines {{ id: {stream} name: "Stream #{stream}({what})" {" ".join(events)} }}'
        )
    # A summary that TensorBoard draws: read, it would count everything again.
    summary = 'lines { id: 99 name: "XLA Ops" events { metadata_id: 1 duration_ps: 900000000 stats '
    lines.append(
        summary + "{ metadata_id: 1 ref_value: 11 } stats { metadata_id: 2 ref_value: 20 } } }"
    )
    names = [
        f'event_metadata {{ key: {op} value {{ id: {op} name: "kernel_{op}" }} }} '
        f'stat_metadata {{ key: {10 + op} value {{ id: {10 + op} name: "{name}" }} }}'
        for op, name in ops.items()
    ]
    stats = {1: "hlo_op", 2: "hlo_module", 20: module}
    names += [
        f'stat_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
        for key, name in stats.items()
    ]
    return f'planes {{ name: "{device}" {" ".join((*lines, *names))} }}'


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


def modelled(program=PROGRAM, ways=()):
    """A report of a program that takes 100 µs of compute and 25 of waiting."""
    gather = types.SimpleNamespace(kind="all-gather", seconds=3e-5, trips=1)
    scatter = types.SimpleNamespace(kind="reduce-scatter", seconds=5e-6, trips=2)
    replay = types.SimpleNamespace(
        step=1.25e-4, compute=1e-4, exposed=2.5e-5, waited=0.0,
        transfers=[types.SimpleNamespace(way=way, seconds=2e-6, trips=3) for way in ways],
    )  # fmt: skip
    report = {"gpu": "H100", "traffic": [gather, scatter], "replay": replay}
    return types.SimpleNamespace(module=Module(program), **report)


def test_streams_of_gpus(written):
    """Steps begin every 150 µs and take 110; the last one's gap is not seen."""
    path = written(plane("/device:GPU:0"), plane("/device:GPU:1"), plane("/host:CPU"))
    found = _trace.compare(modelled(), path)
    assert (found.steps, found.devices) == (2, 2)
    measured = found.measured
    assert measured.step == pytest.approx(130e-6)  # from the first kernel to the last, 260
    assert measured.compute == pytest.approx(70e-6)
    # The gather from 40 to 60 and, beside the loop, to 80; the scatter from 95 to 110.
    assert measured.exposed == pytest.approx((20 + 5 + 15) * 1e-6)
    assert measured.idle == pytest.approx(130e-6 - 110e-6)
    assert measured.kinds == pytest.approx({"all-gather": 60e-6, "reduce-scatter": 20e-6})
    said = str(found).splitlines()
    assert said[0] == "2 steps of 2 devices, measured; times of one step"
    rows = {line[:21].strip(): line[21:].split() for line in said[4:]}
    assert rows["step"] == ["125.0", "µs", "130.0", "µs", "1.04"]
    assert rows["all-gather"] == ["30.0", "µs", "60.0", "µs", "2.00"]
    assert found.to_dict()["modelled"]["kinds"] == {"all-gather": 3e-5, "reduce-scatter": 1e-5}
    assert "<td>2.00</td>" in found._repr_html_()


def test_hosts_whose_files_are_in_one_directory_are_read_together(written):
    """Both call their GPUs alike. An older trace beside theirs is another one."""
    for second, host, periods in ((0, "a", [900]), (1, "a", [200, 300]), (1, "b", [400])):
        planes = [plane(f"/device:GPU:{n}", period=period) for n, period in enumerate(periods)]
        path = written(*planes, plane("/host:CPU"), host=host, second=second)
    found = _trace.compare(modelled(), path)
    assert (found.steps, found.devices) == (2, 3)
    assert found.measured.step == pytest.approx((300 + 110) * 1e-6 / 2)  # the median of all three
    file = path / "plugins" / "profile" / "2026_01_01_00_00_01" / "b.xplane.pb"
    assert _trace.compare(modelled(), file).devices == 1


HOST = "f32[4]{0:S(5)}"
OFFLOADS = f"""HloModule jit_step, is_scheduled=true

%slice (p: f32[4], i: s32[]) -> f32[2] {{
  %p = {HOST} parameter(0)
  %i = s32[] parameter(1)
  ROOT %part = f32[2]{{0}} dynamic-slice({HOST} %p, s32[] %i), dynamic_slice_sizes={{2}}
}}

ENTRY %main (x: f32[4], i: s32[]) -> f32[4] {{
  %x = {HOST} parameter(0)
  %n = s32[] parameter(1)
  %fetch = (f32[4]{{0}}, {HOST}, u32[]) copy-start({HOST} %x)
  %fetched = f32[4]{{0}} copy-done((f32[4]{{0}}, {HOST}, u32[]) %fetch)
  %gemm = f32[4]{{0}} multiply(f32[4]{{0}} %fetched, f32[4]{{0}} %fetched)
  %rows = f32[2]{{0}} fusion({HOST} %x, s32[] %n), kind=kLoop, calls=%slice
  ROOT %back = {HOST} copy(f32[4]{{0}} %gemm)
}}
"""


def test_copies_to_and_from_the_host_are_no_compute(written):
    """The matmul has 40 µs; before and after it, copies run alone."""
    ops = {1: "gemm", 2: "back", 3: "fetch", 4: "rows"}
    found = _trace.compare(
        modelled(OFFLOADS, ("to the device", "to the host")),
        written(plane("/device:GPU:0", ops=ops)),
    )
    measured = found.measured
    assert measured.compute == pytest.approx(40e-6) and measured.exposed == 0
    assert measured.idle == pytest.approx(measured.step - 40e-6)
    copies = {"copies to the host": 60e-6, "copies to the device": (2 * 15 + 20) * 1e-6}
    assert measured.kinds == pytest.approx(copies)
    assert found.modelled.kinds["copies to the host"] == pytest.approx(6e-6)
    rows = {line[:21].strip(): line[21:].split() for line in str(found).splitlines()[4:]}
    assert rows["copies to the host"] == ["6.0", "µs", "60.0", "µs", "10.00"]


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
def test_traces_that_do_not_fit(written, planes, message):
    with pytest.raises(ValueError, match=message):
        _trace.compare(modelled(), written(*planes))


def test_a_directory_without_a_trace(tmp_path):
    with pytest.raises(ValueError, match=r"no .xplane.pb at .*passed to jax.profiler.trace"):
        _trace.compare(modelled(), tmp_path)


def test_a_loop_whose_inside_is_not_in_the_trace(written):
    """It is compute, unless it has collectives: these would count as compute as well."""
    path = written(plane("/device:GPU:0", ops=OPS | {3: "w"}))
    measured = _trace.compare(modelled(), path).measured
    assert measured.compute == pytest.approx(70e-6)
    path = written(plane("/device:GPU:0", ops=dict.fromkeys(OPS, "w")))  # all that it shows
    found = _trace.compare(modelled(), path)
    assert found.steps * found.measured.compute == pytest.approx(2 * 110e-6)
    reduces = PROGRAM.replace("negate(", "all-reduce(")
    with pytest.raises(ValueError, match=r"has 'w' and nothing that runs in it, .* fewer steps"):
        _trace.compare(modelled(reduces), path)


def test_a_damaged_trace(written):
    path = written(plane("/device:GPU:0"))
    (file,) = path.rglob("*.xplane.pb")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"host.xplane.pb cannot be read .* or trace again"):
        _trace.compare(modelled(), path)


def test_a_trace_of_cpu_devices(tmp_path):
    """The real thing, though not of GPUs: steps are counted, and collectives found."""
    plan = audits.planned("cpu", 3)
    state, step = plan.place(audits.make_state), zerojax.train_step(audits.loss)
    tokens = jax.numpy.zeros(audits.ROWS * 8, "int32")
    report = zerojax.audit(step, state, tokens)
    state, _ = jax.block_until_ready(step(state, tokens))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            state, _ = jax.block_until_ready(step(state, tokens))
    found = report.compare(tmp_path)
    assert (found.steps, found.devices, found.modelled) == (3, 8, None)
    times = found.measured
    assert times.kinds.keys() >= {"all-gather", "reduce-scatter"}
    assert 0 < times.compute < times.step
    assert times.compute + times.exposed + times.idle == pytest.approx(times.step)
