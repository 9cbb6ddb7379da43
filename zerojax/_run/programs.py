"""JAX's cache of compiled programs, in a folder of the user's.

[Note: whose programs several processes load]
Of several processes, JAX has only process 0 write. On GPUs all load what it wrote: JAX's keys are
the same in all. On CPUs only process 0 does: the keys have XLA's topology in them, which there has
the devices of one process.

In a folder of its own, another process has nothing to load. On GPUs it would hang: XLA tunes the
matmuls of a program in all processes together, and one that compiles waits a day for the results of
process 0, which has loaded the program and tunes nothing. So `keep_together` has all load or none.
"""

import contextlib
import functools
import os
import pathlib
import stat
import sys

import jax

from zerojax import _compat
from zerojax._run import agreement as _agreement
from zerojax._warn import warn

VARIABLE = "ZEROJAX_CACHE"  # names another folder, or none
REMEDY = f"Remove it; or chmod 700 it, if it is yours; or {VARIABLE}=..., a folder of yours."
LEAST_SECONDS = 0.1  # that a kept program took to compile; by default JAX keeps those of a second


def folder() -> pathlib.Path | None:
    """Returns where compiled programs are kept: in `ZEROJAX_CACHE`, nowhere if that is empty, or in
    a folder of the user's cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = os.environ.get(VARIABLE, os.path.join(caches, "zerojax"))
    try:
        return pathlib.Path(path).expanduser() if path else None
    except RuntimeError:  # there is no home
        return None


def open_to_others(*paths: str | os.PathLike[str]) -> str:
    """Says who else can write to the first of these files or folders for which that is so."""
    for path in paths if os.name == "posix" else ():
        there = os.stat(path) if os.path.exists(path) else None
        if there is not None and there.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {there.st_uid}"
        if there is not None and there.st_mode & stat.S_IWOTH:
            return f"everyone can write to {path} (mode {stat.S_IMODE(there.st_mode):o})"
    return ""


def usable(*paths: pathlib.Path) -> bool:
    """Makes the folders of a cache, if need be. Warns, and returns False, where others can write
    there, because what is there is run, or where a folder that the user names cannot be made."""
    try:
        for path in paths:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = open_to_others(*paths)
    except OSError as error:  # a home that is not there, or is not ours
        if VARIABLE in os.environ:
            warn(f"{VARIABLE}={os.environ[VARIABLE]}: compiled programs are not kept ({error}).")
        return False
    if others:
        warn(f"compiled programs are not kept: {others}, and what is there is run. {REMEDY}")
    return not others


@functools.cache
def keep() -> None:
    """Has JAX keep what it compiles, so that another process loads it, where the user has not
    decided it. Says so when it makes the folder."""
    caches = folder()
    decided = jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache
    if caches is None or decided:
        return
    path = caches / "programs"
    is_new = not os.path.isdir(path)
    if not usable(caches, path):
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:  # JAX's default
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    if is_new and jax.process_index() == 0:
        print(
            f"zerojax: compiled programs are kept in {path}, and loaded by later runs. "
            f"{VARIABLE}=... names another folder than {caches}, {VARIABLE}= none.",
            file=sys.stderr,
        )


def keep_together() -> None:
    """Has JAX keep what several processes compile, where all see the folder. Warns where not."""
    keep()
    run, path = _compat.run_of_processes(), jax.config.jax_compilation_cache_dir or ""
    if run.num_processes == 1:
        return
    mark = pathlib.Path(path, f"{run.coordinator_address}.run".replace(":", "-"))
    if run.process_id == 0 and path and "://" not in path:
        with contextlib.suppress(OSError):  # JAX warns where it cannot write
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(os.urandom(8).hex())
    together = functools.partial(_agreement.agree, "the cache of programs", ordered=False)
    together(dict)  # process 0 has written
    try:
        together(lambda: {"the mark": mark.read_text() if mark.exists() else path})
    except ValueError:
        jax.config.update("jax_compilation_cache_dir", None)
        if run.process_id == 0:
            hidden = f"writes them to {path}, which another process does not see"
            why = hidden if path else "has no folder for them, and another process has one"
            warn(
                f"compiled programs are not kept: process 0 {why}. {VARIABLE}=... names a folder "
                "that all hosts share."
            )
    if run.process_id == 0:
        mark.unlink(missing_ok=True)
