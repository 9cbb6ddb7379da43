"""Compiled steps on disk: one run of the command line reads what an earlier one has compiled.

JAX's own cache keeps executables, which cannot be loaded without a GPU. An audit needs only the
text of a program, its memory and the compiler's warnings, so only these are kept.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import os
import pathlib
import types
import zlib
from collections.abc import Iterator, Mapping

import jax
import jaxlib

import zerojax
from zerojax._plan.plan import Plan
from zerojax._run import programs as _programs
from zerojax._step.step import Step
from zerojax._step.step_options import Recipe
from zerojax._types import PyTree
from zerojax.tools._audit import audit as _audit
from zerojax.tools._audit.measurement import Flops
from zerojax.tools._hlo import gpus as _known

SUFFIX = ".zerojax"
MOST_BYTES = 2**28  # of all files; a step of a 7.5B GPT takes less than 0.2 MB
SIZES = ("argument", "output", "alias", "temp", "host_temp")

# The folder, and whether the lines of the user's code tell programs apart.
_STORE = contextvars.ContextVar[tuple[pathlib.Path | None, bool]]("store", default=(None, True))


@dataclasses.dataclass(frozen=True)
class KeptProgram:
    """The parts of a compiled step that an audit reads."""

    text: str
    sizes: Mapping[str, int]
    warnings: list[str]
    recipe: Recipe | None = None
    written: Flops = dataclasses.field(default_factory=Flops)

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(**self.sizes)


@contextlib.contextmanager
def kept(folder: pathlib.Path | None, lines: bool = True) -> Iterator[None]:
    """Keeps compiled programs in a folder, and reads those that are there; None keeps nothing.

    An audit names the lines of code that a program comes from. Whoever needs no `lines` gets a
    program although its code has moved since.
    """
    usable = folder is not None and _programs.usable(folder)
    token = _STORE.set((folder if usable else None, lines))
    try:
        yield
    finally:
        _STORE.reset(token)


def compiled(
    step: Step, state: PyTree, batch: PyTree, rng: PyTree, plan: Plan
) -> Step | KeptProgram:
    """Returns a step as an audit takes it: compiled, where compiled steps are kept."""
    folder, lines = _STORE.get()
    if folder is None:
        return step
    args = (state, batch) if rng is None else (state, batch, rng)
    lowered = step.lower(*args)
    file = folder / f"{_key(lowered, lines, step._options_for(*args), plan)}{SUFFIX}"
    program = _read(file)
    if program is None:
        executable, warnings = _audit.compiled(lowered)
        stats = executable.memory_analysis()
        assert stats is not None, "XLA's compilers for CPUs and GPUs count memory"
        sizes = {f"{name}_size_in_bytes": getattr(stats, f"{name}_size_in_bytes") for name in SIZES}
        program = KeptProgram(executable.as_text() or "", sizes, warnings)
        _write(file, program)
    written = _audit.written(step, args, plan.mesh.devices.flat[0])
    return dataclasses.replace(program, recipe=step.recipe, written=written)


def _key(
    lowered: jax.stages.Lowered, lines: bool, options: Mapping[str, object], plan: Plan
) -> str:
    """Digests the compiler's input and its version; CUDA's plugin has the version of JAX."""
    devices = plan.mesh.devices.flat
    gpu = _known.of_device_kind(devices[0].device_kind)
    config = jax.config.values.items()
    parts = [
        lowered.as_text(debug_info=lines),
        sorted(options.items()),
        os.environ.get("XLA_FLAGS", ""),
        sorted((k, v) for k, v in config if isinstance(v, bool | int | float | str)),
        [devices[0].device_kind, gpu.target_config() if gpu else ""],
        [(device.id, device.process_index) for device in devices],
        [jax.__version__, jaxlib.__version__, zerojax.__version__],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read(file: pathlib.Path) -> KeptProgram | None:
    """Reads a program; None if it is missing or damaged."""
    with contextlib.suppress(OSError, zlib.error, ValueError, TypeError):
        program = KeptProgram(**json.loads(zlib.decompress(file.read_bytes())))
        os.utime(file)  # the files that were not read for longest go first
        return program


def _write(file: pathlib.Path, program: KeptProgram) -> None:
    """Writes a program, or where that is not possible, nothing. Removes the files that were not
    read for longest, until the rest take no more than `MOST_BYTES`."""
    kept = {k: v for k, v in vars(program).items() if k not in ("recipe", "written")}
    beside = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        stack.callback(beside.unlink, missing_ok=True)
        beside.write_bytes(zlib.compress(json.dumps(kept).encode()))
        os.replace(beside, file)
        total = 0
        for path in sorted(file.parent.glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_mtime):
            total += path.stat().st_size
            if path != file and total > MOST_BYTES:
                path.unlink(missing_ok=True)
