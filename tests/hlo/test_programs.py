"""Stored programs: what an audit reads, against what tests/programs/make.py must have sent.

Every figure here is counted by hand from the shapes in make.py: LAYERS = 4, DIM = 256, ROWS = 64 a
device. A device sends (n - 1) of its shards to gather, (n - 1) / n of the full array to
reduce-scatter, and twice that to all-reduce.
"""

import functools
from typing import NamedTuple

import pytest

from tests.support.stored import BF16, F32, HERE, LAYER, report, stored

report = functools.cache(report)


class Sent(NamedTuple):
    """One collective: bytes of one run, how often, under how many loops, over how many devices."""

    kind: str
    wire: float
    trips: int = 1
    loops: int = 0
    group: int = 8
    on_host: int = 8
    asynchronous: bool = False


def gathered(width, n):
    """A shard goes to all n - 1 others; of what is reduce-scattered, all but the own part."""
    return LAYER // n * (n - 1) * width


def layers(width, n, gpu_async):
    loss = 2 * F32 * (n - 1) / n  # one scalar
    return [
        Sent("all-gather", gathered(width, n), 4, 1, n, 8, gpu_async),
        Sent("all-reduce", loss, 1, 0, n, 8, gpu_async),
    ]


def nested():
    """2 microbatches x 4 layers; XLA peels the last layer off the inner loop to hide its wait."""
    one = gathered(BF16, 16)
    inner = Sent("reduce-scatter", one, 2 * 3, 2, 16, 8, True)
    peeled = Sent("reduce-scatter", one, 2 * 1, 1, 16, 8, True)
    return [inner, peeled]


# up (256, 512), down (512, 256) and bias (512,) in fp32, over 8 devices
COMBINED = 2 * (2 * 256 * 512 + 512) * F32 * 7 / 8
AXES = [
    Sent("all-gather", 64 * 256 * 3 * F32, group=4, on_host=4),  # (64, 256) to 3 others
    Sent("all-reduce", LAYER * F32, group=2, on_host=2),  # 2 * bytes * 1 / 2
    Sent("reduce-scatter", LAYER * F32 * 7 / 8),
]
STEP3 = [
    # The first layer of forward and of backward are gathered before their loops, in one operation.
    Sent("all-gather", 2 * gathered(BF16, 8), asynchronous=True),
    Sent("all-gather", gathered(BF16, 8), 4, 1, asynchronous=True),
    Sent("reduce-scatter", gathered(BF16, 8), 3, 1, asynchronous=True),
    Sent("all-gather", gathered(BF16, 8), 3, 1, asynchronous=True),
    Sent("reduce-scatter", gathered(BF16, 8)),
    Sent("all-reduce", 2 * 2 * F32 * 7 / 8),  # the loss and the norm, joined
]
STEP2 = [
    *nested(),
    Sent("all-reduce", 2 * 2 * F32 * 15 / 16, 1, 0, 16, 8, True),
    # Updated parameters in their own dtype, a layer at a time: biases (256,), weights.
    Sent("all-gather", 16 * 15 * F32, 4, 1, 16, 8, True),
    Sent("all-gather", gathered(F32, 16), 4, 1, 16, 8, True),
]
PROGRAMS = {
    # XLA:CPU widens bf16 that it moves.
    "layers-cpu8-jax0.10": layers(F32, 8, False),
    "layers-cpu8-jax0.12": layers(F32, 8, False),
    "layers-8xH100-jax0.10": layers(BF16, 8, True),
    "layers-8xH100-jax0.12": layers(BF16, 8, False),
    "layers-16xH100-jax0.12": layers(BF16, 16, False),
    "nested-16xH100-jax0.10": nested(),
    "nested-16xH100-jax0.12": nested(),
    "combined-cpu8-jax0.12": [Sent("all-reduce", COMBINED)],
    "combined-8xH100-jax0.10": [Sent("all-reduce", COMBINED, asynchronous=True)],
    "combined-8xH100-jax0.12": [Sent("all-reduce", COMBINED)],
    "axes-cpu8-jax0.10": AXES,
    "axes-cpu8-jax0.12": AXES,
    "partitioned-cpu8-jax0.12": [
        Sent("all-reduce", 2 * 32 * 256 * F32 * 3 / 4, group=4, on_host=4),
        Sent("all-reduce", 2 * 256 * F32 * 1 / 2, group=2, on_host=2),
    ],
    "step3-8xH100-jax0.12": STEP3,
    "step2-16xH100-jax0.10": STEP2,
}
# Two for each multiplication: rows @ weights in every layer; backward doubles it, remat adds one.
MATMUL = 2 * 64 * 256 * 256
FLOPS = {
    "layers": 4 * MATMUL,
    "nested": 2 * 4 * 2 * MATMUL,  # rows @ weights and rows.T @ that
    # x @ up and its gradient, h @ down and both its gradients: 5 of (64, 256, 512)
    "combined": 5 * 2 * 64 * 256 * 512,
    "axes": 2 * 2 * 32 * 256 * 256,  # each half of the rows: x @ w, and x.T @ that
    "partitioned": 2 * 32 * 64 * 256,
    "step3": 4 * 4 * MATMUL,  # forward, again, and two in backward
    "step2": 4 * 4 * MATMUL,  # the same in two halves
}


def test_every_stored_program_is_counted():
    assert {path.stem for path in HERE.glob("*.hlo")} == set(PROGRAMS)
    assert sum("jax0.10" in name for name in PROGRAMS) >= 4


@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives_and_flops_are_those_counted_by_hand(name):
    found = [
        Sent(t.kind, t.wire_bytes, t.trips, len(t.loops), t.group, t.on_host, t.asynchronous)
        for t in report(name).traffic
    ]
    assert sorted(found) == sorted(PROGRAMS[name])
    assert report(name).wire_bytes == sum(s.wire * s.trips for s in PROGRAMS[name])
    assert report(name).replay.flops == FLOPS[name.split("-")[0]]
    text = stored(name)
    assert '"/' not in text and "/home" not in text and "/tmp" not in text, "a machine's paths"


def test_joined_collectives_keep_their_arrays():
    (one,) = report("combined-cpu8-jax0.12").traffic
    assert sorted(map(str, one.parts)) == ["f32[256,512]", "f32[512,256]", "f32[512]"]
    (first, *_) = report("step3-8xH100-jax0.12").traffic
    assert [*map(str, first.parts)] == ["bf16[32,256]"] * 2
    assert first.paths == ("params/layers/w",)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("layers-")])
def test_a_gather_is_traced_to_its_argument_and_the_loss_to_its_line(name):
    """On newer GPUs' programs through a slice that XLA starts as an asynchronous fusion."""
    found = {t.kind: t for t in report(name).traffic}
    assert found["all-gather"].paths == ("stack",)
    loss = found["all-reduce"]
    file, line = loss.source.split(":")
    assert file == "src/tests/programs/make.py" and int(line) > 30
    assert loss.serves == loss.source
