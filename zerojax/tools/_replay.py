"""`zerojax.tools.replay`: runs a step twice on the same state, and compares all bits.

Gains an error, and the name of a device, where a run would go on with wrong weights. It leaves the
step's own program as it is: a program of its own, made from the step, checks. Costs that program,
and two runs of it for each k-th step.

A wrong number in one loss is, after the sum over the devices, in the state of all of them. Two runs
of one step agree up to the first collective to which some device sends something else. So each has
a checksum of what each device sends, for which it reads the gradients once more.
"""

import dataclasses
import functools
import json
import math
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax import _axis_types, _compat
from zerojax._declared import check_count, checked
from zerojax._jaxprs import Eqn, Inliner, is_call, read
from zerojax._loss.arguments import find_plan
from zerojax._run import agreement as _agreement
from zerojax._specs import names_in
from zerojax._state import state as _state
from zerojax._step.compiled import CompiledStep
from zerojax._step.jitted import Step
from zerojax._step.step import train_step
from zerojax._table import few
from zerojax._types import Device, PyTree, is_key, kinds_of

# -- which device computed something else, decided from checksums, alike in every process

MOST_NAMED = 4  # leaves and devices that a message names before it counts the rest
DETERMINISTIC = "xla_gpu_exclude_nondeterministic_ops"
NOT_DETERMINISTIC = (
    "Three runs gave three results, so the program is not deterministic. On GPUs scatters and some "
    "attention kernels sum in any order. The program that checks is compiled with "
    f"{DETERMINISTIC}=True. If your compiler_options= turn that off, or a kernel of yours sums so, "
    "nothing can be compared. A callback that returns another number each time does the same."
)


class ReplayError(RuntimeError):
    """A step ran twice, and its results differ. Every process raises it, with the same message.

    `devices` are those that computed something else; if the fault had spread before anything could
    be seen, they are all that it reached. `leaves` are the paths of the results that differ.
    """

    def __init__(self, message: str, devices: Iterable[Device], leaves: Iterable[str]) -> None:
        super().__init__(message)
        self.devices, self.leaves = tuple(devices), tuple(leaves)


class Checksums(NamedTuple):
    """What is kept of one run, alike in all processes.

    A row for each device of the mesh has checksums of what it sent, in the order of the program's
    collectives, and of its part of each result. `results` has their paths and shardings.
    """

    rows: np.ndarray
    results: Sequence[tuple[str, PartitionSpec]]


def _spec_of(value: jax.Array) -> PartitionSpec:
    place = value.sharding
    return place.spec if isinstance(place, NamedSharding) else PartitionSpec()


def _unlike_copies(run: Checksums, mesh: Mesh) -> tuple[np.ndarray, list[str]]:
    """Returns which devices hold another copy than most others do (all, if there is no most), and
    the results of which they do."""
    odd, leaves = np.zeros(mesh.size, bool), []
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    held = run.rows.T[-len(run.results) :]
    for (path, spec), checksums in zip(run.results, held, strict=True):
        names = names_in(spec)
        over = [at for at, axis in enumerate(mesh.axis_names) if axis in names]
        ways = math.prod(mesh.devices.shape[at] for at in over)
        # A row for each part of the result: the devices that hold it.
        holders = np.moveaxis(numbers, over, range(len(over))).reshape(ways, -1)
        unlike = (checksums[holders] != checksums[holders[:, :1]]).any(axis=1)
        for devices in holders[unlike]:
            (usual, count), (_, others), *_ = Counter(checksums[devices].tolist()).most_common()
            odd[devices] |= (checksums[devices] != usual) | (count == others)
        leaves += [path] * bool(unlike.any())
    return odd, leaves


def _error(
    runs: Sequence[Checksums], labels: Sequence[str], hosts: Mapping[int, str], mesh: Mesh
) -> ReplayError:
    """Returns what all processes raise, from three runs.

    `labels` name the collectives. `hosts` has, for each process, its host and the numbers of its
    devices there.
    """
    first, second, third = (run.rows for run in runs)
    is_first, is_second = np.array_equal(first, third), np.array_equal(second, third)
    differ = (second if is_first else first) != third
    sent, held = np.split(differ, [len(labels)], axis=1)
    leaves = [path for (path, _), k in zip(runs[2].results, held.any(axis=0), strict=True) if k]
    vote = " A third run gives another result again."
    if np.array_equal(first, second):
        odd, leaves = _unlike_copies(runs[1], mesh)
        whose, vote = "its copy" if odd.sum() == 1 else "their copies", ""
        where = f"in {whose} of {few(leaves, MOST_NAMED)}, in both runs"
    # Up to the first collective that differs, all devices have received the same in both runs, so
    # these computed something else. If they have sent the same throughout, it is the update.
    elif sent.any():
        at = int(sent.any(axis=0).argmax())
        odd, where = sent[:, at], f"first in what it sends to the {labels[at]}"
    else:
        odd, where = held.any(axis=1), f"first in what the step leaves of {few(leaves, MOST_NAMED)}"
    if vote and (is_first or is_second):
        vote = f" A third run gives what the {'first' if is_first else 'second'} gave."
    elif vote and odd.sum() > mesh.size // 2:
        vote = f" {NOT_DETERMINISTIC}"
    names = []
    for device in mesh.devices.ravel()[odd]:
        host, numbers = json.loads(hosts[device.process_index])
        here = f"{device.device_kind} {numbers[str(device.id)]}"
        names.append(f"device {device.id} (process {device.process_index} on {host}, {here})")
    verb, many = ("differs", "it") if len(names) == 1 else ("differ", "them")
    remedy = f": save it, and go on without {many}" if len(names) < mesh.size else ""
    if len(names) == mesh.size > 1:
        names = [f"all {mesh.size} devices"]
    return ReplayError(
        f"a step ran twice on the same state and batch, and {few(names, MOST_NAMED)} {verb} "
        f"{where}.{vote} The state before the step is as it was{remedy}.",
        mesh.devices.ravel()[odd],
        leaves,
    )


# -- what each device of a step sends to the others, as a checksum for each collective

GOLDEN = np.uint32(0x9E3779B1)  # odd, so that multiplying by it loses nothing
Closed: TypeAlias = tuple[Jaxpr, Sequence[ArrayLike]]  # a jaxpr and its constants
Witnessed: TypeAlias = tuple[list[Array], list[Array]]  # outputs, and checksums


@dataclasses.dataclass(frozen=True)
class Witness:
    """Runs the jaxpr of a step, and sums up the bits of each operand of its collectives.

    A program under `shard_map` returns its checksums as an array with a row for each device.
    Checksums of a loop are sums over its turns.
    """

    mesh: Mesh

    def labels(self, jaxpr: Jaxpr) -> list[str]:
        """Returns the names of the collectives, in the order of their checksums."""
        labels = []
        for eqn in filter(_sends, _flat(jaxpr)[0]):
            if body := self.body(eqn):
                labels += self.labels(body[0])
            elif _is_of_device(eqn):
                labels.append(_label(eqn))
        return labels

    def run(self, closed: Closed, inputs: Sequence[Array]) -> Witnessed:
        jaxpr, consts = closed
        eqns, inliner = _flat(jaxpr)
        variables, sums = [*jaxpr.invars, *jaxpr.constvars], list[Array]()
        env = inliner.constants | dict(zip(variables, [*inputs, *consts], strict=True))

        for eqn in eqns:
            values, sends = read(env, eqn.invars), _sends(eqn)
            if sends and (body := self.body(eqn)):
                run = getattr(self, f"run_{eqn.primitive.name}")
                with jax.named_scope(str(eqn.source_info.name_stack) or eqn.primitive.name):
                    outs, more = run(eqn, body, values)
                sums += more
            else:
                if sends and _is_of_device(eqn):
                    # Not fused with what makes an operand, so that this stays as it is.
                    operands = lax.optimization_barrier(values)
                    sums.append(sum(map(_of_bits, operands), jnp.uint32(0)))
                outs = _compat.bind(eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return read(env, map(inliner.named, jaxpr.outvars)), sums

    def body(self, eqn: JaxprEqn) -> Closed | None:
        """Returns the jaxpr whose collectives have checksums of their own."""
        match eqn.primitive.name:
            case "scan" | "while":
                return _compat.inner_jaxpr(eqn)
            case "shard_map" if not _is_of_device(eqn):
                is_of_step = Eqn(eqn).mesh.shape == self.mesh.shape
                return _compat.inner_jaxpr(eqn) if is_of_step else None

    def run_shard_map(self, eqn: JaxprEqn, body: Closed, values: list[Array]) -> Witnessed:
        params, manual = Eqn(eqn), Eqn(eqn).newly_manual_axes
        rows = PartitionSpec(tuple(axis for axis in self.mesh.axis_names if axis in manual))

        def of_device(*inputs: Array) -> tuple[list[Array], Array]:
            outs, sums = self.run(body, inputs)
            return outs, jnp.array(sums, jnp.uint32)[None]

        outs, sums = jax.shard_map(
            of_device,
            mesh=params.mesh,
            in_specs=params.in_specs,
            out_specs=(list(params.out_specs), rows),
            axis_names=manual,
            check_vma=False,
        )(*values)
        return outs, [lax.with_sharding_constraint(sums, NamedSharding(self.mesh, rows))]

    def run_scan(self, eqn: JaxprEqn, body: Closed, values: list[Array]) -> Witnessed:
        fixed, init, xs = Eqn(eqn).parts(values)

        def turn(carry: list, xs: list) -> tuple[list, Witnessed]:
            outs, sums = self.run(body, [*fixed, *carry, *xs])
            return outs[: len(init)], (outs[len(init) :], sums)

        carry, (ys, sums) = lax.scan(turn, init, xs, **Eqn(eqn).options)
        return [*carry, *ys], [jnp.sum(turns, axis=0, dtype=jnp.uint32) for turns in sums]

    def run_while(self, eqn: JaxprEqn, body: Closed, values: list[Array]) -> Witnessed:
        condition = _compat.opened(Eqn(eqn).cond_jaxpr)
        of_condition, of_body, init = Eqn(eqn).parts(values)

        def turn(carry: Witnessed) -> Witnessed:
            outs, sums = self.run(body, [*of_body, *carry[0]])
            return outs, list(map(jnp.add, carry[1], sums))

        def goes_on(carry: Witnessed) -> Array:
            return self.run(condition, [*of_condition, *carry[0]])[0][0]

        _, sums = jax.eval_shape(lambda *inputs: self.run(body, inputs), *of_body, *init)
        zeros = [jnp.zeros(each.shape, each.dtype) for each in sums]
        return lax.while_loop(goes_on, turn, (init, zeros))


def _flat(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], Inliner]:
    """Returns the equations, with those of calls that send in place of the calls."""
    inliner = Inliner()
    return list(inliner.flat(jaxpr.eqns, lambda eqn: is_call(eqn) and _sends(eqn))), inliner


def _sends(eqn: JaxprEqn) -> bool:
    """Whether an equation speaks to other devices, at any depth."""
    if inner := _compat.inner_jaxprs(eqn):
        return any(map(_sends, (each for jaxpr in inner for each in jaxpr.eqns)))
    return _compat.names_an_axis(eqn) and eqn.primitive.name != "axis_index"


def _is_of_device(eqn: JaxprEqn) -> bool:
    """Whether an equation is of the program of one device, under `shard_map`."""
    return bool(eqn.ctx.cur_abstract_mesh.manual_axes)


def _label(eqn: JaxprEqn) -> str:
    """Returns the name of a collective, and of the parameters that the engine names it after."""
    stack = str(eqn.source_info.name_stack)
    scope = re.sub(r"\b(jvp|transpose|vmap)\(|\)", "", stack).strip("/")
    when = " in backward" if "transpose(" in stack else ""
    return f"{eqn.primitive.name}{scope and f' of {scope}'}{when}"


def _of_bits(value: Array) -> Array:
    """Returns a checksum of all bits of an array, which differs if one element does."""
    if is_key(value):
        value = jax.random.key_data(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return _of_bits(jnp.real(value)) + GOLDEN * _of_bits(jnp.imag(value))
    words = _words(value)
    place = jnp.zeros((), jnp.uint32)
    for dim, size in enumerate(words.shape):
        place = place * np.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    # Each step can be undone, so that a changed element changes its term, and the sum.
    mixed = (words ^ (place * GOLDEN)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def _words(value: Array) -> Array:
    """Returns the bits of an array in unsigned integers of 32 bits, two for each of 64."""
    dtype = value.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        narrow = {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, jnp.uint32)
        value = lax.bitcast_convert_type(value, narrow)
    elif dtype.itemsize == 8:
        value = lax.bitcast_convert_type(value, jnp.uint32)
    return value.astype(jnp.uint32)


# -- a step that checks the devices

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
    check_count(every, "every", "the first call checks, and each so many later ones")
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
        more = {**(schedule.compiler_options or {}), DETERMINISTIC: True}
        schedule = dataclasses.replace(schedule, compiler_options=more)
    options = dataclasses.replace(options, donate=False, schedule=schedule)
    kept = train_step(step.recipe.loss_fn, **vars(options))

    def checking(state: PyTree, batch: PyTree, rng: PyTree = None) -> tuple:
        witness = Witness(find_plan(state, step.recipe.options.plan).mesh)
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
        plan = find_plan(args[0] if args else named.get("state"), self.step.recipe.options.plan)
        call = functools.partial(self.run, plan.mesh, *args, **named)
        first, second = call(), call()
        odd, _ = _unlike_copies(second, plan.mesh)
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
        raise _error(runs, labels, hosts, plan.mesh)

    def run(self, mesh: Mesh, *args: PyTree, **named: PyTree) -> Checksums:
        """Returns what is left of one run: checksums, and of what they are."""
        new, metrics, sent = self.checking(*args, **named)
        leaves = _state.leaves_with_paths(new) + _state.leaves_with_paths({"metrics": metrics})
        leaves = sorted(leaves, key=lambda leaf: _compat.is_on_host(leaf.value))
        near = [leaf.value for leaf in leaves if not _compat.is_on_host(leaf.value)]
        # What rests on the host comes to the device one by one.
        rows = [_checksums(sent, near, mesh)]
        rows += [_checksums([], [leaf.value], mesh) for leaf in leaves[len(near) :]]
        results = [(leaf.name, _spec_of(leaf.value)) for leaf in leaves]
        return Checksums(np.hstack(rows), results)


def _checksums(sent: list[Array], held: list[Array], mesh: Mesh) -> np.ndarray:
    """Returns a row for each device: its part of `sent`, and checksums of its parts of `held`."""
    specs = tuple(map(_spec_of, sent)), tuple(map(_spec_of, held))
    return np.asarray(_rows(tuple(sent), tuple(held), specs, mesh))


@functools.partial(jax.jit, static_argnums=(2, 3))
@_axis_types.auto_axes()
def _rows(sent: PyTree, held: PyTree, specs: tuple, mesh: Mesh) -> Array:
    def row(sent: Sequence[Array], held: Sequence[Array]) -> Array:
        sums = jnp.array([*map(_of_bits, held)], "uint32")
        return jnp.concatenate([*map(jnp.ravel, sent), sums])[None]

    rows = PartitionSpec(mesh.axis_names)
    program = jax.shard_map(row, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    near = map(_compat.fetched, _axis_types.computed_with(held))
    checksums = program(_axis_types.computed_with(sent), tuple(near))
    # On all devices, so that every process reads them.
    return lax.with_sharding_constraint(checksums, NamedSharding(mesh, PartitionSpec()))
