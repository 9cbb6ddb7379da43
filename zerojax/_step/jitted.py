"""A step as `jax.jit` made it: for each plan with the XLA options that it needs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat, _fingerprint
from zerojax._features import (
    host_state as _host_state,
    in_backward as _in_backward,
    xla_options as _xla_options,
)
from zerojax._loss import arguments as _arguments
from zerojax._loss.arguments import plan_of
from zerojax._loss.trace import named_axes
from zerojax._plan import move as _move
from zerojax._plan.plan import Plan, fingerprint
from zerojax._run import agreement as _agreement
from zerojax._step.step_options import Recipe
from zerojax._types import PyTree

Jitted: TypeAlias = Any  # what `jax.jit` returns; JAX declares only half of its methods


# [Note: when a step is compiled]
# A step is compiled with XLA options that depend on its loops, on the bytes of a layer and on the
# GPUs. Nothing of that is known when a loss becomes a step: the plan comes with the state. So
# `jax.jit` is applied when the step first sees a state, once for each plan, after a trace has told
# what its loops gather. `without_options` is the same function jitted without any: for CPUs, and
# inside another `jax.jit`, where JAX allows none.
class Step:
    """A jitted step, used like what `jax.jit` returns."""

    def __init__(self, function: Callable[..., PyTree], recipe: Recipe) -> None:
        self.recipe, self.donate = recipe, recipe.options.donate
        self.compiler_options = recipe.options.compiler_options
        # JAX runs it again where it looks for infinities (`_loss/nans.py`).
        donates = self.donate and not jax.config.jax_debug_infs
        self.make_jit = functools.partial(jax.jit, function, donate_argnums=(0,) if donates else ())
        self.without_options: Jitted = self.make_jit()
        self.by_plan: dict[Plan | None, Jitted] = {}
        self.options: dict[Plan | None, _xla_options.XlaOptions] = {}  # of these
        self.checked: set[Plan] = set()
        self.agreed: set[tuple[Plan, str]] = set()

    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        """Runs the step on `(state, batch[, rng])`."""
        with _arguments.explained(args, named, self.recipe.plan):
            jitted = self.for_args(*args, **named)
            self.agree(jitted, args, named)
            plan, others = self._plan_for(args, named), args[1:]
            if plan is not None:  # the user may change them while the step runs
                own = functools.partial(_move.own, devices=plan.mesh.devices.flat)
                others = own(others)
                named = {name: x if name == "state" else own(x) for name, x in named.items()}
            return jitted(*args[:1], *others, **named)

    def lower(self, *args: PyTree, **named: PyTree) -> jax.stages.Lowered:
        with _arguments.explained(args, named, self.recipe.plan):
            return self.for_args(*args, **named).lower(*args, **named)

    def trace(self, *args: PyTree, **named: PyTree) -> jax.stages.Traced:
        with _arguments.explained(args, named, self.recipe.plan):
            return self.for_args(*args, **named).trace(*args, **named)

    def eval_shape(self, *args: PyTree, **named: PyTree) -> PyTree:
        return self.without_options.eval_shape(*args, **named)

    def clear_cache(self) -> None:
        for jitted in (self.without_options, *self.by_plan.values()):
            jitted.clear_cache()

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in self.by_plan.values())

    def for_args(self, *args: PyTree, **named: PyTree) -> Jitted:
        """Returns the jitted function for the plan that the state was placed by."""
        plan = self._plan_for(args, named)

        def trace() -> ClosedJaxpr:
            return self.without_options.trace(*args, **named).jaxpr

        # Where the batch is a tracer, the check cannot tell, and is repeated at the next call.
        if plan is not None and plan not in self.checked and check_used(plan, (args, named), trace):
            self.checked.add(plan)
        if plan not in self.by_plan:
            options = self._options_for(plan, trace) | dict(self.compiler_options or {})
            jitted = self.make_jit(compiler_options=options) if options else self.without_options
            self.by_plan[plan], self.options[plan] = jitted, options
        jitted = self.by_plan[plan]
        # Looking for tracers takes time at each step; on CPUs both functions are one.
        if jitted is self.without_options:
            return jitted
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, named)))
        return self.without_options if traced else jitted

    def options_for(self, *args: PyTree, **named: PyTree) -> _xla_options.XlaOptions:
        """Returns the XLA options that the step is compiled with for these arguments."""
        self.for_args(*args, **named)
        return self.options[self._plan_for(args, named)]

    def _plan_for(self, args: Sequence[PyTree], named: dict[str, PyTree]) -> Plan | None:
        return plan_of(args[0] if args else named.get("state"), self.recipe.plan)

    def _options_for(
        self, plan: Plan | None, trace: Callable[[], ClosedJaxpr]
    ) -> _xla_options.XlaOptions:
        if plan is None or not _compat.is_gpu(plan.mesh.devices.flat[0]):
            return {}
        regathers = bool(self.recipe.options.regather)
        ahead = self.recipe.options.prefetch != 0 and regathers
        how = self.recipe.options
        updates = not how.needs_all(False) and _in_backward.is_wanted(plan, how.update)
        turns = 1 if self.recipe.options.is_layered else self.recipe.options.accumulate
        options = _xla_options.options_for(
            trace().jaxpr, plan.mesh, ahead, updates and not plan.groups.params, microbatches=turns
        )
        # XLA would unroll the loops over microbatches as well, and hide less: 4.6 s, not 4.5, for
        # 7.5B with 8 microbatches on 64 H100s at 6.25 GB/s.
        if self.recipe.options.is_layered:
            options.pop(_xla_options.DOUBLE_BUFFER, None)
        device = plan.mesh.devices.flat[0]
        if _compat.uses_host(trace().jaxpr) and not _host_state.are_found(device):
            options.pop(_xla_options.DOUBLE_BUFFER, None)
        return options

    def agree(self, jitted: Jitted, args: Sequence[PyTree], named: dict[str, PyTree]) -> None:
        """Raises where several processes run different steps; asked once for a plan and shapes.

        Processes that run different programs wait for each other in a collective forever.
        """
        plan = self._plan_for(args, named)
        if plan is None or not jax.distributed.is_initialized():
            return
        batch = jax.tree_util.tree_leaves_with_path((args[1:], {**named, "state": None}))
        shapes = _fingerprint.of_shapes([leaf for _, leaf in batch])
        # Inside another `jax.jit` the batch has no values, and the program is the outer one's.
        traced = any(isinstance(leaf, Tracer) for _, leaf in batch)

        def items() -> dict[str, str]:
            options = vars(self.recipe.options) | self.make_jit.keywords
            return {
                **{name: str(value) for name, value in options.items()},
                **fingerprint(plan),
                "the shapes of the batch": shapes,
                **_fingerprint.of_values((jax.tree_util.keystr(p), leaf) for p, leaf in batch),
                "the program": _fingerprint.of_program(jitted.trace(*args, **named).jaxpr),
            }

        if not traced and (plan, shapes) not in self.agreed:
            trains = self.recipe.options.differentiates
            _agreement.agree("the step" if trains else "eval_step", items, plan.mesh)
            self.agreed.add((plan, shapes))


def check_used(plan: Plan, args: PyTree, trace: Callable[[], ClosedJaxpr]) -> bool:
    """Raises for a mesh axis that no leaf of the state, no argument and no operation uses.

    `trace` makes the step's jaxpr, where the state and the arguments leave the question open.
    Returns whether it could look: inside of another `jax.jit`, nothing says where the batch is.
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
        f"nothing is sharded over the mesh axes {named}: no leaf of the state, no part of the "
        f"batch, and the loss does not name them. Each of {count} replicas would compute the same "
        f"batch. Shard over all, axis={wanted!r}, or pass a mesh without {tuple(named)}."
    )


def _axes_in(value: object) -> set[str]:
    """Returns the mesh axes named by shardings, arrays' too, specs, and equations at any depth."""
    match value:
        case jax.Array() | jax.ShapeDtypeStruct():
            return _axes_in(getattr(value, "sharding", None))
        case str():
            return {value}
        case NamedSharding():
            return named_axes(value.spec)
        case PartitionSpec():
            return named_axes(value)
        case Jaxpr() | ClosedJaxpr():
            params = (item for eqn in value.eqns for item in eqn.params.items())
            return _axes_in([param for key, param in params if key != "name"])  # of a function
        case tuple() | list() | set() | frozenset():
            return set().union(*map(_axes_in, value))
    return set()
