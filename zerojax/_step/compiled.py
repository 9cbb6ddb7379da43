"""Compiled steps: made before the loop, kept in files, and loaded by other processes.

Gains, where a step is loaded, all of XLA's time: a restart traces and does not compile, and one
host compiles for all others. Costs 160 lines of code.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.core import Tracer
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

from zerojax._loss import arguments as _arguments
from zerojax._plan import expert as _expert, move as _move, padding as _padding
from zerojax._plan.plan import Plan
from zerojax._run import programs as _programs
from zerojax._run.agreement import Known
from zerojax._state import refusals as _refusals
from zerojax._types import PyTree

FIRST_LINE = b"zerojax step\n"
LONGEST = 300  # characters of a fact: of longer ones, or of several lines, a digest is kept
PROGRAM = "the program"
# What no other fact tells.
IN_THE_PROGRAM = (
    "the loss, a constant of it or of the optimizer, such as the learning rate, the types of the "
    "mesh's axes, where the batch is, or a setting of JAX"
)
Facts = dict[str, str]  # what a program depends on, each as text that a digest may stand for


class Replays(Protocol):
    """What `zerojax.tools.replay` has run before a call of a step, on its arguments."""

    def __call__(self, *args: PyTree, **named: PyTree) -> None: ...

    def compiled(self, args: Sequence[PyTree]) -> "Replays":
        """Returns the same for a compiled step, whose calls have a count of their own."""
        ...


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that is compiled for one state and one shape of batches, and called like the step."""

    executable: jax.stages.Compiled
    plan: Plan
    facts: Facts
    known: Known | None  # a call that all processes have compared
    program: bytes = b""  # from a file: JAX may not write again what it has loaded
    replays: Replays | None = None

    def __repr__(self) -> str:
        device = self.plan.mesh.devices.flat[0].device_kind
        return f"<zerojax compiled step for {self.plan.mesh.size} x {device}>"

    def __call__(self, state: PyTree, *args: PyTree) -> PyTree:
        """Runs the step on `(state, batch[, rng])`."""
        if self.replays is not None:
            self.replays(state, *args)
        with _arguments.explained((state, *args), {}, self.plan):
            leaves = jax.tree.leaves(state)
            self.plan._compare_new(leaves)
            if self.known is not None:
                self.known()
            if self.executable.donate_argnums:
                _refusals.check_distinct(leaves, state)
            args = _move.own(args, self.plan.mesh.devices.flat)
            (_, *places), _ = self.executable.input_shardings
            args = jax.device_put(args, tuple(places))
            return at_rest(self.executable(state, *args), self.plan)

    def as_text(self) -> str:
        return self.executable.as_text() or ""

    def memory_analysis(self) -> Any:
        return self.executable.memory_analysis()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the step to a file, from which the step's `load` takes it in another process.

        Where there are several processes, the first one writes, on a file system that all read.
        """
        if jax.process_index() > 0:
            return
        program = self.program or _serialized(self.executable)
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)  # it may have taken minutes to compile
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        header = json.dumps([_digest(program), self.facts]).encode()
        try:
            beside.touch(0o644)  # whatever the umask: a file that all can write to is not loaded
            beside.write_bytes(FIRST_LINE + header + b"\n" + program)
            os.replace(beside, file)  # all of it, or nothing
        finally:
            beside.unlink(missing_ok=True)


def at_rest(results: PyTree, plan: Plan | None) -> PyTree:
    """Returns `(state, metrics)`, and what a check adds to it, where each array of the state says
    that it is where it is, and padded ones are known. Watches how experts fill their rooms.

    On meshes with Auto and Explicit axes, JAX says "device" of arrays that are in host memory.
    """
    if plan is None or not isinstance(results, tuple):
        return results

    def named(leaf: PyTree, place: NamedSharding) -> PyTree:
        if isinstance(leaf, Tracer) or leaf.sharding.memory_kind == place.memory_kind:
            return leaf
        parts = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, place, parts)

    state, metrics, *sent = results
    if plan._offloads and len({*(plan._given_mesh or plan.mesh).axis_types}) > 1:
        leaves, treedef = jax.tree.flatten(state)
        state = treedef.unflatten(map(named, leaves, plan._shardings))
    _padding.remember_state(state, plan)
    if plan.experts:
        _expert.watch(plan.experts, metrics)
    return state, metrics, *sent


def _serialized(executable: jax.stages.Compiled) -> bytes:
    try:
        return serialize_executable.serialize(executable)[0]
    # What pickle raises for functions, and JAX for what it cannot write yet.
    except (AttributeError, TypeError, pickle.PicklingError, NotImplementedError) as error:
        raise ValueError(
            f"JAX cannot write this step to a file ({error}). Take callbacks out of the loss "
            "(jax.debug.print, jax.pure_callback): they are functions of this process."
        ) from error


def read(path: str | os.PathLike[str]) -> tuple[Facts, bytes]:
    """Returns what the step in a file depends on, and its program."""
    write = "step.compile(state, batch).save(path)."
    try:
        others = _programs.open_to_others(path)
        data = b"" if others else pathlib.Path(path).read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no compiled step is at {path}. Write it: {write}") from error
    if others:
        raise ValueError(
            f"{others}, and a compiled step holds code, which loading it runs. If you trust it, "
            f"load a copy that is yours alone: install -m 600 {path} step.bin"
        )
    if not data.startswith(FIRST_LINE):
        raise ValueError(f"{path} is not a compiled step. Write one: {write}")
    header, _, program = data.removeprefix(FIRST_LINE).partition(b"\n")
    try:
        digest, facts = json.loads(header)
    except ValueError:
        digest, facts = "", {}
    if digest != _digest(program):  # XLA crashes where it loads one
        raise ValueError(f"{path} is damaged. Write it again: {write}")
    return facts, program


def loaded(
    path: str | os.PathLike[str],
    written: Facts,
    program: bytes,
    lowered: jax.stages.Lowered,
    plan: Plan,
    facts: Facts,
    known: Known | None,
) -> CompiledStep:
    """Returns the step in a file. Raises where it depends on other facts than these."""
    differ = [name for name in {**written, **facts} if written.get(name) != facts.get(name)]
    if differ:
        both = [(k, written.get(k, "nothing"), facts.get(k, "nothing")) for k in differ]
        lines = [f"\n  {name}: {there} there, {here} here" for name, there, here in both]
        if differ == [PROGRAM]:
            lines.append(f" ({IN_THE_PROGRAM})")
        raise ValueError(
            f"{path} has a step that was compiled for something else:{''.join(lines)}\nCompile it "
            "here: step.compile(state, batch).save(path)."
        )
    devices = list(plan.mesh.devices.flat)
    executable = serialize_executable.deserialize_and_load(
        program, lowered.in_tree, lowered.out_tree, devices[0].client, devices
    )
    return CompiledStep(executable, plan, facts, known, program=program)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def short(facts: Facts) -> Facts:
    """Returns facts with a digest in place of what is long."""

    def one(text: str) -> str:
        is_long = len(text) > LONGEST or "\n" in text
        return _digest(text.encode()) if is_long else text

    return {name: one(text) for name, text in facts.items()}
