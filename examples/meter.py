"""The progress bar of the examples: loss, tokens or images per second, memory, and MFU.

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
    """A progress bar over the steps, on process 0; it shows MFU if zerojax knows the GPU."""

    def __init__(
        self, steps: int, *, start: int = 0, unit: str, per_step: int, flops: float = 0.0
    ) -> None:
        self.start, self.unit, self.per_step, self.flops = start, unit, per_step, flops
        self.peak = zerojax.peak_flops()
        quiet = jax.process_index() > 0
        self.bar = tqdm(total=steps, initial=start, desc="training", unit="step", disable=quiet)

    def __iter__(self) -> Iterator[int]:
        """Yields the remaining steps; the first one compiles, and is not timed."""
        with self.bar:
            self.bar.set_postfix_str("compiling the step")
            for step in range(self.start, self.bar.total):
                self.done = step + 1 - self.start
                yield step
                self.bar.update()

    def show(self, metrics: dict[str, Any], every: int = 10) -> None:
        """Shows the metrics of every tenth step, so that the loop need not wait for the others."""
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
        """Prints a line above the bar, on process 0."""
        if not self.bar.disable:
            self.bar.write(text)


def device_bytes() -> int:
    """Returns the peak memory of this process's first device; on CPUs, its live arrays.

    CPUs do not report a peak. What is live between steps is the state, which a stage shards.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats:
        return stats["peak_bytes_in_use"]
    arrays = [array for array in jax.live_arrays() if device in array.sharding.device_set]
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)
