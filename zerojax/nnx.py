"""Flax nnx: a model and its optimizer, sharded in place and trained by calling a step on them.

    import zerojax.nnx

    model = Model(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, stage=3)
    step = zerojax.nnx.train_step(loss_fn)  # loss_fn(model, batch) -> loss
    for batch in data:
        metrics = step(model, optimizer, batch)  # both updated in place

What `zerojax.save` and `zerojax.restore` take is a state without objects:
`zerojax.nnx.state(model, optimizer)` takes it out, and `zerojax.nnx.update` puts one back in.
`step.pure` returns what `zerojax.verify` and `zerojax.audit` take:
`zerojax.verify(*step.pure(model, optimizer, batch))`. `zerojax.forecast`, `choose` and `study` take
the step itself, with a function that returns a model and its optimizer.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax._loss import arguments as _arguments
from zerojax._loss.trace import split_aux
from zerojax._plan import dimension as _dimension, move as _move, place as _place
from zerojax._plan.precision import Precision, storing
from zerojax._state import carried as _carried, nnx_streams as _streams, refusals as _refusals
from zerojax._state.nnx_state import (
    State as State,
    Variables,
    state as state,
    update as update,
)
from zerojax._state.state import state_of
from zerojax._step import step as _step
from zerojax._types import PyTree, is_key
from zerojax._update.offload import Offload


def shard(
    model: PyTree,
    optimizer: nnx.Optimizer | None = None,
    stage: int = 3,
    *,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] | None = None,
    groups: Mapping[str, str | Sequence[str]] | None = None,
    overrides: Mapping[str, PartitionSpec] | None = None,
    min_shard_size: int = _dimension.DEFAULT_MIN_SHARD_SIZE,
    stacked: str | None = None,
    pad: bool = True,
    precision: Precision | None = None,
    offload: Offload | str | Sequence[str] | None = None,
) -> tuple[PyTree, nnx.Optimizer]:
    """Places a model and its optimizer for a ZeRO stage, in place.

    Arguments:
        model: a `nnx.Module`; or, without `optimizer`, a function that returns a model and its
            optimizer, compiled so that they are made sharded and no device ever has all of them.
            Axes that weights are annotated with, or sharded over already (a `tensor` axis), are
            kept where the mesh has them.
        optimizer: a `nnx.Optimizer` of the model. What its `wrt` leaves out of the parameters (all
            but LoRA's, say) is sharded too, and has neither gradients nor optimizer state.
        stage, mesh, axis, groups, overrides, min_shard_size, stacked, pad, precision, offload: as
            in `zerojax.shard_train_state`.

    Returns:
        The model and the optimizer.

    Example:
        >>> import zerojax.nnx
        >>> from flax import nnx, struct
        >>> model = nnx.Linear(64, 16, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> model, optimizer = zerojax.nnx.shard(model, optimizer, stage=3)
        >>> print(model.kernel.shape, model.kernel.addressable_shards[0].data.shape)
        (64, 16) (8, 16)
    """
    _check_optimizer(optimizer)
    if optimizer is None:
        source: PyTree = functools.partial(_made_state, model)
        model, optimizer = nnx.eval_shape(functools.partial(_whole, model))
    else:
        source = state(model, optimizer)
    placed = _place.shard_train_state(
        source,
        stage,
        mesh=mesh,
        axis=axis,
        groups=groups,
        overrides=overrides,
        min_shard_size=min_shard_size,
        stacked=stacked,
        pad=pad,
        precision=precision,
        offload=offload,
    )
    tx = _stored_with(precision, model, optimizer)
    optimizer.tx = _carried.PlannedTransformation(tx, _carried.carried_plan(placed))
    update(model, optimizer, placed)
    return model, optimizer


def _check_optimizer(optimizer: object) -> None:
    if optimizer is not None and not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, not a nnx.Optimizer. Make one: "
            "nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )


def _stored_with(
    precision: Precision | None, model: nnx.Module, optimizer: nnx.Optimizer
) -> optax.GradientTransformation:
    """Returns the transformation that the placed state was made for.

    Where `precision` changed it, the optimizer gets variables for its state.
    """
    tx = getattr(optimizer.tx, "original", optimizer.tx)
    stored = storing(tx, optimizer.opt_state, precision)
    if stored is not tx:
        like = nnx.eval_shape(lambda m: nnx.Optimizer(m, stored, wrt=optimizer.wrt), model)
        optimizer.opt_state = like.opt_state
    return stored


def _whole(make: PyTree) -> tuple[nnx.Module, nnx.Optimizer]:
    """Returns what `make` makes, without tracers in what its modules and optimizer close over."""
    return nnx.merge(*state_of(lambda: nnx.split(_made(make))))


def _made_state(make: PyTree) -> State:
    return state(*_made(make))


def _made(make: PyTree) -> tuple[nnx.Module, nnx.Optimizer]:
    made = _called(make) if callable(make) and not isinstance(make, nnx.Module) else make
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], nnx.Optimizer)):
        raise TypeError(
            "zerojax.nnx.shard takes a model and its optimizer, or a function that returns both, "
            f"and got a {type(made).__name__} alone: zerojax.nnx.shard(model, optimizer), with "
            "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )
    return made


def _called(make: Callable[[], PyTree]) -> PyTree:
    """Returns what a function makes, where its models leave it to the plan to shard variables.

    Flax would do so at once, over axes that the mesh may lack, and be in the way of `jax.jit`.
    """
    with nnx.use_eager_sharding(False):
        return make()


class Step:
    """A step that takes a model and its optimizer.

    `pure(model, optimizer, batch)` returns what `zerojax.verify` and `zerojax.audit` take: a step
    of states without objects, and its arguments. `zerojax.forecast`, `choose` and `study` take the
    step as it is, with a function that makes the model and its optimizer.
    """

    def __init__(self, functional: Callable[..., PyTree]) -> None:
        self.functional = functional

    def pure(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: PyTree, rng: PyTree = None
    ) -> tuple:
        _streams.check_arguments(model, batch, rng)
        placed = state(model, optimizer)
        plan = _carried.carried_plan(placed)
        if plan is None:
            raise ValueError(
                "the model or its optimizer is not placed. First: zerojax.nnx.shard(model, "
                "optimizer, stage=3), with groups= and the like. A new optimizer of a sharded "
                "model is placed with it in the same way."
            )
        everywhere = NamedSharding(plan.mesh, PartitionSpec())
        _streams.place(rng, functools.partial(_at, everywhere))
        keys = _keys(placed, _streams.without_objects(rng))
        return self.functional, placed, batch, *([] if keys is None else [keys])

    def _unmade(self, make: PyTree, rng: PyTree = None) -> tuple:
        """Returns what forecasts take: a step of states, a function that makes one, and keys."""
        source = functools.partial(_made_state, make)
        keys = _keys(jax.eval_shape(source), _streams.without_objects(rng))
        return self.functional, source, keys

    def __call__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: PyTree, rng: PyTree = None
    ) -> dict[str, PyTree]:
        step, *args = self.pure(model, optimizer, batch, rng)
        metrics = step(*args)
        if isinstance(metrics, tuple):  # of a training step
            new, metrics = metrics
            update(model, optimizer, new)
        aux = metrics.pop("aux", {})
        _streams.advance(rng, aux.pop("drawn", []))
        return metrics | aux


def _at(sharding: NamedSharding, value: jax.Array) -> jax.Array:
    is_there = isinstance(value, Tracer) or value.sharding == sharding
    return value if is_there else _move.moved(value, sharding)


def _keys(placed: State, rng: PyTree) -> dict[str, PyTree] | None:
    """Returns the keys that a step is given: the loss's own, and one that streams are folded by."""
    keys = {} if rng is None else {"loss": rng}
    if any(map(is_key, jax.tree.leaves(placed.variables))):
        keys["streams"] = _device_key()
    return keys or None


def train_step(loss_fn: Callable[..., PyTree], **options: PyTree) -> Step:
    """Makes a step `(model, optimizer, batch[, rng]) -> metrics` that updates both in place.

    Parameters, optimizer state, batch statistics and the counts of random streams are updated as in
    a loop with `nnx.value_and_grad` and `optimizer.update`. Streams (`nnx.Rngs`) draw differently
    on each device and for each microbatch; `rng` is a key, or streams of yours, which advance in
    place as under `nnx.jit`. Batch statistics are means over the devices; give
    `nnx.BatchNorm` `axis_name="data"` for those of the whole batch. Variables of integers,
    booleans and other keys become what the first device makes of them, as in `mutable=`.

    Arguments:
        loss_fn: `loss_fn(model, batch[, rng])` returns a scalar, or `(scalar, aux)`.
        options: `accumulate`, `order`, `precision`, `regather`, `prefetch`, `update`,
            `activations`, `skip_nonfinite`, `donate`, `batch_specs`, `compiler_options`: as in
            `zerojax.train_step`. A `nnx.Embed` without `dtype` computes in that of its table, cast
            by `precision` or not.

    Example:
        >>> import zerojax.nnx
        >>> from flax import nnx
        >>> model = nnx.Linear(64, 16, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> model, optimizer = zerojax.nnx.shard(model, optimizer, stage=3)
        >>> step = zerojax.nnx.train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2))
        >>> first = step(model, optimizer, np.ones((8, 64), np.float32))["loss"]
        >>> bool(step(model, optimizer, np.ones((8, 64), np.float32))["loss"] < first)
        True
    """
    _arguments.check_loss(loss_fn)
    loss = functools.partial(_call, loss_fn, True)
    return Step(_step.train_step(loss, mutable=("variables",), **options))


def eval_step(loss_fn: Callable[..., PyTree], **options: PyTree) -> Step:
    """Makes a step `(model, optimizer, batch[, rng]) -> metrics` that changes neither of these two.

    A `nnx.Rngs` as `rng` advances, as in `train_step`.

    Arguments:
        loss_fn: as in `train_step`.
        options: `precision`, `batch_specs`: as in `zerojax.eval_step`.

    Example:
        >>> import zerojax.nnx
        >>> from flax import nnx
        >>> model = nnx.Linear(64, 16, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> model, optimizer = zerojax.nnx.shard(model, optimizer)
        >>> evaluate = zerojax.nnx.eval_step(lambda model, x: jnp.mean(model(x) ** 2))
        >>> print(evaluate(model, optimizer, jnp.zeros((8, 64)))["loss"])
        0.0
    """
    _arguments.check_loss(loss_fn)
    loss = functools.partial(_call, loss_fn, False)
    return Step(_step.eval_step(loss, mutable=("variables",), **options))


def _call(
    loss_fn: Callable[..., PyTree],
    updates: bool,
    params: PyTree,
    batch: PyTree,
    keys: dict[str, jax.Array] | None = None,
    *,
    variables: Variables,
) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns the loss of a model made of `params` and `variables`, and these as it left them."""
    keys = keys or {}
    model = nnx.merge(variables.graphdef, params, variables.values)
    _embed_as_stored(model)
    if "streams" in keys:
        _streams.set_apart(model, keys["streams"])
    rng = _streams.with_objects(keys.get("loss"))
    before = [count.get_value() for count in _streams.counts(rng)]
    args = (model, batch, *([] if rng is None else [rng]))
    loss, aux = split_aux(_refusals.called(loss_fn, args, {}, "model"), None)
    found: dict[str, PyTree] = {} if aux is None else {"aux": aux}
    if before:
        found["drawn"] = _streams.drawn(rng, before)
    if updates:
        paths = {path for path, _ in nnx.to_flat_state(params)}
        new = _values_of(model, variables.values, paths)
        found["variables"] = Variables(new, variables.graphdef)
    return loss, found


def _embed_as_stored(model: nnx.Module) -> None:
    """Has each `nnx.Embed` that was given no dtype return rows in its table's.

    Where it is made, it takes the dtype that the table has then: rows of one that is cast later
    would be widened again, and with them all that is computed from them.
    """
    for _, module in nnx.iter_modules(model):
        if not isinstance(module, nnx.Embed):
            continue
        # An array's dtype is a np.dtype; users write jnp.float32, and that stays.
        if isinstance(module.dtype, np.dtype) and module.dtype == jnp.dtype(module.param_dtype):
            module.dtype = module.embedding.dtype


def _values_of(model: nnx.Module, before: PyTree, params: set[tuple]) -> PyTree:
    """Returns the variables of a model after its loss, and None for the keys of its streams.

    None stands for what stays as it was.
    """
    variables = {p: v for p, v in nnx.to_flat_state(nnx.state(model)) if p not in params}
    for path in variables.keys() ^ {path for path, _ in nnx.to_flat_state(before)}:
        what = "added" if path in variables else "removed"
        raise ValueError(
            f"the loss {what} the variable {'/'.join(map(str, path))} of the model, and a step "
            "keeps the model's structure. Make it with the model, or return it as aux."
        )
    return nnx.from_flat_state(
        (path, None if isinstance(variable, nnx.RngKey) else variable.get_value())
        for path, variable in variables.items()
    )


@functools.cache
def _device_key() -> jax.Array:
    """Returns a key that steps fold with the index of the device, and of the microbatch."""
    return jax.random.key(0)
