"""`zerojax.verify(plan=)`: a plan for devices that are not here, rehearsed on a few that are.

Each leaf of a small model is placed as the plan places the large one's: over the same axes, along
the same dimension, in the same memory. Gains a check of the plan before 400 GPUs are rented. Costs
220 lines of code.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import Jaxpr
from jax.sharding import AxisType, Mesh

from zerojax import _compat, aot
from zerojax._jaxprs import Eqn, type_of
from zerojax._kernel.places import LeafPlan
from zerojax._loss import batch as _batch
from zerojax._plan import planner as _planner
from zerojax._plan.encodings import NEIGHBOURS
from zerojax._plan.plan import Plan
from zerojax._plan.roles import SCALES, roles_of
from zerojax._progress import working
from zerojax._specs import Axes, axes_size, beyond, names_in
from zerojax._state import state as _state
from zerojax._state.state import is_state_function, state_of
from zerojax._step.step import Step, train_step
from zerojax._step.step_options import LossOptions
from zerojax._table import few
from zerojax._types import PyTree
from zerojax.tools._verify.compare import WRONG, Check

IN_PLAN, OF_COLLECTIVES = "plan", "collective"  # kinds of checks


def rehearsal(
    step: Any, source: PyTree, batch: PyTree, rng: PyTree, plan: Plan
) -> tuple[Step, PyTree, tuple[PyTree, ...], list[Check], list[str]]:
    """Places a small state by a large plan, on a mesh of the devices that are here.

    Returns a step, its state and its other arguments, and the checks and notes of the placement.
    """
    if hasattr(step, "pure"):
        step, source, _, rng = step._unmade(source, rng)
    if not isinstance(step, Step) or not step.recipe.options.differentiates:
        raise TypeError(
            "verify(plan=) takes a step of zerojax.train_step or zerojax.nnx.train_step: it runs "
            f"the step on another mesh, which a {type(step).__name__} of your own may not know."
        )
    options, args = step.recipe.options, (batch,) if rng is None else (batch, rng)
    shapes = jax.eval_shape(lambda: state_of(source)) if is_state_function(source) else source
    pairs = _counterparts(plan, shapes)
    mesh = _mesh_like(plan, pairs, args, options)
    small = _placed_like(plan, pairs, source, mesh, options.tx)
    changed: dict[str, Any] = vars(options) | {"plan": None if options.plan is None else small}
    if (schedule := options.schedule).prefetch == "auto":
        ahead = schedule.keep_layers > 1 or _compat.overlaps(plan.mesh.devices.flat[0])
        changed["schedule"] = dataclasses.replace(schedule, prefetch=ahead)
    here = train_step(step.recipe.loss_fn, **changed)
    checks, notes = _compared(plan, small)
    sizes = [", ".join(f"{axis}={n}" for axis, n in one.shape.items()) for one in (plan.mesh, mesh)]
    notes.insert(0, f"Ran on {sizes[1]} in place of {sizes[0]}, with the placements of that plan.")
    state = small.place(source)
    with working(f"verify: tracing the step for {plan.size} devices"):
        found, sent = _collectives(step, here, plan, small, state, args)
    return here, state, args, [*checks, *found], [*notes, *sent]


def _alike(path: str) -> str:
    """Returns a path with a star for each number, so that all layers have one."""
    return re.sub(r"\d+", "*", path)


def _counterparts(plan: Plan, state: PyTree) -> list[tuple[LeafPlan, _state.Leaf]]:
    """Returns leaves of a small state beside those of a large plan, if both have as many dims."""
    large = {leaf.path: leaf for leaf in plan.leaves}
    pairs = [(large.get(leaf.name), leaf) for leaf in _state.leaves_of(state)]
    return [(there, x) for there, x in pairs if there and len(there.shape) == np.ndim(x.value)]


def _compared(plan: Plan, small: Plan) -> tuple[list[Check], list[str]]:
    """Returns a check for each leaf that is placed otherwise than by the large plan, and notes."""
    there, here = ({leaf.path: leaf for leaf in each.leaves} for each in (plan, small))
    # A small model may have fewer layers: one of them stands for those that it lacks.
    by_star = {_alike(path): leaf for path, leaf in here.items()}
    roles = dict(zip(there, roles_of(plan._treedef.unflatten(plan.leaves)), strict=True))
    checks, narrow = [], []
    padded: dict[str, list[str]] = {"there and not here": [], "here and not there": []}
    for path in here | there:
        large, leaf = there.get(path), here.get(path, by_star.get(_alike(path)))
        odd = [*_unlike(large, leaf)]
        if odd and roles.get(path) == SCALES:
            narrow.append(path)
        else:
            checks += [_wrong(path, IN_PLAN, what) for what in odd]
        if large and leaf and path in here and large.update.dim is not None:
            pads = bool(large.update.padding), bool(leaf.update.padding)
            if pads[0] != pads[1]:
                padded["there and not here" if pads[0] else "here and not there"].append(path)
    notes = [
        f"Padded {where}: {few(paths)}. Other sizes of the small model would change that."
        for where, paths in padded.items()
        if paths
    ]
    if narrow:
        notes.append(
            f"Placed otherwise than there: {few(narrow)}. A row has a scale for each "
            f"{NEIGHBOURS} numbers: {small.size} devices share those of widths that "
            f"{NEIGHBOURS * small.size} divides."
        )
    return checks, notes


def _unlike(large: LeafPlan | None, small: LeafPlan | None) -> Iterator[str]:
    """Yields how the places of two leaves differ."""
    if large is None or small is None:
        yield f"the {'plan' if large is None else 'small state'} has no such leaf"
        return
    if len(large.shape) != len(small.shape) or large.dtype != small.dtype:
        yield f"{large.dtype}{list(large.shape)} there, {small.dtype}{list(small.shape)} here"
        return
    for name in ("rest", "near", "grad", "update"):
        there, here = (getattr(leaf, name) for leaf in (large, small))
        places = [p and dataclasses.replace(p.over(p.axes), padding=()) for p in (there, here)]
        if places[0] != places[1]:
            yield f"{name}: {there} there, {here} here"
    for name in ("stacked", "frozen"):
        if getattr(large, name) != getattr(small, name):
            yield f"{name}: {getattr(large, name)} there, {getattr(small, name)} here"


def _wrong(path: str, kind: str, what: str) -> Check:
    return Check(path, kind, np.inf, 0.0, 0.0, f"{WRONG}: {what}")


# -- the small plan


def _mesh_like(
    plan: Plan,
    pairs: Sequence[tuple[LeafPlan, _state.Leaf]],
    args: Sequence[PyTree],
    options: LossOptions,
) -> Mesh:
    """Returns a mesh of the same axes. Of those that fit, it is the one that pads most of the
    leaves that the plan pads, and the largest."""
    names = [axis for axis, n in plan.mesh.shape.items() if n > 1]
    devices = jax.local_devices()
    roles = _batch.roles(args, options.batch_specs, plan._splits)
    # A number that all devices here divide is one that some mesh of them does.
    padding = f", accumulate={options.accumulate}" if options.accumulate > 1 else ""
    ranked, refused = [], None
    counts = [range(2, min(plan.mesh.shape[axis], len(devices)) + 1) for axis in names]
    for sizes in itertools.product(*counts):
        shape = dict.fromkeys(plan.mesh.axis_names, 1) | dict(zip(names, sizes, strict=True))
        if math.prod(sizes) > len(devices):
            continue
        try:
            ways = math.prod(shape[axis] for axis in plan._splits.rows)
            _batch.check(args, roles, ways, options.accumulate, padding)
        except ValueError as error:
            refused = error
            continue
        unlike = _unlike_padding(pairs, shape, plan.batch_axes)
        if unlike is not None:
            ranked.append((unlike, -math.prod(sizes), [*shape.values()]))
    if not ranked:
        raise refused or ValueError(
            f"the plan's mesh has the axes {names}, and each needs 2 devices at least: "
            f"{2 ** len(names)}, of which {len(devices)} are here. Emulate them before JAX starts: "
            f"jax.config.update('jax_num_cpu_devices', {max(8, 2 ** len(names))})."
        )
    sizes = min(ranked)[-1]
    grid = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    return Mesh(grid, plan.mesh.axis_names, axis_types=(AxisType.Auto,) * grid.ndim)


def _unlike_padding(
    pairs: Sequence[tuple[LeafPlan, _state.Leaf]], sizes: Mapping[str, int], axes: Axes
) -> int | None:
    """Counts the leaves that would be padded only on one of two meshes; None where the user's own
    axes do not divide a leaf."""
    count = 0
    for there, leaf in pairs:
        entries = zip(np.shape(leaf.value), there.update.spec, strict=False)
        for dim, (length, entry) in enumerate(entries):
            over = math.prod(sizes[axis] for axis in names_in([entry]))
            if not names_in([entry]) & {*axes}:
                if length % over:
                    return None
            elif bool(length % over) != any(there.update.padding[dim : dim + 1]):
                count += 1
    return count


def _placed_like(
    plan: Plan,
    pairs: Sequence[tuple[LeafPlan, _state.Leaf]],
    source: PyTree,
    mesh: Mesh,
    tx: optax.GradientTransformation | None,
) -> Plan:
    """Returns the plan of a small state, each leaf of which is placed as the large one's."""
    params = [leaf for leaf, _ in pairs if leaf.kind == _state.PARAMS]
    stacked = [re.escape(leaf.path.partition("/")[2]) for leaf in params if leaf.stacked]
    is_sharded = axes_size(plan.mesh, plan.batch_axes) > 1
    small = _planner.plan(
        source,
        stage=plan.stage,
        mesh=mesh,
        axis=beyond(plan._splits.rows, (plan.experts and plan.experts.axis,)) or None,
        sequence=plan.sequence,
        experts=plan.experts,
        groups=dataclasses.asdict(plan.groups) if is_sharded else None,
        overrides={f"^{re.escape(leaf.path)}$": leaf.update.spec for leaf in params},
        min_shard_size=0,
        stacked=f"^({'|'.join(stacked)})$" if stacked else (),
        precision=plan.precision,
        tx=tx,
    )
    large = {leaf.path: leaf for leaf in plan.leaves}

    def moved(leaf: LeafPlan) -> LeafPlan:
        """Returns a leaf in the memory of the large one."""
        there = large.get(leaf.path, leaf)
        rest = dataclasses.replace(leaf.rest, memory=there.rest.memory)
        return dataclasses.replace(leaf, rest=rest, stays=there.stays)

    return dataclasses.replace(small, leaves=tuple(map(moved, small.leaves)))


# -- what both steps send


def _collectives(
    step: Step, here: Step, plan: Plan, small: Plan, state: PyTree, args: tuple[PyTree, ...]
) -> tuple[list[Check], list[str]]:
    """Compares the collectives of both steps, by the parameters that they are of."""
    options = step.recipe.options
    roles = _batch.roles(args, options.batch_specs, plan._splits)
    leaves, treedef = jax.tree.flatten(args)

    def grown(leaf: PyTree, role: _batch.Role) -> jax.ShapeDtypeStruct:
        """Returns the shape with as many rows for each device of the large mesh."""
        part = _batch.part_shape(leaf, role, small._splits.ways)
        shape = [*part.shape]
        if role.kind == _batch.BATCH:
            shape[role.dim] *= plan._splits.ways
        return jax.ShapeDtypeStruct(shape, part.dtype)

    batch, *rng = treedef.unflatten(map(grown, leaves, roles))
    batch = aot.batch(batch, plan, batch_specs=options.batch_specs)
    try:
        there = step.trace(plan.abstract(), batch, *rng)
    # Broad: the user's loss may raise anything for a batch of the small model.
    except Exception as error:
        line = str(error).partition("\n")[0]
        return [], [
            f"The collectives are not compared: the loss does not take the plan's model with a "
            f"batch like this one ({type(error).__name__}: {line})."
        ]
    pairs = (there, plan), (here.trace(state, *args), small)
    sets = [set(_sent(x.jaxpr.jaxpr, {leaf.path for leaf in layout.params})) for x, layout in pairs]
    checks = []
    for own, other, where in ((*sets, "not here"), (*reversed(sets), "not there")):
        for path, *what in sorted(own - other):
            checks.append(_wrong(path, OF_COLLECTIVES, f"{' '.join(what)}: {where}"))
    both = len(sets[0] & sets[1])
    return checks, [f"Both have {both} kinds of collectives of parameters, there and here."]


def _sent(jaxpr: Jaxpr, paths: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yields the collectives of a program that the engine has named after parameters: the path,
    what it is, and over which axes."""
    for eqn in _compat.every_eqn(jaxpr):
        names = Eqn(eqn).axis_name or Eqn(eqn).axes
        if not names or eqn.primitive.name == "axis_index":
            continue
        over = names if isinstance(names, tuple) else (names,)
        for token in re.split(r"[+()]", str(eqn.source_info.name_stack)):
            parts = token.split("/")
            ends = ("/".join(parts[at:]) for at in range(len(parts)))
            if path := next((end for end in ends if end in paths), None):
                dtype = type_of(eqn.outvars[0]).dtype
                yield _alike(path), f"{eqn.primitive.name} of {dtype}", f"over {', '.join(over)}"
