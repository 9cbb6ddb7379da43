"""The peak host memory of a piece of work (Linux)."""

import ctypes
import gc
import pathlib
import time

# For the environment of a measured process: makes glibc give freed memory back at once.
GIVE_BACK = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}


def measured(work):
    """Returns the result of `work()`, its seconds, and its peak MiB above those at its start."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise pools of freed memory hide new memory
    before = _mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    return result, {
        "seconds": round(seconds, 2),
        "peak_mib": round(max(0, _mib("VmHWM") - before)),
    }


def _mib(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
