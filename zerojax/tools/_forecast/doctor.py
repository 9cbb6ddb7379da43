"""`zerojax doctor`: checks of this machine, and a remedy for each that finds something."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import socket
from collections.abc import Iterator, Mapping

import jax

from zerojax import aot
from zerojax._update.offload import POOL_GB, POOL_LIMIT, pool_bytes
from zerojax.tools._forecast import network as _network
from zerojax.tools._hlo import known as _known

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
OLDEST_JAX = (0, 10, 2)
EXTRAS = {
    "matplotlib": "plots (audit.plot)",
    "safetensors": "weights in safetensors files",
    "tqdm": "progress bars of the examples",
}
# These flags were good advice once, or are good advice elsewhere.
HURTFUL_FLAGS = {
    "xla_gpu_enable_latency_hiding_scheduler=false": "no collective hides behind compute",
    "xla_disable_hlo_passes": "the work of those passes is missing",
    "xla_gpu_enable_async_collectives=false": "every collective blocks",
    "xla_gpu_all_gather_combine_threshold_bytes": "steps set it by what a layer needs",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "steps set it by what a layer needs",
}
HURTFUL_VARIABLES = {
    "NCCL_P2P_DISABLE": "GPUs of one host then talk through host memory",
    "NCCL_SHM_DISABLE": "processes of one host then talk over the network",
    "NCCL_IB_DISABLE": "hosts then talk over TCP",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "JAX_DISABLE_JIT": "nothing is compiled",
    "JAX_DEBUG_NANS": "every step is synchronous and keeps its inputs",
    "JAX_ENABLE_X64": "constants without a dtype become 64 bits wide",
}
MEMORY_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
OFF = ("", "0", "false", "False")


@dataclasses.dataclass(frozen=True)
class Check:
    """A finding. `status` is "ok", "note" (nothing wrong), "warn" (slower, riskier) or "fail"."""

    name: str
    status: str
    text: str


def doctor(environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Runs all checks, in the order in which to read them."""
    return [
        *_versions(),
        *_devices(),
        *_flags(environ),
        Check("memory", *_memory(environ)),
        *_host_memory(environ),
        Check("processes", *_processes(environ)),
        *_network_cards(environ),
        *_second_nccl(),
        *_extras(),
    ]


def _versions() -> Iterator[Check]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    yield Check("versions", "ok", f"Python {platform.python_version()}, {text}")
    if jax.__version_info__ < OLDEST_JAX:
        yield Check("jax", "fail", f"{jax.__version__} is too old. Run: pip install -U jax")
    if found["jax"].split(".")[:3] != found["jaxlib"].split(".")[:3]:
        text = f"{found['jaxlib']} is not jax's. Run: pip install -U jax jaxlib"
        yield Check("jaxlib", "fail", text)


def _devices() -> Iterator[Check]:
    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield Check("devices", "fail", f"JAX finds none: {str(error).splitlines()[0]}")
        return
    kinds = sorted({device.device_kind for device in devices})
    yield Check("devices", "ok", f"{len(devices)} ({', '.join(kinds)})")
    if devices[0].platform == "cpu":
        yield Check(
            "accelerator",
            "note",
            "none in use. With an NVIDIA GPU: pip install 'zerojax[gpu]'. To emulate 8 devices: "
            "jax.config.update('jax_num_cpu_devices', 8).",
        )
    elif not any(_known.of_device_kind(kind) for kind in kinds):
        yield Check("gpu facts", "note", f"no speeds known for {kinds[0]}: audits show no times")


def _flags(environ: Mapping[str, str]) -> Iterator[Check]:
    flags = environ.get("XLA_FLAGS", "")
    hurt = [(flag, why) for flag, why in HURTFUL_FLAGS.items() if flag in flags.replace("--", "")]
    for flag, why in hurt:
        yield Check("XLA_FLAGS", "warn", f"{flag}: {why}. Take it out of XLA_FLAGS.")
    set_here = [name for name in HURTFUL_VARIABLES if environ.get(name, "") not in OFF]
    for name in set_here:
        yield Check(name, "warn", f"is set: {HURTFUL_VARIABLES[name]}. Unset it.")
    if not hurt and not set_here:
        yield Check("flags", "ok", "none that hurt in XLA_FLAGS, NCCL_* or JAX_*")


def _memory(environ: Mapping[str, str]) -> tuple[str, str]:
    # The first is the newer name; JAX takes either, not both.
    names = [name for name in MEMORY_FRACTION if name in environ]
    if environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        return "warn", "the platform allocator is slow. Unset XLA_PYTHON_CLIENT_ALLOCATOR."
    if environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() == "false":
        return "warn", (
            "JAX takes it as needed, which fragments. Unset XLA_PYTHON_CLIENT_PREALLOCATE."
        )
    if not names:
        return "note", (
            "JAX takes 75% of each GPU. Forecasts count on 92%: set XLA_CLIENT_MEM_FRACTION=0.92 "
            "where nothing else uses the GPU."
        )
    name, share = names[0], 0.0
    with contextlib.suppress(ValueError):
        share = float(environ[name])
    if share <= 0:
        return "fail", f"{name}={environ[name]!r} is no share of a GPU. Set it to 0.92, say."
    return "ok", f"JAX takes {share:.0%} of each GPU"


def _host_memory(environ: Mapping[str, str]) -> Iterator[Check]:
    """Says how much of the host's memory `offload=` may use, where there are GPUs."""
    given = environ.get(POOL_LIMIT)
    if given is None and jax.default_backend() == "gpu":
        text = f"offload= may use {POOL_GB} GiB in each process. For more, set {POOL_LIMIT}."
        yield Check("host memory", "note", text)
    elif given is not None:
        try:
            text = f"offload= may use {pool_bytes(environ) >> 30} GiB in each process"
            yield Check("host memory", "ok", text)
        except ValueError as error:
            yield Check("host memory", "fail", str(error))


def _processes(environ: Mapping[str, str]) -> tuple[str, str]:
    address = environ.get("JAX_COORDINATOR_ADDRESS", "")
    if not address:
        return "ok", "one; JAX_COORDINATOR_ADDRESS is not set"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) >= 2**16:
        return "fail", f"JAX_COORDINATOR_ADDRESS={address!r} is not host:port"
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        return "warn", (
            f"the coordinator {address} does not answer ({error}). It does once process 0 runs; if "
            "that one does, open the port."
        )
    return "ok", f"the coordinator {address} answers"


def _network_cards(environ: Mapping[str, str]) -> Iterator[Check]:
    several = "JAX_COORDINATOR_ADDRESS" in environ or any(
        environ.get(count, "1") != "1" for count in ("WORLD_SIZE", "SLURM_NTASKS")
    )
    if several and not _network.told(environ):
        text = f"{_network.REASON}. There, put {_network.FLAG} into XLA_FLAGS."
        yield Check("network", "note", text)


def _second_nccl() -> Iterator[Check]:
    """Warns of TensorFlow beside several GPUs: jax-ml/jax#39167."""
    several = jax.default_backend() == "gpu" and jax.device_count() > 1
    if several and _is_installed("tensorflow"):
        yield Check(
            "tensorflow",
            "warn",
            "brings an NCCL of its own: where a program imports it, collectives fail with "
            "'invalid argument'. pip uninstall tensorflow; pip install tensorflow-cpu.",
        )


def _is_installed(distribution: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(distribution))
    return False


def _extras() -> Iterator[Check]:
    for package, purpose in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            yield Check(package, "note", f"is not installed: no {purpose}. pip install {package}")
    try:
        aot.check_packages()
        yield Check("compiling for GPUs", "ok", "forecast and aot work here")
    except ModuleNotFoundError as error:
        yield Check("compiling for GPUs", "note", str(error))
