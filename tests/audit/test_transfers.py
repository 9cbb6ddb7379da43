"""What an audit finds wrong with state in host memory."""

import dataclasses

import pytest

import zerojax
from tests import steps
from zerojax._hlo.transfers import IN_HOST, TO_DEVICE, TO_HOST, Transfer

MIB = 2**20  # bytes of a copy that may be anything


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


def found(report, transfers, on_host=None, temporary=0, donated=True):
    """The findings for some copies of a program; by default, it has the planned bytes."""
    on_host = planned(report) if on_host is None else on_host
    memory = dataclasses.replace(
        report.memory,
        on_host=on_host,
        host_donated=on_host if donated else 0,
        host_temporary=temporary,
    )
    replay = dataclasses.replace(report.replay, transfers=transfers)
    return dataclasses.replace(report, memory=memory, replay=replay).findings()


def copy(report, way, nbytes, by_engine=True, trips=1):
    instruction = next(iter(report.module.computations[report.module.entry].values()))
    return Transfer(instruction, way, nbytes, by_engine, trips)


def test_bytes_that_travel_once_each_way_are_as_promised(report):
    assert found(report, [copy(report, TO_DEVICE, MIB), copy(report, TO_HOST, MIB)]) == []


@pytest.mark.parametrize("way", [TO_DEVICE, TO_HOST])
def test_what_travels_twice_is_found(report, way):
    (finding,) = found(report, [copy(report, way, MIB / 2, trips=8)])
    assert finding.startswith(f"4.0 MiB are copied {way} in a step; what the plan has in host")
    assert finding.endswith("Look for state that the step reads outside of the optimizer.")


@pytest.mark.parametrize("way", [TO_DEVICE, TO_HOST])
def test_moments_that_do_not_travel_are_found(way):
    report = on_gpus("padded3", stage=0)  # whole on each device: more than any copy
    size = planned(report)
    other = TO_HOST if way == TO_DEVICE else TO_DEVICE
    sent = lambda share: [copy(report, way, share * size), copy(report, other, size)]
    assert found(report, sent(1)) == found(report, sent(0.9)) == []  # some is only read
    (finding,) = found(report, sent(0))
    assert finding.startswith(f"Hardly anything is copied {way} in a step, and the plan has")
    assert "of optimizer state in host memory, which is not updated then" in finding


def test_on_cpus_there_is_one_memory(report):
    report = dataclasses.replace(report, backend="cpu")
    assert "host memory        is counted as the device's: CPUs have one memory" in str(report)
    assert "host memory" not in str(steps.row("padded3").report)
    assert found(report, [copy(report, TO_DEVICE, 9 * MIB)]) == []


def test_what_a_host_has_pinned(report):
    report = dataclasses.replace(report, per_host=8)
    memory = dataclasses.replace(report.memory, on_host=9 * 2**30, host_donated=9 * 2**30)
    text = str(dataclasses.replace(report, memory=memory))
    assert "72.0 GiB are in host memory if one process runs all GPUs of a host. XLA pins" in text
    memory = dataclasses.replace(report.memory, on_host=7 * 2**30, host_donated=7 * 2**30)
    assert "XLA pins" not in str(dataclasses.replace(report, memory=memory))


def test_parameters_are_fetched_for_forward_backward_and_the_update():
    report = dataclasses.replace(on_gpus(opt_state=0, params=True, min_bytes=0), accumulate=2)
    size = planned(report)
    assert size == report.plan.host_bytes_per_device()["params"] > 0
    (finding,) = found(report, [copy(report, TO_DEVICE, 5 * size * 1.02 + MIB)])
    assert "needs" in finding
    assert found(report, [copy(report, TO_DEVICE, 5 * size + MIB)]) == []
    (finding,) = found(report, [copy(report, TO_HOST, size * 1.02 + MIB)])
    assert "copied to the host" in finding


def test_state_elsewhere_than_planned_is_found(report):
    (finding,) = found(report, [], on_host=3 * MIB)
    assert finding.startswith("3.0 MiB of the state are in host memory and the plan has")


def test_copies_within_host_memory_are_found(report):
    (finding,) = found(report, [], temporary=2 * MIB, donated=False)
    assert finding.startswith("2.0 MiB of host memory are temporary") and "donate=True" in finding
    (finding,) = found(report, [copy(report, IN_HOST, 2 * MIB)])
    assert "is a copy from host memory to host memory. Look for a loop" in finding


@pytest.mark.parametrize("way", [TO_DEVICE, TO_HOST])
def test_what_waits_for_backward_is_sent_and_fetched_by_each_microbatch(report, way):
    report = dataclasses.replace(report, accumulate=3)
    kept = 2 * MIB
    assert found(report, [copy(report, way, 3 * kept)], temporary=kept) == []
    (finding,) = found(report, [copy(report, way, 5 * kept)], temporary=kept)
    assert f"are copied {way} in a step" in finding
    assert "and what is kept there for backward, 2.0 MiB, needs 6.1 MiB" in finding


def test_kernels_that_read_host_memory_are_found_in_loops(report):
    slow = copy(report, TO_DEVICE, MIB + 1, by_engine=False, trips=2)
    assert any("is made by a kernel" in one for one in found(report, [slow]))
    alone = copy(report, TO_DEVICE, MIB + 1, by_engine=False)
    assert found(report, [alone]) == []
    # The first layer of each microbatch; not in a loop over layers.
    microbatches = dataclasses.replace(report, accumulate=2)
    assert not any("is made by a kernel" in one for one in found(microbatches, [slow]))


@pytest.mark.parametrize("way", [TO_DEVICE, TO_HOST])
def test_copies_that_the_gpu_waits_for_are_found_in_loops(report, way):
    waits = copy(report, way, 2 * MIB, trips=2)
    assert any("is a copy that the GPU waits for" in one for one in found(report, [waits]))
    started = dataclasses.replace(waits.instruction, opcode="copy-start")
    beside = dataclasses.replace(waits, instruction=started)
    assert not any("waits for" in one for one in found(report, [beside]))
    assert not any("waits for" in one for one in found(report, [copy(report, way, 2 * MIB)]))
