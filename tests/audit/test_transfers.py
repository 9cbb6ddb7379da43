"""What an audit finds wrong with state in host memory."""

import dataclasses

import pytest

import zerojax
from tests.support import steps
from zerojax.tools._hlo.timeline import Sent

MIB = 2**20  # bytes of a copy that may be anything
TO_DEVICE, TO_HOST, IN_HOST = "to the device", "to the host", "in host memory"
WAYS = (TO_DEVICE, TO_HOST)


def on_gpus(name="stage3", stage=3, **offload):
    """An audit as of a program for GPUs, whose plan has state in host memory."""
    row = steps.row(name)
    state = steps.model_and_state(row.model)[1]
    offload = zerojax.Offload(**offload)
    plan = zerojax.plan(state, stage=stage, mesh=row.mesh, offload=offload)
    return dataclasses.replace(row.report, plan=plan, backend="gpu")


@pytest.fixture(scope="module")
def report():
    return on_gpus(min_bytes=1024)


def planned(report):
    return sum(report.plan.host_bytes_per_device().values())


def findings(report, transfers, on_host=None, temporary=0, donated=True):
    """The findings for some copies of a program; by default, it has the planned bytes."""
    on_host = planned(report) if on_host is None else on_host
    sizes = {"on_host": on_host, "host_donated": on_host if donated else 0}
    memory = dataclasses.replace(report.memory, **sizes, host_temporary=temporary)
    replay = dataclasses.replace(report.replay, transfers=transfers)
    return dataclasses.replace(report, memory=memory, replay=replay).findings()


def copy(way, nbytes, by_engine=True, trips=1, asynchronous=False):
    return Sent(None, "copy.1", way, nbytes, asynchronous, trips, by_engine=by_engine)


def test_what_travels_once_each_way_is_as_promised_and_twice_is_not(report):
    assert findings(report, [copy(way, MIB) for way in WAYS]) == []
    for way in WAYS:
        (line,) = findings(report, [copy(way, MIB / 2, trips=8)])
        assert line.startswith(f"4.0 MiB are copied {way} in a step; the plan has ")
        assert line.endswith("Look for state that the step reads outside of the optimizer.")


@pytest.mark.parametrize("way", WAYS)
def test_moments_that_do_not_travel(way):
    report = on_gpus("padded3", stage=0)  # whole on each device: more than any copy
    size = planned(report)
    other = TO_HOST if way == TO_DEVICE else TO_DEVICE
    sent = lambda share: [copy(way, share * size), copy(other, size)]
    assert findings(report, sent(1)) == findings(report, sent(0.9)) == []  # some is only read
    (line,) = findings(report, sent(0))
    assert line.startswith(f"Hardly anything is copied {way} in a step, and the plan has")
    assert "of optimizer state in host memory, which is not updated then" in line


def test_parameters_are_fetched_for_forward_backward_and_the_update():
    report = dataclasses.replace(on_gpus(opt_state=0, params=True, min_bytes=0), accumulate=2)
    size = planned(report)
    assert size == report.plan.host_bytes_per_device()["params"] > 0
    assert findings(report, [copy(TO_DEVICE, 5 * size + MIB)]) == []
    for way, times in ((TO_DEVICE, 5), (TO_HOST, 1)):
        (line,) = findings(report, [copy(way, times * size * 1.02 + MIB)])
        assert f"copied {way}" in line


@pytest.mark.parametrize("way", WAYS)
def test_what_waits_for_backward_is_sent_and_fetched_by_each_microbatch(report, way):
    report = dataclasses.replace(report, accumulate=3)
    assert findings(report, [copy(way, 6 * MIB)], temporary=2 * MIB) == []
    (line,) = findings(report, [copy(way, 10 * MIB)], temporary=2 * MIB)
    assert f"are copied {way} in a step" in line
    assert "in host memory and 2.0 MiB that wait for backward, which need 6.1 MiB" in line


@pytest.mark.parametrize(
    ("copied", "memory", "message"),
    [
        ((), {"on_host": 3 * MIB}, "3.0 MiB of the state are in host memory and the plan has"),
        ((), {"temporary": 2 * MIB, "donated": False}, "2.0 MiB of host memory are temporary"),
        ((IN_HOST, 2 * MIB), {}, "is a copy from host memory to host memory. Look for a loop"),
    ],
)
def test_state_elsewhere_than_planned(report, copied, memory, message):
    (line,) = findings(report, [copy(*copied)] if copied else [], **memory)
    assert message in line and ("donate=True" in line) == ("donated" in memory)


@pytest.mark.parametrize(
    ("slow", "fine", "message"),
    [
        ({"by_engine": False}, {"trips": 1}, "is made by a kernel"),
        ({}, {"asynchronous": True}, "is a copy that the GPU waits for"),
        ({}, {"trips": 1}, "is a copy that the GPU waits for"),
    ],
)
def test_slow_copies_are_found_in_loops(report, slow, fine, message):
    """In a loop over microbatches alone is the first layer of each."""

    def is_slow(report=report, **how):
        lines = findings(report, [copy(TO_DEVICE, MIB + 1, **{"trips": 2} | slow | how)])
        return any(message in line for line in lines)

    assert is_slow() and not is_slow(**fine)
    assert not is_slow(dataclasses.replace(report, accumulate=2))


def test_what_a_report_says_of_host_memory(report):
    memory = dataclasses.replace(report.memory, on_host=9 * 2**30, host_donated=9 * 2**30)
    text = str(dataclasses.replace(report, memory=memory, per_host=8))
    assert "72.0 GiB are in host memory if one process runs all GPUs of a host. XLA pins" in text
    on_cpus = dataclasses.replace(report, backend="cpu")
    assert "host memory        is counted as the device's: CPUs have one memory" in str(on_cpus)
    assert "host memory" not in str(steps.row("padded3").report)
    assert findings(on_cpus, [copy(TO_DEVICE, 9 * MIB)]) == []
