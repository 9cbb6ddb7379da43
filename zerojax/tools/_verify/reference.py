"""A step replayed on one device: loss and gradients of the parts of the batch that a mesh would
see, one by one, and the new state; and the step's own results beside them."""

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Primitive
from jax.extend.random import define_prng_impl
from jax.sharding import AbstractMesh, AxisType

from zerojax import _compat
from zerojax._features import finite as _finite
from zerojax._jaxprs import RAGGED, type_of
from zerojax._kernel.device import exact_share
from zerojax._loss import batch as _batch
from zerojax._loss.fields import has_no_mean, split_fields, with_fields
from zerojax._loss.trace import trace_loss
from zerojax._plan.optimizer import apply_gradients
from zerojax._plan.padding import on_host
from zerojax._plan.plan import Plan
from zerojax._plan.precision import cast_floats, seen_in
from zerojax._plan.roles import AS_WEIGHT, CODED, CORRECTION, SCALES, roles_of
from zerojax._progress import working
from zerojax._state import state as _state
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._step.step import Recipe, grad_norm
from zerojax._step.step_options import precision_of
from zerojax._table import human_bytes
from zerojax._types import Device, PyTree, Shape, is_key, wide, zero_gradient
from zerojax._wire.codecs import NOISE, QuantizedWire, rules_of
from zerojax.tools._verify import compare as _compare, decoded as _decoded
from zerojax.tools._verify.compare import WRONG, ByName, Check, Spreads
from zerojax.tools._verify.decoded import InTwoLeaves
from zerojax.tools._verify.widened import BITS, in_float32, widened

# Where weights or gradients travel quantized, gradients may be off by these multiples of the
# quantization noise, relative to their largest element.
WEIGHTS_NOISE, GRADIENTS_NOISE = 10, 4
# How far apart codes of two numbers that are nearly the same may be. Of those that a table shows
# decoded, only the copies on devices count.
CODES_APART = {CORRECTION: 254, CODED: 3, SCALES: 1}
MICROBATCH_AXIS = "zerojax_microbatches"

Inputs: TypeAlias = dict[int, jax.Array]  # of a traced loss, by their positions
# Into how many parts a batch is split: over the axes of a mesh, and over microbatches, which are an
# axis too, because `zerojax.mean` averages over them.
Sizes: TypeAlias = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The losses of all parts in the batch's order, their aux stacked, their mean's gradients."""

    losses: np.ndarray
    aux: PyTree
    grads: PyTree  # None where nothing was differentiated
    jaxpr: Jaxpr  # of the loss on one part
    dtype: np.dtype  # the least precise floats that were computed in, at any depth

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


class Reference:
    """A recipe followed on one device, from a state and a batch gathered there."""

    def __init__(
        self, recipe: Recipe, plan: Plan, state: PyTree, args: PyTree, device: Device | None
    ) -> None:
        self.recipe, self.plan = recipe, plan
        self.device = plan.mesh.devices.flat[0] if device is None else device
        self.roles = _batch.roles(args, recipe.options.batch_specs, plan._splits)
        options = recipe.options
        padding = _batch.pad_options(options)
        _batch.check(args, self.roles, plan._splits.ways, options.accumulate, padding)
        _check_fits(plan, self.device)
        self.state = self.moved(on_host(state, plan))
        self.args = self.moved(args)
        self.precision = precision_of(plan, recipe.options.precision)
        # The user's own axes have size 1 here, so that a loss may name them. So has the axis of
        # sequences, which are whole.
        sizes = {a: n if a in plan._splits.rows else 1 for a, n in plan.mesh.shape.items()}
        sizes |= dict.fromkeys(sorted(plan._absent), 1)
        self.split: Sizes = {**sizes, MICROBATCH_AXIS: recipe.options.accumulate}
        self.has_keys = any(role.kind == _batch.KEY for role in self.roles)
        self.widens = False  # floats of 16 bits or fewer to float32
        # Whether the step skips updates that are not finite.
        self.may_skip = recipe.options.skip_nonfinite or _finite.scale_of(self.state) is not None
        self._update = jax.jit(self._updated)

    @property
    def ways(self) -> int:
        """The parts of the batch."""
        return math.prod(self.split.values())

    @property
    def microbatches(self) -> int:
        return self.split[MICROBATCH_AXIS]

    @property
    def in_one(self) -> Sizes:
        """A split over the same axes that leaves the batch whole."""
        return dict.fromkeys(self.split, 1)

    @property
    def axis_name(self) -> str:
        """The axes of rows as a loss names them in its collectives."""
        axes = self.plan._splits.rows
        return repr(axes[0] if len(axes) == 1 else axes)

    def skips(self, replayed: Replayed) -> bool:
        norm = grad_norm(replayed.grads)
        return self.may_skip and not (np.isfinite(replayed.loss) and np.isfinite(norm))

    def update(self, grads: PyTree, right: Replayed, state: PyTree = None) -> PyTree:
        """Returns the state, or another one, after an update by `grads`, with `right`'s fields."""
        state = self.state if state is None else state
        params = _state.get_params(state)
        typed = jax.tree.map(lambda g, p: g if is_key(p) else g.astype(p.dtype), grads, params)
        names = self.recipe.options.mutable
        fields = split_fields(averaged(right.aux, names), state, names)[1] if names else {}
        return self._update(state, typed, fields, np.isfinite(right.loss))

    def _updated(
        self, state: PyTree, grads: PyTree, fields: dict[str, PyTree], loss_is_finite: jax.Array
    ) -> PyTree:
        """Applies the user's update, and the loss scale's."""
        new_state = apply_gradients(state, grads, self.recipe.options.tx, fields)
        if not self.may_skip:
            return new_state
        finite = loss_is_finite & jnp.isfinite(grad_norm(grads))
        return _finite.guarded(finite, new_state, state, self.recipe.options.mutable)

    def comparable(self, widens: bool) -> "Reference":
        """Returns the same in float32, if it `widens`, and with keys from which every draw is the
        same number, on any part.

        The keys of the streams in a nnx model, too: the step folds them by an argument.
        """
        other = copy.copy(self)
        other.widens = widens
        other.args = self._changed(_batch.KEY, lambda key, _: alike(key))
        if self.has_keys and hasattr(self.state, "with_streams"):
            other.state = self.state.with_streams(alike)
        return other

    def repeated(self, part: int) -> PyTree:
        """Returns the arguments with one part of the batch in place of every part."""

        def taken(value: jax.Array, role: _batch.Role) -> jax.Array:
            parts = _batch.split(value, role.dim, self.ways)
            return jnp.concatenate([parts[part]] * self.ways, role.dim)

        return self._changed(_batch.BATCH, taken)

    def _changed(self, kind: str, change: Callable[[jax.Array, _batch.Role], jax.Array]) -> PyTree:
        """Returns the arguments with those of a kind changed."""
        values, treedef = jax.tree.flatten(self.args)
        pairs = zip(values, self.roles, strict=True)
        return treedef.unflatten(change(x, r) if r.kind == kind else x for x, r in pairs)

    def replay(
        self,
        split: Sizes | None = None,
        args: PyTree = None,
        *,
        roles: Sequence[_batch.Role] | None = None,
        differentiate: bool = True,
        fold: bool = True,
    ) -> Replayed:
        """Evaluates the loss on every part.

        One part after the other, so that the activations of only one are alive; all at once where
        the parts communicate (`zerojax.mean`, BatchNorm over an axis of the mesh). As in a step,
        gradients of frozen parameters are zeros.
        """
        split = self.split if split is None else split
        ways = math.prod(split.values())
        batch = f"{ways} parts of the batch" if ways > 1 else "the whole batch"
        doing = f"verify: replaying {batch} on one device"
        leaves, treedef = jax.tree.flatten(self.args if args is None else args)
        pairs = list(zip(leaves, self.roles if roles is None else roles, strict=True))
        params, names = _state.get_params(self.state), self.recipe.options.mutable
        # In place of a mesh: there may be fewer devices than parts.
        auto = (AxisType.Auto,) * len(split)
        mesh: PyTree = AbstractMesh((*split.values(),), (*split,), axis_types=auto)
        full = jax.tree.structure(params).unflatten(map(self.plan._seen_by_loss, self.plan.params))
        dtypes = self.precision.compute, self.precision.param
        shapes = [_batch.part_shape(value, role, ways) for value, role in pairs]
        shapes = seen_in([full, *treedef.unflatten(shapes)], *dtypes)
        loss_fn = with_fields(self.recipe.loss_fn, self.state, names)
        over, explicit = (mesh, tuple(split)), self.plan._explicit_mesh
        with working(doing):
            traced = trace_loss(loss_fn, shapes, None, *over, names, explicit=explicit)
        jaxpr, closed_over = traced.jaxpr, self.moved(traced.closed_over)
        values, paramdef = jax.tree.flatten(params)
        if self.widens:
            jaxpr, closed_over = in_float32(jaxpr), [*map(widened, closed_over)]
            values = [*map(widened, values)]
        share, factor = exact_share(ways)

        def mean_loss(floats: Inputs, same: Inputs, part: Inputs) -> tuple[jax.Array, list]:
            every = floats | same | part
            dtypes = [type_of(var).dtype for var in jaxpr.invars]
            inputs = [cast_floats(every[i], dtypes[i]) for i in range(len(every))]
            loss, *aux = map(jnp.asarray, _compat.run_jaxpr(jaxpr, [*inputs, *closed_over]))
            return loss.astype(wide(loss.dtype)) * share, aux

        every = dict(enumerate([*values, *(_parts(v, role, split, fold) for v, role in pairs)]))
        floats = {i: v for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.inexact)}
        varies = (role.kind != _batch.REPLICATED for _, role in pairs)
        parts = {i: every[i] for i, differs in enumerate(varies, len(values)) if differs}
        same = {i: v for i, v in every.items() if i not in floats | parts}
        run = _all_at_once if _compat.names_an_axis(traced.jaxpr) else _one_by_one
        run = jax.jit(functools.partial(run, mean_loss, split, differentiate))
        # The types of arrays that were traced for a mesh name that mesh, or one replayed earlier
        # (JAX caches inner calls). Arrays of two meshes cannot be added.
        with working(doing), _ragged_dots_in_turn(traced.jaxpr):
            dtype = _least_precise(run.trace(floats, same, parts).jaxpr.jaxpr)
            losses, aux, grads = self.moved(run(floats, same, parts))
        if grads is not None:
            each = enumerate(values)
            trained = {i: i in grads and not leaf.frozen for i, leaf in enumerate(self.plan.params)}
            total = [grads[i] * factor if trained[i] else zero_gradient(v) for i, v in each]
            grads = paramdef.unflatten(total)
        aux = jax.tree.structure(traced.aux).unflatten(aux)
        return Replayed(np.asarray(losses) / share, aux, grads, traced.jaxpr, dtype)

    def moved(self, tree: PyTree) -> PyTree:
        """Moves every leaf to the device, one at a time.

        By way of the host: the types of arrays put straight from a mesh to a device still name the
        mesh.
        """

        def one(leaf: PyTree) -> jax.Array:
            if not is_key(leaf):
                return jax.device_put(np.asarray(leaf), self.device)
            words = one(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))

        return jax.tree.map(lambda leaf: jax.block_until_ready(one(leaf)), tree)

    def tolerance(self, replayed: Replayed) -> float:
        """Returns the tolerance for a step, which rounds in its loss, in reductions over the
        devices, and to the dtypes of the parameters, which their gradients have."""
        options = (self.precision.gather, WEIGHTS_NOISE), (self.precision.reduce, GRADIENTS_NOISE)
        ways = [(way, factor) for option, factor in options for _, way in rules_of(option)]
        quantized = [(way, factor) for way, factor in ways if isinstance(way, QuantizedWire)]
        noise = [factor * NOISE[way.dtype] for way, factor in quantized]
        sent = [way for way, _ in ways if way is not None and not isinstance(way, QuantizedWire)]
        params = [p.dtype for p in self.plan.params if jnp.issubdtype(p.dtype, jnp.floating)]
        dtypes = [replayed.dtype, *sent, *params]
        return max([_compare.tolerance_for(dtypes, self.device.platform), *noise])


def _least_precise(jaxpr: Jaxpr) -> np.dtype:
    """Returns the least precise floats that a program computes; bits that it reads are exact."""
    eqns = (eqn for eqn in _compat.every_eqn(jaxpr) if eqn.primitive.name != BITS)
    dtypes = [getattr(v.aval, "dtype", jnp.int32) for eqn in eqns for v in eqn.outvars]
    floats = [jnp.dtype(d) for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return max([jnp.dtype(jnp.float64), *floats], key=lambda d: float(jnp.finfo(d).eps))


def _parts(value: jax.Array, role: _batch.Role, split: Sizes, fold: bool) -> jax.Array:
    """Returns a leaf of the loss's arguments with a new first dimension, over the parts.

    A leaf that is the same for every part keeps its shape.
    """
    ways, microbatches = math.prod(split.values()), split[MICROBATCH_AXIS]

    def key(part: int) -> jax.Array:
        device, microbatch = divmod(part, microbatches)
        key = jax.random.fold_in(value, device)
        return jax.random.fold_in(key, microbatch) if microbatches > 1 else key

    if role.kind == _batch.BATCH:
        return _batch.split(value, role.dim, ways)
    if role.kind == _batch.KEY:
        return jnp.stack([key(part) if fold else value for part in range(ways)])
    return value


def _one_by_one(
    loss: Callable, split: Sizes, differentiate: bool, floats: Inputs, same: Inputs, parts: Inputs
) -> tuple[jax.Array, list[jax.Array], Inputs | None]:
    """Returns the losses of the parts, their aux, and the sum of their gradients."""
    run = _with_gradients(loss, differentiate)

    def add(total: Inputs | None, part: Inputs) -> PyTree:
        result, grads = run(floats, same, part)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), result

    zeros = {i: jnp.zeros(v.shape, wide(v.dtype)) for i, v in floats.items()}
    ways = math.prod(split.values())
    total, (losses, aux) = jax.lax.scan(add, zeros if differentiate else None, parts, ways)
    return losses, aux, total


def _all_at_once(
    loss: Callable, split: Sizes, differentiate: bool, floats: Inputs, same: Inputs, parts: Inputs
) -> tuple[jax.Array, list[jax.Array], Inputs | None]:
    every, sizes = loss, tuple(split.values())
    for name in reversed(split):
        every = jax.vmap(every, (None, None, 0), axis_name=name, axis_size=split[name])

    def total(*inputs: Inputs) -> PyTree:
        losses, aux = every(*inputs)
        return losses.sum(), (losses, aux)

    parts = {i: v.reshape(*sizes, *v.shape[1:]) for i, v in parts.items()}
    (_, (losses, aux)), grads = _with_gradients(total, differentiate)(floats, same, parts)
    aux = [a.reshape(-1, *a.shape[len(sizes) :]) for a in aux]
    return losses.reshape(-1), aux, grads


@contextlib.contextmanager
def _ragged_dots_in_turn(jaxpr: Jaxpr) -> Generator[None]:
    """Has `jax.vmap` run each `ragged_dot` in turn: of weights that are not mapped, JAX cannot."""
    rules, eqns = _compat.VMAP_RULES, _compat.every_eqn(jaxpr)
    old = {e.primitive: rules[e.primitive] for e in eqns if e.primitive.name == RAGGED}
    rules.update({dot: functools.partial(_in_turn, dot) for dot in old})
    try:
        yield
    finally:
        rules.update(old)


def _in_turn(dot: Primitive, _: PyTree, values: PyTree, dims: PyTree, **params: PyTree) -> PyTree:
    pairs, whole = enumerate(zip(values, dims, strict=True)), dict(enumerate(values))
    parts = {k: jnp.moveaxis(x, d, 0) for k, (x, d) in pairs if d is not None}
    return jax.lax.map(lambda x: dot.bind(*(whole | x).values(), **params), parts), 0


def _with_gradients(function: Callable[..., PyTree], differentiate: bool) -> Callable[..., PyTree]:
    """Returns `function` with gradients by its first argument, or with None in their place."""
    if differentiate:
        return jax.value_and_grad(function, has_aux=True)
    return lambda *inputs: (function(*inputs), None)


def _check_fits(plan: Plan, device: Device) -> None:
    """Raises where the device reports no room for the full state and its successor."""
    stats = getattr(device, "memory_stats", dict)() or {}
    state = sum(leaf.nbytes for leaf in plan.leaves)
    grads = sum(leaf.nbytes for leaf in plan.params)
    needed = 2 * state + 2 * grads
    free = stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    if needed > free:
        raise ValueError(
            f"the replay needs {human_bytes(needed)} on {device}, and {human_bytes(free)} are "
            f"free: the full state before and after ({human_bytes(state)} each) and gradients "
            f"({human_bytes(grads)}, twice). Activations come on top. Verify a smaller model "
            "(fewer layers, same code), or replay in host memory: device=jax.devices('cpu')[0]."
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of a step beside the right ones: the replay of the parts on one device."""

    reference: Reference
    right: Replayed
    tolerance: float
    state: PyTree  # the step's new one, as the following
    metrics: dict[str, PyTree]
    grads: PyTree  # where they are known

    @property
    def loss(self) -> PyTree:
        return self.metrics.get("loss")

    @functools.cached_property
    def wanted(self) -> tuple[ByName, Spreads]:
        """The right new state, and how far rounding may put each of its elements from it."""
        return self.led_to(self.right.grads)

    @functools.cached_property
    def numbers(self) -> InTwoLeaves:
        """The masters and moments that the state keeps in 8 bits."""
        return _decoded.numbers_of(self.reference.plan)

    def values(self, state: PyTree) -> ByName:
        """Returns the leaves of a state, and `numbers`, by name."""
        with jax.default_device(self.reference.device):
            return _decoded.by_name(state, self.reference.plan, self.numbers)

    def led_to(self, grads: PyTree) -> tuple[ByName, Spreads]:
        """Returns the new state that these gradients lead to, and how far rounding moves it."""

        def update(grads: PyTree) -> ByName:
            return self.values(self.reference.update(grads, self.right))

        seen = grads if self.grads is None else self.grads
        return _compare.led_to(update, grads, self.tolerance, seen)

    def state_checks(self, new: ByName, spreads: Spreads) -> Iterator[Check]:
        """Compares the step's new state with another one, leaf by leaf, judged by the change that
        the step should make; and its padding with zeros."""
        reference, values = self.reference, self.values(self.state)
        old, places = self.values(reference.state), {x.path: x for x in reference.plan.leaves}
        roles = dict(zip(places, roles_of(reference.state), strict=True))
        parts = (item for leaves in self.numbers.values() for item in leaves.items())
        coded = {name for role, name in parts if role != AS_WEIGHT}
        for name, leaf in new.items():
            place, leaves, role = places.get(name), self.numbers.get(name, {}), roles.get(name)
            kind = place.kind if place else PARAMS if CORRECTION in leaves else OPT_STATE
            if name not in values:
                if place:
                    yield Check(name, kind, np.inf, 0.0, 0.0, f"{WRONG}: missing")
                continue
            value, wanted, far = values[name], _compare.numbers(leaf), spreads[name]
            change = wanted - _compare.numbers(old[name])
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                eps = 0.0 if leaves else 4 * float(jnp.finfo(leaf.dtype).eps)
                far = far + self.tolerance * float(np.max(np.abs(np.nan_to_num(change)), initial=0))
                far = far + eps * np.abs(np.nan_to_num(wanted))
            if leaves:
                far = far + _decoded.apart(leaves, wanted)
            if role in CODES_APART:
                # Another neighbour, at random; codes also count from another scale.
                far = far + (np.abs(wanted) / 8 if role == SCALES else CODES_APART[role])
            padded = place and place.padded_shape
            check = _compare.compare(name, kind, value, leaf, far, judged=change, rests=padded)
            if name not in coded or check.is_wrong or check.copies_differ:
                yield check
            if place and place.rest.padding and np.shape(value) == padded:
                yield _compare.compare_padding(name, value, place.shape)

    def gradient_checks(self, grads: PyTree) -> Iterator[Check]:
        """Compares the step's gradients, where they are known, with others."""
        if self.grads is None:
            return iter(())
        limits = _compare.gradient_limits(grads, self.tolerance)
        rests = [leaf.padded_shape for leaf in self.reference.plan.params]
        return _compare.compare_trees("grads", "gradient", self.grads, grads, limits, rests)


def averaged(aux: PyTree, mutable: Sequence[str] = ()) -> PyTree:
    """Returns the mean over the parts, or the first part's value of a field that has no mean."""

    def mean(path: tuple, leaf: jax.Array) -> jax.Array:
        if has_no_mean(path, leaf, mutable):
            return leaf[0]
        return jnp.mean(leaf, axis=0, dtype=wide(leaf.dtype))  # floats, of integers too

    return jax.tree_util.tree_map_with_path(mean, aux)


# -- random numbers: with keys from which all are alike, a loss can be compared at all

DRAWS = {"random_bits", "random_gamma", "rng_bit_generator", "threefry2x32"}
TAG = "zerojax_alike"  # in the dtypes of these keys: key<zerojax_alike>


def _bits(key: jax.Array, width: int, shape: Shape) -> jax.Array:
    """Returns bits that make `jax.random.uniform` 0.25: dropout of up to 3 in 4 keeps all."""
    return jnp.full(shape, jnp.dtype(f"uint{width}").type(1 << (width - 2)))


ALIKE = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jnp.full(2, seed, jnp.uint32),
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
    random_bits=_bits,
    fold_in=lambda key, _: key,
    name=TAG,
    tag=TAG,
)


def alike(key: jax.Array) -> jax.Array:
    """Returns a key for a key, typed or old-style, from which every draw is the same number."""
    words = jnp.zeros((*(key.shape if is_key(key) else key.shape[:-1]), 2), jnp.uint32)
    return jax.random.wrap_key_data(jax.device_put(words, key.sharding), impl=ALIKE)


def has_keys_of_its_own(jaxpr: Jaxpr) -> bool:
    """Whether a loss traced with keys that are `alike` draws from others too."""
    draws = (eqn for eqn in _compat.every_eqn(jaxpr) if eqn.primitive.name in DRAWS)
    return any(TAG not in str(type_of(eqn.invars[0]).dtype) for eqn in draws)
