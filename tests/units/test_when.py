"""When a step that keeps state in host memory updates parameters: in backward, or after it."""

import types

import numpy as np
import pytest

from zerojax._step.backward import is_better_after


def plan(
    gradients=3.7e9, axes=("data",), kind="NVIDIA H100 80GB HBM3", devices=8, params=0, size=8
):
    """Stands for one of GPUs that are not here: the moments of 7.5B, in 8 parts."""
    device = types.SimpleNamespace(device_kind=kind, process_index=0, slice_index=0)
    return types.SimpleNamespace(
        mesh=types.SimpleNamespace(devices=np.array([device] * devices), size=devices),
        size=size,
        groups=types.SimpleNamespace(opt_state=("data",), params=axes),
        host_bytes_per_device=lambda: {"opt_state": 7.5e9, "params": params},
        gradient_bytes=lambda: gradients,
    )


@pytest.mark.parametrize(
    ("plan", "sequences"),
    [
        (plan(), [1, 2]),  # eight of them share 28 GB/s
        (plan(devices=1, size=1), [1]),  # one has 50 GB/s
        (plan(size=4), [1, 2, 3, 4]),  # over a tensor axis, each computes half as much
        (plan(gradients=20e9), []),  # a quarter of the memory
        (plan(axes=()), []),  # at stage 2 updated weights are all-gathered as well
        (plan(params=3.7e9), []),  # who sends parameters there, too, lacks memory
        (plan(kind="cpu"), []),
    ],
)
def test_few_sequences_are_faster_updated_after_backward(plan, sequences):
    """The time of one way, against backward's for some sequences of 1024 tokens."""
    forward = 2 * 7.5e9 * 1024  # FLOPs of a sequence
    assert [n for n in (1, 2, 3, 4) if is_better_after(plan, n * forward)] == sequences
