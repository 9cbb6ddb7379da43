"""`zerojax.tools.replay`: runs a step twice on the same state, and compares all bits.

Gains an error, and the name of a device, where a run would go on with wrong weights. It leaves the
step's own program as it is. Costs a second program, and two runs of it for each k-th step.
"""

import dataclasses
import functools
import json
import socket
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import _axis_types, _compat
from zerojax._declared import checked
from zerojax._loss.arguments import find_plan
from zerojax._run import agreement as _agreement
from zerojax._state import state as _state
from zerojax._step.compiled import CompiledStep
from zerojax._step.jitted import Step
from zerojax._step.step import train_step
from zerojax._types import PyTree, kinds_of
from zerojax.tools._replay import blame as _blame
from zerojax.tools._replay.blame import Checksums
from zerojax.tools._replay.witness import Witness, of_bits

S = TypeVar("S")
CALL = "a replayed step"


@checked
def replay(step: S, *, every: int) -> S:
    """Returns a step that checks the devices: it runs some of its calls twice.

    Before the first call, and each `every`-th one after it, a program of its own runs the step
    twice, keeps the state, and compares all bits. Where they differ, every process raises
    `zerojax.tools.ReplayError` with the device that computed something else, and the state stays as
    it was. Such a call takes three times as long, and the memory of a second state.

    Arguments:
        step: a training step, of `zerojax.train_step` or `zerojax.nnx.train_step`. To compile the
            result, call its own `compile`, or `load`.
        every: from one call that checks to the next.

    Example:
        >>> state = TrainState.create(
        ...     apply_fn=None, params={"w": jnp.ones((64, 16))}, tx=optax.adam(1e-2))
        >>> state = zerojax.shard_train_state(state, stage=3)
        >>> step = zerojax.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
        >>> step = zerojax.tools.replay(step, every=100)
        >>> state, metrics = step(state, jnp.ones((32, 64)))
        >>> print(metrics["loss"])
        4096.0
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            f"every={every!r} must be 1 or more: the first call and each so many later ones check."
        )
    source: PyTree = step
    if hasattr(source, "pure"):  # of nnx
        return type(source)(replay(source._functional, every=every))
    if not isinstance(source, Step) or not source.recipe.options.differentiates:
        raise TypeError(
            f"step={step!r} is no training step. Pass one of zerojax.train_step or "
            "zerojax.nnx.train_step that is not compiled yet, and compile the result."
        )
    if source.replays is not None:
        raise TypeError(
            f"step={step!r} checks the devices already. Pass the step that it was made from."
        )
    source = Step(
        source._function, source.recipe, source.notes, Checks(every, source, _checking(source))
    )
    return source


def _checking(step: Step) -> Step:
    """Returns what checks: a step that donates nothing, and sums up what devices send."""
    options, schedule = step.recipe.options, step.recipe.options.schedule
    # Without a GPU to try kernels on, XLA has no deterministic matmul to choose.
    if jax.default_backend() == "gpu":
        more = {**(schedule.compiler_options or {}), _blame.DETERMINISTIC: True}
        schedule = dataclasses.replace(schedule, compiler_options=more)
    options = dataclasses.replace(options, donate=False, schedule=schedule)
    kept = train_step(step.recipe.loss_fn, **vars(options))

    def checking(state: PyTree, batch: PyTree, rng: PyTree = None) -> tuple:
        witness = Witness(find_plan(state, step.recipe.plan).mesh)
        args = state, batch, rng
        closed, shapes = jax.make_jaxpr(kept._function, return_shape=True)(*args)
        with _axis_types.auto_axes():
            outs, sums = witness.run(_compat.opened(closed), jax.tree.leaves(args))
        return *jax.tree.structure(shapes).unflatten(outs), sums

    return Step(checking, kept.recipe, {})


@dataclasses.dataclass
class Checks:
    """Checks the first call, and each `every`-th one after it."""

    every: int
    step: Step
    checking: Step | CompiledStep
    calls: int = 0

    def __call__(self, *args: PyTree, **named: PyTree) -> None:
        """Runs the step on these arguments, twice; raises `ReplayError` where that differs."""
        if any(issubclass(kind, Tracer) for kind in kinds_of((args, named))):
            raise ValueError(
                "a replayed step compares the results of two runs, and inside another jax.jit "
                "there are none. Call it outside, or call the step without "
                "zerojax.tools.replay there."
            )
        if self.calls % self.every == 0:
            self.check(*args, **named)
        self.calls += 1  # one that is refused is no call

    def compiled(self, args: Sequence[PyTree]) -> "Checks":
        """Returns the checks of a compiled step, whose calls have a count of their own."""
        return dataclasses.replace(self, checking=_checking(self.step).compile(*args), calls=0)

    def check(self, *args: PyTree, **named: PyTree) -> None:
        plan = find_plan(args[0] if args else named.get("state"), self.step.recipe.plan)
        call = functools.partial(self.run, plan.mesh, *args, **named)
        first, second = call(), call()
        odd, _ = _blame.unlike_copies(second, plan.mesh)
        is_alike = np.array_equal(first.rows, second.rows) and not odd.any()
        # Processes that disagree would wait for each other in the third run.
        if {*_agreement.told(CALL, str(is_alike), plan.mesh).values()} == {str(True)}:
            return
        runs = first, second, call()
        # What only the process of a device knows of it.
        numbers = {str(device.id): device.local_hardware_id for device in jax.local_devices()}
        host = json.dumps([socket.gethostname(), numbers])
        hosts = _agreement.told(CALL, host, plan.mesh)
        labels = Witness(plan.mesh).labels(self.step.trace(*args, **named).jaxpr.jaxpr)
        raise _blame.error(runs, labels, hosts, plan.mesh)

    def run(self, mesh: Mesh, *args: PyTree, **named: PyTree) -> Checksums:
        """Returns what is left of one run: checksums, and of what they are."""
        new, metrics, sent = self.checking(*args, **named)
        leaves = _state.leaves_with_paths(new) + _state.leaves_with_paths({"metrics": metrics})
        leaves = sorted(leaves, key=lambda leaf: _compat.is_on_host(leaf.value))
        near = [leaf.value for leaf in leaves if not _compat.is_on_host(leaf.value)]
        # What rests on the host comes to the device one by one.
        rows = [_checksums(sent, near, mesh)]
        rows += [_checksums([], [leaf.value], mesh) for leaf in leaves[len(near) :]]
        results = [(leaf.name, _blame.spec_of(leaf.value)) for leaf in leaves]
        return Checksums(np.hstack(rows), results)


def _checksums(sent: list[Array], held: list[Array], mesh: Mesh) -> np.ndarray:
    """Returns a row for each device: its part of `sent`, and checksums of its parts of `held`."""
    specs = tuple(map(_blame.spec_of, sent)), tuple(map(_blame.spec_of, held))
    return np.asarray(_rows(tuple(sent), tuple(held), specs, mesh))


@functools.partial(jax.jit, static_argnums=(2, 3))
@_axis_types.auto_axes()
def _rows(sent: PyTree, held: PyTree, specs: tuple, mesh: Mesh) -> Array:
    def row(sent: Sequence[Array], held: Sequence[Array]) -> Array:
        sums = jnp.array([*map(of_bits, held)], "uint32")
        return jnp.concatenate([*map(jnp.ravel, sent), sums])[None]

    rows = PartitionSpec(mesh.axis_names)
    program = jax.shard_map(row, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    near = map(_compat.fetched, _axis_types.computed_with(held))
    checksums = program(_axis_types.computed_with(sent), tuple(near))
    # On all devices, so that every process reads them.
    return lax.with_sharding_constraint(checksums, NamedSharding(mesh, PartitionSpec()))
