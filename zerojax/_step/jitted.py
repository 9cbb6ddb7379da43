"""A step as a jitted function, which each plan compiles with the XLA options that it needs."""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat, _fingerprint
from zerojax._features import host_state as _host_state, xla_options as _xla_options
from zerojax._jaxprs import params_of, unique
from zerojax._loss import arguments as _arguments, batch as _batch
from zerojax._loss.arguments import plan_of
from zerojax._loss.trace import named_axes
from zerojax._plan import move as _move
from zerojax._plan.plan import Plan, fingerprint
from zerojax._progress import working
from zerojax._run import agreement as _agreement
from zerojax._state import refusals as _refusals
from zerojax._state.state import shape_dtype
from zerojax._step.compiled import (
    PROGRAM,
    CompiledStep,
    Facts,
    Replays,
    at_rest,
    loaded,
    read,
    short,
)
from zerojax._step.step_options import Notes, Recipe, may_update_in_backward
from zerojax._types import PyTree, kinds_of

OWN_ROWS = (
    " If each has rows of its own, make one batch of them: zerojax.shard_batch(rows, like=state)."
)
Jitted: TypeAlias = Any  # the result of `jax.jit`; JAX declares only half of its methods


def _spelled_as_planned(args: Sequence[PyTree], plan: Plan, specs: PyTree) -> list[PyTree]:
    """Gives a state's arrays the plan's shardings, and batches those of `zerojax.shard_batch`.

    What XLA returns names no axes of size 1, and would be lowered to another text. So would a batch
    on the host; one that rests otherwise, such as over an axis of the user's, stays as it is.
    """

    def spelled(value: PyTree, place: NamedSharding) -> PyTree:
        is_there = isinstance(value, jax.Array) and not _move.is_elsewhere(value, place)
        return jax.device_put(value, place) if is_there else value

    def batch(value: PyTree, role: _batch.Role) -> PyTree:
        place = NamedSharding(plan.mesh, _batch.placed_spec(value, role, plan._splits))
        if isinstance(getattr(value, "sharding", None), NamedSharding):
            return spelled(value, place)
        ways = plan._splits.ways if role.kind == _batch.BATCH else 0
        if not hasattr(value, "shape") or (ways and value.shape[role.dim] % ways):
            return value
        struct = shape_dtype(value)
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=place)

    leaves, treedef = jax.tree.flatten(args[0])
    state = treedef.unflatten(
        [spelled(*each) for each in zip(leaves, plan._shardings, strict=True)]
    )
    leaves, treedef = jax.tree.flatten(tuple(args[1:]))
    roles = _batch.roles(args[1:], specs, plan._splits)
    return [state, *treedef.unflatten(map(batch, leaves, roles))]


# [Note: when a step is compiled]
# A step is compiled with XLA options that depend on its loops, on the bytes of a layer and on the
# GPUs. None of these is known when a loss becomes a step: the plan comes with the state. So the
# step calls `jax.jit` when it first sees a state, once for each plan, after a trace has shown what
# its loops gather. `_without_options` is the same function jitted without options: for CPUs, and
# inside another `jax.jit`, where JAX allows none.
class Step:
    """A jitted step, used like a function that `jax.jit` returns."""

    def __init__(
        self,
        function: Callable[..., PyTree],
        recipe: Recipe,
        notes: Mapping[Plan, Notes],
        replays: Replays | None = None,
    ) -> None:
        self.recipe, self.replays = recipe, replays
        # Of each plan that JAX has traced the step for: a trace returns arrays only.
        self.notes = notes
        # Looking for infinities, JAX runs it a second time on the same state (`_loss/nans.py`).
        self._donates = recipe.options.donate and not jax.config.jax_debug_infs
        donated = (0,) if self._donates else ()
        self._function = function
        self._make_jit = functools.partial(jax.jit, function, donate_argnums=donated)
        self._without_options: Jitted = self._make_jit()
        self._by_plan: dict[Plan | None, tuple[Jitted, _xla_options.XlaOptions]] = {}
        self._checked: set[Plan] = set()
        # By plan, in several processes also by kind of batch, what it was called with before.
        self._agreed: dict[object, _agreement.Known | None] = {}
        loss = getattr(recipe.loss_fn, "__name__", "")
        self._call = "the step" if recipe.options.differentiates else "eval_step"
        self._name = f" ({loss})" * loss.isidentifier()

    def __repr__(self) -> str:
        """Says what has become of layers in Python loops, by each plan that the step has seen."""
        kind = "training step" if self.recipe.options.differentiates else "evaluation"
        texts = unique(text for notes in self.notes.values() for text in notes.layers)
        return "\n  ".join([f"<zerojax {kind}>", *texts])

    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        """Runs the step on `(state, batch[, rng])`."""
        if self.replays is not None:
            self.replays(*args, **named)
        with _arguments.explained(args, named, self.recipe.options.plan):
            jitted = self._for_args(*args, **named)
            plan, others = self._plan_for(args, named), args[1:]
            state = args[0] if args else named.get("state")
            leaves = jax.tree.leaves(state)
            if self._donates:
                _refusals.check_distinct(leaves, state)
            if plan is not None:
                # A copy, because the user may change the batch while the step runs.
                own = functools.partial(_move.own, devices=plan.mesh.devices.flat)
                others = own(others)
                named = {name: x if name == "state" else own(x) for name, x in named.items()}
                jitted = self._agree(jitted, plan, leaves, (*args[:1], *others), named)
            return at_rest(jitted(*args[:1], *others, **named), plan)

    def compile(self, *args: PyTree) -> CompiledStep:
        """Compiles the step for `(state, batch[, rng])`, or for their shapes, and runs nothing."""
        with _arguments.explained(args, {}, self.recipe.options.plan):
            lowered, plan, facts, known = self._lowered(args)
            compiled = _compat.compiled_anew if _on_cpus(plan) else jax.stages.Lowered.compile
            with working(self._compiling(plan), in_lines=True):
                step = CompiledStep(compiled(lowered), plan, facts, known)
            _meet_compiled(plan)
        return self._checked_too(step, args)

    def load(self, path: str | os.PathLike[str], *args: PyTree) -> CompiledStep:
        """Loads what `compile(*args).save(path)` has written. `args` are those of the call.

        The step is traced and lowered, which takes seconds, and not compiled. A file of another
        program, plan, device or version of JAX is refused; the error names the difference.

        Load files that you trust: like JAX's own cache, such a file holds code. One that belongs to
        another user, or that everyone can write to, is refused.
        """
        written = read(path)
        with _arguments.explained(args, {}, self.recipe.options.plan):
            step = loaded(path, *written, *self._lowered(args))
        return self._checked_too(step, args)

    def _checked_too(self, step: CompiledStep, args: Sequence[PyTree]) -> CompiledStep:
        replays = self.replays and self.replays.compiled(args)
        return dataclasses.replace(step, replays=replays)

    def _lowered(
        self, args: Sequence[PyTree]
    ) -> tuple[jax.stages.Lowered, Plan, Facts, _agreement.Known | None]:
        """Returns the lowered step, its plan, and what its program depends on, once all processes
        have compared that."""
        plan = _arguments.find_plan(args[0] if args else None, self.recipe.options.plan)
        lowered = self._for_args(*args).lower(
            *_spelled_as_planned(args, plan, self.recipe.options.batch_specs)
        )
        # A jaxpr would not say what JAX makes of it: how it draws random numbers, which blocks a
        # kernel reads.
        facts = self._facts(plan, _fingerprint.of_shapes(args[1:]), lowered.as_text())
        known = _agreement.agree("a compiled step", lambda: facts, plan.mesh)
        return lowered, plan, short(_agreement.versions() | facts), known

    def lower(self, *args: PyTree, **named: PyTree) -> jax.stages.Lowered:
        with _arguments.explained(args, named, self.recipe.options.plan):
            return self._for_args(*args, **named).lower(*args, **named)

    def trace(self, *args: PyTree, **named: PyTree) -> jax.stages.Traced:
        with _arguments.explained(args, named, self.recipe.options.plan):
            return self._for_args(*args, **named).trace(*args, **named)

    def eval_shape(self, *args: PyTree, **named: PyTree) -> PyTree:
        return self._without_options.eval_shape(*args, **named)

    def clear_cache(self) -> None:
        for jitted in (self._without_options, *(jitted for jitted, _ in self._by_plan.values())):
            jitted.clear_cache()

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted, _ in self._by_plan.values())

    def _for_args(self, *args: PyTree, **named: PyTree) -> Jitted:
        """Returns the jitted function for the plan that the state was placed by."""
        plan = self._plan_for(args, named)

        def trace() -> ClosedJaxpr:
            return self._without_options.trace(*args, **named).jaxpr

        # Where the batch is a tracer, the check cannot tell, and the next call repeats it.
        if plan and plan not in self._checked and check_used(plan, (args, named), trace):
            self._checked.add(plan)
        if plan not in self._by_plan:
            options = self._chosen_options(plan, trace)
            options |= dict(self.recipe.options.schedule.compiler_options or {})
            jitted = self._make_jit(compiler_options=options) if options else self._without_options
            self._by_plan[plan] = jitted, options
        jitted, _ = self._by_plan[plan]
        # Looking for tracers takes time at each step; on CPUs both functions are one.
        kinds = kinds_of((args, named)) if jitted is not self._without_options else ()
        return self._without_options if any(issubclass(x, Tracer) for x in kinds) else jitted

    def _options_for(self, *args: PyTree, **named: PyTree) -> _xla_options.XlaOptions:
        """Returns the XLA options that the step is compiled with for these arguments."""
        self._for_args(*args, **named)
        return self._by_plan[self._plan_for(args, named)][1]

    def _plan_for(self, args: Sequence[PyTree], named: dict[str, PyTree]) -> Plan | None:
        return plan_of(args[0] if args else named.get("state"), self.recipe.options.plan)

    def _chosen_options(
        self, plan: Plan | None, trace: Callable[[], ClosedJaxpr]
    ) -> _xla_options.XlaOptions:
        if plan is None or _on_cpus(plan):
            return {}
        device = plan.mesh.devices.flat[0]
        how, jaxpr = self.recipe.options, trace().jaxpr
        updates = not how.needs_all(False) and may_update_in_backward(plan, how.schedule.update)
        options = _xla_options.options_for(
            jaxpr,
            plan.mesh,
            ahead=bool(how.schedule.prefetch and how.schedule.regather),
            updates=updates and not plan.groups.params,
            microbatches=how.rounds,
        )
        # XLA would unroll the loops over microbatches as well, and hide less: 4.6 s, not 4.5, for
        # 7.5B with 8 microbatches on 64 H100s at 6.25 GB/s.
        finds = not _compat.uses_host(jaxpr) or _host_state.are_found(device)
        if how.is_layered or not finds:
            options.pop(_xla_options.DOUBLE_BUFFER, None)
        return options

    def _facts(self, plan: Plan, shapes: str, program: str) -> Facts:
        """Returns by name what a program depends on, for batches of these shapes."""
        options = vars(self.recipe.options) | self._make_jit.keywords
        # Their texts have addresses; what they do is in the plan's facts and in the program.
        options = {name: value for name, value in options.items() if name not in ("plan", "tx")}
        return {
            **{name: str(value) for name, value in options.items()},
            **fingerprint(plan),
            "the kind of devices": plan.mesh.devices.flat[0].device_kind,
            "the XLA options": f"{self._by_plan[plan][1]} {os.environ.get('XLA_FLAGS', '')}",
            "the shapes of the batch": shapes,
            PROGRAM: program,
        }

    @contextlib.contextmanager
    def _first(self, plan: Plan) -> Iterator[None]:
        """Says that XLA compiles the step; also in the call after one that fails."""
        with working(self._compiling(plan) + _kept(), in_lines=True):
            yield
        self._agreed[plan] = None

    def _agree(
        self,
        jitted: Jitted,
        plan: Plan,
        state: Sequence[PyTree],
        args: Sequence[PyTree],
        named: dict[str, PyTree],
    ) -> Jitted:
        """Raises where several processes run different steps. Returns `jitted`, which at first says
        that XLA compiles it.

        Processes that run different programs wait for each other in a collective forever.
        """
        is_alone = not plan.mesh.is_multi_process
        if is_alone and plan in self._agreed:
            return jitted
        arguments = {**dict(zip(("batch", "rng"), args[1:], strict=False)), **named, "state": None}
        # Inside another `jax.jit` there are no values, and the program is the outer one's.
        leaves, tree = jax.tree.flatten(arguments)
        if any(issubclass(kind, Tracer) for kind in {*map(type, state), *map(type, leaves)}):
            return jitted
        if is_alone:
            return self._first(plan)(jitted)
        plan._compare_new(state)
        key = plan, tree, *((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)
        if key in self._agreed:
            if known := self._agreed[key]:
                known()
            return jitted

        def items() -> dict[str, str]:
            batch = jax.tree_util.tree_leaves_with_path(arguments)
            named_leaves = ((p[0].key + jax.tree_util.keystr(p[1:]), leaf) for p, leaf in batch)
            program = _fingerprint.of_program(jitted.trace(*args, **named).jaxpr)
            facts = self._facts(plan, _fingerprint.of_shapes(arguments), program)
            return facts | _fingerprint.of_values(named_leaves)

        known = _agreement.agree(self._call, items, plan.mesh, OWN_ROWS, name=self._name)
        self._agreed[key] = known
        compiling = self._compiling(plan) + _kept()
        if _on_cpus(plan):
            with working(compiling, in_lines=True):
                jitted.lower(*args, **named).compile()
            _meet_compiled(plan)
        return working(compiling, in_lines=True)(jitted)

    def _compiling(self, plan: Plan) -> str:
        """Says what XLA compiles."""
        return f"XLA compiles {self._call}{self._name} at stage {plan.stage}"


def _kept() -> str:
    """Says how to keep what JAX compiles where a step is called, if it does not."""
    kept = jax.config.jax_compilation_cache_dir
    return "" if kept else "; JAX_COMPILATION_CACHE_DIR=... keeps the result"


def _on_cpus(plan: Plan) -> bool:
    return plan.mesh.devices.flat[0].platform == "cpu"


def _meet_compiled(plan: Plan) -> None:
    """Waits until all have compiled: one may take longer than the 30 s for which gloo waits."""
    _agreement.agree("a step that this one has compiled", dict, plan.mesh, ordered=False)


def check_used(plan: Plan, args: PyTree, trace: Callable[[], ClosedJaxpr]) -> bool:
    """Raises for a mesh axis that no leaf of the state, no argument and no operation uses.

    `trace` makes the step's jaxpr, which answers where the state and the arguments do not. Returns
    whether there was an answer: inside another `jax.jit`, a batch does not say where it is.
    """
    sizes = {axis: n for axis, n in plan.mesh.shape.items() if n > 1}
    values = jax.tree.leaves(args)
    idle = sizes.keys() - {*plan.batch_axes}
    idle -= _axes_in([*(leaf.spec for leaf in plan.leaves), *values])
    if idle and any(isinstance(value, Tracer) for value in values):
        return False
    if idle:
        closed = trace()
        idle -= _axes_in([closed, *closed.consts])
    if not idle:
        return True
    named = {axis: n for axis, n in sizes.items() if axis in idle}
    count = math.prod(named.values())
    wanted = tuple(axis for axis in plan.mesh.axis_names if axis in idle.union(plan.batch_axes))
    raise ValueError(
        f"nothing is sharded over the mesh axes {named}: no leaf of the state and no part of the "
        f"batch, and the loss does not name them. Each of {count} replicas would compute the same "
        f"batch. Shard over all axes, axis={wanted!r}, have one split sequences, "
        f"sequence={[*named][-1]!r}, or pass a mesh without {tuple(named)}."
    )


def _axes_in(value: object) -> set[str]:
    """Returns the mesh axes named by arrays, shardings, specs, and equations at any depth."""
    match value:
        case jax.Array() | jax.ShapeDtypeStruct():
            return _axes_in(getattr(value, "sharding", None))
        case str():
            return {value}
        case NamedSharding(spec=spec) | (PartitionSpec() as spec):
            return named_axes(spec)
        case Jaxpr() | ClosedJaxpr():
            params = (item for eqn in value.eqns for item in params_of(eqn))
            return _axes_in([param for key, param in params if key != "name"])  # of a function
        case tuple() | list() | set() | frozenset():
            return set().union(*map(_axes_in, value))
    return set()
