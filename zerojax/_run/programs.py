"""JAX's cache of compiled programs, in a folder of the user's.

Of several processes, JAX has only the first one write. On CPUs only that one reads, too: JAX's keys
have the topology in them, which XLA writes otherwise in each process there.
"""

import functools
import os
import pathlib
import stat
import sys

import jax

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
