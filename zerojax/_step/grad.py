"""`jax.value_and_grad` for parameters that are placed by a plan."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr

from zerojax import _axis_types, _compat
from zerojax._declared import takes
from zerojax._features.in_backward import InBackward, NoGradientError
from zerojax._jaxprs import is_var, reads, type_of
from zerojax._loss import arguments as _arguments, batch as _batch, nans as _nans
from zerojax._loss.trace import TracedLoss, explained_dtypes, trace_loss
from zerojax._passes import means as _means
from zerojax._passes.loss import Feed, Loss
from zerojax._plan import move as _move, padding as _padding
from zerojax._plan.layout import check_plan
from zerojax._plan.plan import Plan
from zerojax._plan.precision import seen_in
from zerojax._state import refusals as _refusals
from zerojax._step.parameter import codecs_of
from zerojax._step.passes import rewritten
from zerojax._step.program import Program, Results, sum_of_squares
from zerojax._step.step_options import LossOptions, Notes, ValueOptions, precision_of
from zerojax._types import PyTree, is_key
from zerojax._warn import warn
from zerojax._wire.codecs import sums_narrow

P = ParamSpec("P")
F = Callable[..., PyTree]


@takes(ValueOptions)
def value_and_grad(
    loss_fn: Callable[..., PyTree], plan: Plan, options: ValueOptions
) -> Callable[..., PyTree]:
    """Makes `jax.value_and_grad` of a loss, for parameters that are placed by `plan`.

    `loss_fn(params, *args)` is written for one device. It runs on each device's part of the
    batch, and the value and gradients are the mean over the devices. Among `args`, it splits arrays
    along their first dimension, folds the device's index into PRNG keys, and passes scalars on.
    Arrays that the loss closes over are replicated: pass the batch, and close over statistics.
    Old-style keys, uint32[2], count as keys. With a batch of length 2, whose rows they may be, they
    are an error.

    Arguments:
        loss_fn: returns a scalar, or `(scalar, aux)` with `has_aux`.
        plan: from `zerojax.plan`.
        {options}

    Returns:
        A function `(params, *args) -> (value, grads)`, whose grads are sharded from stage 1 on.

    Example:
        >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> params = {"w": jnp.ones((64, 16))}
        >>> plan = zerojax.plan((params, ()), stage=2)
        >>> loss_and_grads = jax.jit(zerojax.value_and_grad(loss, plan))
        >>> value, grads = loss_and_grads(params, jnp.ones((32, 64)))
        >>> print(value, grads["w"].addressable_shards[0].data.shape)
        4096.0 (8, 16)
    """
    check_plan(plan, "value_and_grad(loss_fn, plan)")
    _arguments.check_loss(loss_fn)

    def fn(params: PyTree, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        def with_kwargs(params: PyTree, *args: PyTree) -> PyTree:
            return loss_fn(params, *args[:-1], **args[-1])

        # The keywords come last, so that their arrays are split like the others.
        every = _move.own((*args, kwargs), plan.mesh.devices.flat)
        _refusals.check_alive(params, "params")
        _refusals.check_alive(args, "batch")
        try:
            _batch.check_pairs(every, options.batch_specs, plan._splits)
            inputs = _axis_types.computed_with((params, every))
            loss, aux, grads, *_ = loss_and_grads(with_kwargs, plan, options, *inputs)
        except Exception as error:
            _arguments.blame(error, {"params": params, "batch": args}, plan)
            raise
        grads = _axis_types.typed_as(_padding.cleared(plan, grads), params)
        return (loss, aux) if options.has_aux else loss, grads

    return fn


class Graded(NamedTuple):
    """A loss and its gradients; these are None without derivatives, and for what backward updated.

    `norms` has the norms of gradients: of what it updated, and of those at positions in `normed`.
    """

    loss: Array
    aux: PyTree
    grads: PyTree
    done: dict[int, Array]  # by position in the state, leaves that backward updated
    norms: list[Array]
    normed: set[int]
    sums: dict[int, Array]  # over gradients that backward used, for the update of all other leaves
    notes: Notes
    metrics: dict[str, Array]  # that passes add


@_axis_types.auto_axes()
def loss_and_grads(
    loss_fn: Callable[..., PyTree],
    plan: Plan,
    options: LossOptions,
    params: PyTree,
    args: Sequence[PyTree],
    backward: InBackward | None = None,
) -> "Graded":
    """Runs the loss. Gradients are padded where the parameters are."""
    plan._check_params(params)
    values, treedef = jax.tree.flatten(plan._pad_params(params))
    shapes = [np.shape(value) for value in jax.tree.leaves(params)]
    arg_values = jax.tree.leaves(tuple(args))
    splits = plan._splits
    roles = _batch.roles(args, options.batch_specs, splits)
    _batch.check(args, roles, splits.ways, options.accumulate, _batch.pad_options(options))
    program = _program(loss_fn, plan, options, params, args, roles, backward)
    leaves, updates = backward.state if backward else (), list(program.updates.values())
    state = [
        ([leaves[at] for at in update.stacks[1:]], [leaves[at] for at in update.given])
        for update in updates
    ]
    sharded = program.on_all_devices()
    like = functools.partial(plan._like_params, shapes=shapes)

    def run(*inputs: PyTree) -> Results:
        results = Results._make(sharded(*inputs))
        return results._replace(grads=like(results.grads)) if options.differentiates else results

    # Without this jit, a call from plain Python would run the loss one operation at a time.
    jitted, inputs = jax.jit(run), (values, arg_values, program.traced.closed_over, state)
    try:
        with _noted_errors(plan):
            if not sums_narrow(plan.mesh, plan.batch_axes):
                _check_sums(jitted.trace(*inputs).jaxpr.jaxpr)
            results = _nans.run(
                jitted, inputs, lambda: _nans.explain(loss_fn, plan, params, args, roles)
            )
    except NoGradientError as error:
        fewer = backward and backward.without(error.args)
        return loss_and_grads(loss_fn, plan, options, params, args, fewer)
    done, known = dict[int, Array](), dict[int, Array]()
    for update, stacks, totals in zip(updates, results.new, results.sums, strict=True):
        done.update(zip(update.stacks, stacks, strict=True))
        known.update(zip(update.sums, totals, strict=True))
    aux, more = results.aux
    return Graded(
        results.loss,
        aux,
        treedef.unflatten(results.grads) if options.differentiates else None,
        done,
        norms=list(map(jnp.sqrt, results.squares)),
        normed={at for k in program.normed for at in program.loss.feed.stacks[k]},
        sums=known,
        notes=Notes(program.loss.notes, program.rounds),
        metrics=dict(zip(program.loss.metrics, more, strict=True)),
    )


def _program(
    loss_fn: Callable[..., PyTree],
    plan: Plan,
    options: LossOptions,
    params: PyTree,
    args: Sequence[PyTree],
    roles: Sequence[_batch.Role],
    backward: InBackward | None,
) -> Program:
    """Traces the loss at the shapes that one device sees, and makes the program of it."""
    splits = plan._splits
    _batch.check_tokens(args, roles, splits)
    arg_values, arg_tree = jax.tree.flatten(tuple(args))
    # Parameters have their full shapes here: the engine, which runs the jaxpr, gathers the shards,
    # and the loss never sees one.
    full = jax.tree.structure(params).unflatten(map(plan._seen_by_loss, plan.params))
    precision = precision_of(plan, options.precision)

    def trace(ways: int) -> TracedLoss:
        """Traces the loss on one of so many parts of the batch."""
        pairs = zip(arg_values, roles, strict=True)
        parts = [_batch.part_shape(value, role, ways) for value, role in pairs]
        inputs = [full, *arg_tree.unflatten(parts)]
        shapes = seen_in(inputs, precision.compute, precision.param)
        has_aux, mutable = options.has_aux, options.mutable
        over, names = (plan.mesh, plan.batch_axes), (mutable, plan._absent, plan._explicit_mesh)
        explained = explained_dtypes(precision.compute or precision.param)
        with explained, _noted_errors(plan), _means.over_rows(splits.tokens):
            return trace_loss(loss_fn, shapes, has_aux, *over, *names)

    ways = splits.ways * options.accumulate
    _, rows = _batch.counted(args, roles)
    with _noted_rows(rows, ways, trace):
        traced = trace(ways)
        # One row would broadcast with an array that has a row for each example. Two rows do not.
        by_example = any(np.shape(x)[:1] == (rows,) for x in traced.closed_over)
        if by_example and rows == ways > 3 and not _tried(trace, 2) and _tried(trace, 1):
            trace(ways // 2)
    _padding.check_closed_over(traced.jaxpr, traced.closed_over)
    _means.check_gradients(traced.jaxpr, plan.mesh, splits.rows)
    if plan.size > 1 and options.differentiates and options.batch_specs is None:
        _warn_of_whole(traced, roles, plan, trace)
    per_example = _batch.per_example(traced.aux, rows, ways, lambda: trace(1).aux, options.mutable)
    plan = plan._regathering(options.schedule.regather)
    microbatches = _batch.Microbatches(roles, options.accumulate)
    codecs = [codecs_of(leaf, precision, plan) for leaf in plan.params]
    feed, have_rows = Feed((), tuple(range(len(plan.params)))), jax.tree.leaves(per_example)
    loss = Loss(traced.jaxpr, tuple(plan.params), feed)
    loss = rewritten(loss, plan, options, microbatches, codecs, have_rows)
    return Program(plan, options, traced, loss, microbatches, precision, per_example, backward)


def _warn_of_whole(
    traced: TracedLoss, roles: Sequence[_batch.Role], plan: Plan, trace: Callable[[int], TracedLoss]
) -> None:
    """Warns of a loss that closes over its batch: every device would compute all of it.

    A loss may well read no batch, such as a regularizer; it then closes over no array. Or it reads
    only how many rows the batch has, such as a generator's, which draws as many and closes over the
    weights of another network.
    """
    arrays = [x for x in traced.closures if np.ndim(x) and not is_key(x)]
    jaxpr, params = traced.jaxpr, len(plan.params)
    args = jaxpr.invars[params : params + len(roles)]
    split = {v for v, role in zip(args, roles, strict=True) if role.kind == _batch.BATCH}
    read = itertools.chain(filter(is_var, jaxpr.outvars), *map(reads, jaxpr.eqns))
    if not arrays or not split.isdisjoint(read):
        return
    whole = _tried(trace, 1) if split else traced
    if whole is None or _sizes(whole.jaxpr) != _sizes(jaxpr):
        return
    largest = max(arrays, key=np.size)
    rest = f" and {len(arrays) - 1} more" if len(arrays) > 1 else ""
    warn(
        f"the loss reads no argument that is split over the {plan.size} devices, and closes over "
        f"{largest.dtype}{list(largest.shape)}{rest}: each device computes all of that. If it is "
        "the batch, pass it as an argument of the loss, loss_fn(params, batch) or for nnx "
        "loss_fn(model, batch), and of the step. If all devices are to compute the same, say so: "
        "batch_specs=PartitionSpec()."
    )


def _sizes(jaxpr: Jaxpr) -> list[tuple[int, ...]]:
    return [type_of(v).shape for eqn in _compat.every_eqn(jaxpr) for v in eqn.outvars]


def _check_sums(program: Jaxpr) -> None:
    """Raises for a sum in bfloat16 at which XLA would abort: see `sums_narrow`."""
    for eqn in _compat.every_eqn(program):
        free, name = eqn.ctx.cur_abstract_mesh.auto_axes, eqn.primitive.name
        if not free or name not in ("psum", "pmax", "pmin", "reduce_scatter"):
            continue
        for narrow in (v for v in map(type_of, eqn.outvars) if v.dtype == jnp.bfloat16):
            raise ValueError(
                f"{name} of bfloat16{list(narrow.shape)} on CPU devices, beside the mesh axes "
                f"{free}: XLA would abort the process. Cast to float32 around a collective of the "
                "loss, or around a value that a derivative goes through. Rehearse quantized "
                "gradients without Precision(reduce=), or in float32. GPUs run both, and "
                "zerojax.forecast compiles for them."
            )


def grad_norm(grads: PyTree, norms: Sequence[Array] = ()) -> Array:
    """Returns the norm of all gradients, those with these norms among them."""
    floats = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.inexact)]
    squares = [*map(sum_of_squares, floats), *map(jnp.square, norms)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


@contextlib.contextmanager
def _noted_rows(rows: int, ways: int, trace: Callable[[int], TracedLoss]) -> Iterator[None]:
    """Adds to an error of a loss that it comes from the number of rows, if it does."""
    try:
        yield
    except Exception as error:
        if ways > 1 and rows and _tried(trace, 1):
            error.add_note(
                f"The loss sees {rows // ways} of the batch's {rows} rows at a time, and runs on "
                f"all {rows}. Write len(x) for a size that comes from {rows}, and pass an array "
                "with a row for each example in the batch: a single row broadcasts with it. If the "
                "loss needs more rows at a time, pass a larger batch."
            )
        raise


def _tried(trace: Callable[[int], TracedLoss], ways: int) -> TracedLoss | None:
    """Traces the loss on one of so many parts of the batch. Returns None where that raises: a loss
    may assert how many rows there are."""
    with contextlib.suppress(Exception):
        return trace(ways)
    return None


@contextlib.contextmanager
def _noted_errors(plan: Plan) -> Iterator[None]:
    """Adds a remedy to an error of another library that names none."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        mesh = (plan._given_mesh or plan.mesh).abstract_mesh
        named = _compat.said(error, _compat.NOT_EXPLICIT)
        if named is not None and named[1] in mesh.auto_axes:
            error.add_note(
                f"The axis {named[1]!r} of the state's mesh is Auto. Place the state on a mesh of "
                "Explicit axes, as jax.make_mesh makes them, or leave the axis out of that spec, "
                "and write jax.lax.with_sharding_constraint(x, spec) with Auto axes only."
            )
        if _compat.said(error, _compat.CLOSED_OVER):
            error.add_note(
                "The loss closes over an array of a mesh with Explicit axes. Pass it as a part of "
                "the batch, or place it first: jax.device_put(x, jax.sharding.NamedSharding("
                "plan.mesh, jax.typeof(x).sharding.spec))."
            )
        raise
