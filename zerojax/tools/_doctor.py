"""What is known to hang or slow runs on a machine: zerojax doctor.

Each fact has its source beside it. `docs/debugging.md` lists the same settings.
"""

import collections
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from zerojax import _compat
from zerojax._run import programs as _programs
from zerojax._table import Table
from zerojax._types import Device

DOCTOR_EXPLAINED = {
    "seen": "The GPUs or the setting.",
    "what it does": "What is known of runs there.",
    "remedy": "What to run or to set instead.",
}
Finding = tuple[str, str, str]  # the columns of the table
BLACKWELL = 10  # the first number of its compute capabilities, and all that follow
UNSET = "unset it"
ENABLE = "JAX_ENABLE_COMPILATION_CACHE"
SHARE = "XLA_CLIENT_MEM_FRACTION"

# By variable: the values that cost, in lower case, or () for any that is not off; what they do.
SETTINGS: dict[str, tuple[tuple[str, ...], str]] = {
    # NCCL's user guide, "Environment Variables".
    "NCCL_P2P_DISABLE": ((), "GPUs of a host send through its memory"),
    "NCCL_SHM_DISABLE": ((), "GPUs that cannot reach each other send over the network"),
    "NCCL_IB_DISABLE": ((), "hosts send over TCP"),
    # NVIDIA/JAX-Toolbox#2116: a MaxText step on EKS was slower than its 260 TFLOP/s. aws-ofi-nccl
    # #205: the other protocol writes by RDMA, over all cards of a GPU.
    "OFI_NCCL_PROTOCOL": (("sendrecv",), "EFA sends without RDMA writes, on one card a GPU"),
    # NVIDIA/nccl#750: the first kernel waits for the others, which are never launched.
    "CUDA_LAUNCH_BLOCKING": ((), "kernels wait; a process with several GPUs hangs"),
    "JAX_DEBUG_NANS": ((), "steps are synchronous"),
    "JAX_DISABLE_JIT": ((), "nothing is compiled"),
    # JAX's guide, "GPU memory allocation".
    "XLA_PYTHON_CLIENT_ALLOCATOR": (("platform",), "each allocation goes to the driver"),
    "XLA_PYTHON_CLIENT_PREALLOCATE": (("false", "0"), "memory fragments"),
}
# Flags of XLA by the text that costs: docs/debugging.md.
FLAGS = {
    "--xla_gpu_enable_latency_hiding_scheduler=false": "no collective hides behind compute",
    "--xla_gpu_enable_async_collectives=false": "every collective blocks",
    "--xla_disable_hlo_passes": "work is missing",
    "--xla_gpu_all_gather_combine_threshold_bytes": "steps set it to suit a layer",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes": "steps set it to suit a layer",
}


def examined(devices: Sequence[Device], env: Mapping[str, str]) -> Table:
    """Returns a row for each thing that is known to hang or slow a run on these devices."""
    rows = [row for check in CHECKS for row in check(devices, env)]
    here = counted(devices)
    title = [here] if rows else [f"{here}: nothing here is known to hang or slow a run."]
    if not any(cache(devices, env)):
        title.append(f"Compiled programs are kept in {_kept_in(env)}.")
    return Table(list(DOCTOR_EXPLAINED), rows, title=title, flexible=tuple(DOCTOR_EXPLAINED))


def counted(devices: Sequence[Device]) -> str:
    """Returns how many devices of which kind there are: '8 x NVIDIA B200'."""
    kinds = collections.Counter(device.device_kind for device in devices)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def one_process(devices: Sequence[Device], env: Mapping[str, str]) -> Iterator[Finding]:
    """Several Blackwells in one process.

    NVIDIA/JAX-Toolbox, docs/GPU_performance.md, "Debugging Hangs in 1-process-multiple-device
    set-up": a call that waits for the whole process hangs while a collective runs. It names
    NCCL_LAUNCH_MODE=GROUP and a process for each GPU. marin-community/marin#7344, #8029: hundreds
    of GB200s hung with one process for four and NCCL_LAUNCH_ORDER_IMPLICIT=1, also with a process
    for each but without it; with both, one passed 1,700 steps (#8209 keeps that layout).
    """
    several = [device for device in devices if _compat.capability(device) >= BLACKWELL]
    if len(several) < 2 or env.get("NCCL_LAUNCH_MODE", "").upper() == "GROUP":
        return
    yield (
        f"{counted(several)} in one process",
        "a run may hang without an error",
        f"NCCL_LAUNCH_ORDER_IMPLICIT=1 zerojax launch -n {len(several)} train.py; or one process "
        "with NCCL_LAUNCH_MODE=GROUP",
    )


def one_connection(devices: Sequence[Device], env: Mapping[str, str]) -> Iterator[Finding]:
    """NVIDIA/JAX-Toolbox, docs/GPU_performance.md: Hopper gains by it, Blackwell is slower."""
    blackwell = any(_compat.capability(device) >= BLACKWELL for device in devices)
    if blackwell and env.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield "CUDA_DEVICE_MAX_CONNECTIONS=1", "slower on Blackwell; Hopper gains by it", UNSET


def without_peers(devices: Sequence[Device], _: Mapping[str, str]) -> Iterator[Finding]:
    """GeForce cards copy through the host's memory: their driver grants no access to peers.

    With a driver that says otherwise, collectives have hung: NVIDIA/nccl-tests#117 (RTX 4090),
    tinygrad/open-gpu-kernel-modules#45 (RTX 4090), NVIDIA/nccl#1637 (RTX 5090).
    """
    cards = [device for device in devices if "GeForce" in device.device_kind]
    if len(cards) > 1:
        yield (
            counted(cards),
            "GPUs send through the host's memory, and forecasts count on that",
            "send less: quantized wires, more microbatches at stage 1 or 2. If collectives hang, "
            "update the driver, or set NCCL_P2P_DISABLE=1",
        )


def unified_memory(devices: Sequence[Device], env: Mapping[str, str]) -> Iterator[Finding]:
    """A GB10 that runs out of memory freezes until its power is cut.

    NVIDIA/dgx-spark-playbooks#97 and #102, NVIDIA/open-gpu-kernel-modules#1358.
    """
    if any("GB10" in device.device_kind for device in devices):
        share = 0.75 if any(unread_share(devices, env)) else float(env.get(SHARE) or 0.75)
        yield (
            "GB10: one memory for GPU and host",
            f"the machine freezes when it runs out; JAX takes {share:.0%} of it at first, "
            "and host memory (offload=) is the same memory",
            f"leave room for the host: {SHARE}=0.6, say, and no offload=",
        )


def unread_share(_: Sequence[Device], env: Mapping[str, str]) -> Iterator[Finding]:
    """A share of memory that is no number. JAX logs an error of its plugin, and goes on without."""
    try:
        float(env.get(SHARE) or 0)
    except ValueError:
        yield f"{SHARE}={env[SHARE]}", "no number: JAX leaves all GPUs out", f"{SHARE}=0.75, say"


def settings(devices: Sequence[Device], env: Mapping[str, str]) -> Iterator[Finding]:
    """Variables and flags that cost, of which the reasons are at `SETTINGS` and `FLAGS`."""
    has_peers = not any(without_peers(devices, env))
    for name, (values, does) in SETTINGS.items():
        value = env.get(name, "").lower()
        costs = value in values if values else value not in ("", "0", "false")
        if costs and (has_peers or name != "NCCL_P2P_DISABLE"):  # there it costs nothing
            yield f"{name}={env[name]}", does, UNSET
    flags = env.get("XLA_FLAGS", "").split()
    for begin, does in FLAGS.items():
        yield from ((flag, does, "take it out") for flag in flags if flag.startswith(begin))


def cache(_: Sequence[Device], env: Mapping[str, str]) -> Iterator[Finding]:
    """Compiled programs that are not kept. marin-community/marin#8039: with a URL, XLA has nowhere
    to keep what it has tuned."""
    path, anew = env.get("JAX_COMPILATION_CACHE_DIR", ""), "each run compiles everything again"
    if env.get(ENABLE, "1").lower() in ("0", "false", "off", "no", "n", "f"):
        yield f"{ENABLE}={env[ENABLE]}", anew, UNSET
    elif "://" in path:
        remedy = "name a folder of each host"
        yield f"JAX_COMPILATION_CACHE_DIR={path}", "XLA tunes matmuls anew in each run", remedy
    elif not path and _programs.folder() is None:
        yield f"{_programs.VARIABLE}=", anew, UNSET
    elif not _is_writable(kept := _kept_in(env)):
        yield f"{kept} cannot be written", anew, f"{_programs.VARIABLE}=, a folder of yours"


def _kept_in(env: Mapping[str, str]) -> pathlib.Path:
    return pathlib.Path(env.get("JAX_COMPILATION_CACHE_DIR") or _programs.programs_folder() or "")


def _is_writable(path: pathlib.Path) -> bool:
    """Whether a folder can be written, or made."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


CHECKS = (
    one_process,
    one_connection,
    without_peers,
    unified_memory,
    unread_share,
    cache,
    settings,
)
