"""JAX's cache of compiled programs, in a folder of the user's.

Of several processes, JAX has only the first one write. On CPUs only that one reads, too: JAX's keys
have the topology in them, which XLA writes otherwise in each process there.
"""

import functools
import os
import pathlib
import sys

import jax

from zerojax._warn import warn

VARIABLE = "ZEROJAX_CACHE"  # names another folder, or none
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


def programs_folder() -> pathlib.Path | None:
    """Returns where JAX is to keep what steps compile to, if anywhere."""
    path = folder()
    return path and path / "programs"


@functools.cache
def keep() -> None:
    """Has JAX keep what it compiles, so that another process loads it, where the user has not
    decided it. Says so when it makes the folder."""
    path = programs_folder()
    decided = jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache
    if path is None or decided:
        return
    is_new = not path.is_dir()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # what is there is run
    except OSError as error:  # a home that is not there, or is not ours
        if VARIABLE in os.environ:
            warn(f"{VARIABLE}={os.environ[VARIABLE]}: compiled programs are not kept ({error}).")
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:  # JAX's default
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    if is_new and jax.process_index() == 0:
        print(
            f"zerojax: compiled programs are kept in {path}, and loaded by later runs. "
            f"{VARIABLE}=... names another folder than {path.parent}, {VARIABLE}= none.",
            file=sys.stderr,
        )
