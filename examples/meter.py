"""The progress bar of the examples: loss, tokens or images a second, memory, and MFU.

meter = Meter(args.steps, unit="tokens", per_step=rows * tokens, flops=flops_of_a_step)
for n in meter:
    state, metrics = step(state, batch)
    meter.show(metrics)
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import jax
from tqdm import tqdm

import zerojax


class Meter:
    """Counts the steps on a progress bar, on process 0; MFU where zerojax knows the GPU."""

    def __init__(
        self, steps: int, *, start: int = 0, unit: str, per_step: int, flops: float = 0.0
    ) -> None:
        self.start, self.unit, self.per_step, self.flops = start, unit, per_step, flops
        self.peak = zerojax.peak_flops()
        quiet = jax.process_index() > 0
        self.bar = tqdm(total=steps, initial=start, desc="training", unit="step", disable=quiet)

    def __iter__(self) -> Iterator[int]:
        """The steps that are left; the first one compiles, and is not timed."""
        with self.bar:
            self.bar.set_postfix_str("compiling the step")
            for step in range(self.start, self.bar.total):
                self.done = step + 1 - self.start
                yield step
                self.bar.update()

    def show(self, metrics: dict[str, Any], every: int = 10) -> None:
        """Reads the loss of every tenth step, so that the others need not be waited for."""
        last = self.start + self.done == self.bar.total
        if self.done > 1 and self.done % every and not last:
            return
        shown = {"loss": f"{float(metrics['loss']):.3f}"}
        now = time.perf_counter()
        if self.done == 1:
            self.started = now
        else:
            seconds = (now - self.started) / (self.done - 1)
            shown[f"{self.unit}/s"] = f"{self.per_step / seconds:,.0f}"
            if self.peak and self.flops:
                shown["MFU"] = f"{self.flops / seconds / self.peak:.1%}"
        shown["memory"] = f"{device_bytes() / 2**20:,.1f} MiB"
        self.bar.set_postfix(shown, refresh=False)

    def say(self, text: str) -> None:
        """A line above the bar, on process 0."""
        if not self.bar.disable:
            self.bar.write(text)


def device_bytes() -> int:
    """The most that this process's first device held; on CPUs, which do not count, what it holds.

    With emulated devices the second is what a stage divides: the state between steps.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats:
        return stats["peak_bytes_in_use"]
    arrays = [array for array in jax.live_arrays() if device in array.sharding.device_set]
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)
