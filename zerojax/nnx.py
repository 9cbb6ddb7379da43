"""Flax nnx: a model and its optimizer, sharded in place and trained by calling a step on them.

    import zerojax.nnx

    model = Model(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, stage=3)
    step = zerojax.nnx.train_step(loss_fn)  # loss_fn(model, batch) -> loss
    for batch in data:
        metrics = step(model, optimizer, batch)  # both updated in place

`zerojax.save` and `zerojax.restore` take a state without objects: `zerojax.nnx.state(model,
optimizer)` returns it, and `zerojax.nnx.update` puts one back. `zerojax.nnx.merge` makes a second
model, to sample from. `step.pure` returns the arguments of
`zerojax.verify` and `zerojax.audit`: `zerojax.verify(*step.pure(model, optimizer, batch))`.
`zerojax.forecast`, `choose` and `study` take the loss or the step itself, with a function that
returns a model and its optimizer.
"""

import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax._axis_types import NO_MESH, seen_as
from zerojax._declared import Options, checked, option, takes
from zerojax._jaxprs import source
from zerojax._loss import arguments as _arguments
from zerojax._loss.trace import split_aux
from zerojax._plan import move as _move, planner as _planner, quantize as _quantize
from zerojax._plan.plan_options import PlanOptions
from zerojax._state import carried as _carried, nnx_state as _nnx_state, refusals as _refusals
from zerojax._state.nnx_structure import Structure
from zerojax._state.state import NNX_FIELDS, state_of
from zerojax._step import step as _step
from zerojax._step.step_options import LossOptions, StepOptions
from zerojax._types import PyTree, is_key, kinds_of

state = checked(_nnx_state.state)
update = checked(_nnx_state.update)


@checked
def merge(state: _nnx_state.State, params: PyTree) -> nnx.Module:
    """Returns a new model with these parameters, and copies of the state's other variables.

    To generate while the model trains, with parameters that stay where they are used, merge
    `zerojax.reshard(state)`.

    Example:
        >>> import zerojax.nnx
        >>> from flax import nnx
        >>> model = nnx.Linear(64, 16, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> state = zerojax.nnx.state(*zerojax.nnx.shard(model, optimizer, stage=3))
        >>> print(zerojax.nnx.merge(state, zerojax.reshard(state))(jnp.ones((1, 64))).shape)
        (1, 16)
    """
    values = jax.tree.map(jnp.copy, state.variables["values"])
    try:
        return nnx.merge(state.variables["graphdef"], params, values)
    except ValueError as error:
        raise ValueError(
            f"params= are not the parameters of the model in state= ({error}). Pass state.params, "
            "or what zerojax.unpad, reshard or dequantize makes of them."
        ) from error


def _optimizer(optimizer: object) -> object:
    if optimizer is not None and not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, not a nnx.Optimizer. Make one: "
            "nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )
    own = {nnx.Optimizer.update, nnx.ModelAndOptimizer.update}
    if optimizer is not None and type(optimizer).update not in own:
        raise TypeError(
            f"a {type(optimizer).__name__} overrides nnx.Optimizer.update, and a step runs only tx "
            "of an optimizer. Put what it does to gradients into tx, optax.chain(..., tx), and do "
            "the rest after the step."
        )
    return optimizer


@dataclasses.dataclass(frozen=True)
class _OptimizerOption(Options):
    optimizer: nnx.Optimizer | None = option(
        None,
        """a `nnx.Optimizer` of the model. Parameters outside its `wrt` (all but LoRA's, say) are
        sharded too, and have neither gradients nor optimizer state.""",
        check=_optimizer,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelOptions(PlanOptions, _OptimizerOption):
    """Options of `shard`: the optimizer, then those of any state."""

    abstract: bool = option(
        False,
        """moves and makes nothing: both then hold shapes with shardings, for `step.pure`,
        `zerojax.audit` and `step.compile`. The mesh may be of `zerojax.aot`.""",
    )


@takes(_ModelOptions)
def shard(model: PyTree, options: _ModelOptions) -> tuple[PyTree, nnx.Optimizer]:
    """Places a model and its optimizer for a ZeRO stage, in place.

    Arguments:
        model: a `nnx.Module`; or, without `optimizer`, a function that returns a model and its
            optimizer. It is compiled, so that the result is sharded from the start and no device
            ever has all of it. Axes in annotations of weights, or over which they are sharded
            already (a `tensor` axis), stay if the mesh has them.
        {options}

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
    optimizer = options.optimizer
    if optimizer is None:
        make = functools.partial(_pair, model)
        source: PyTree = functools.partial(_nnx_state.made_state, make)
        # `state_of` leaves no tracers in closures of modules and the optimizer.
        made = functools.partial(state_of, lambda: nnx.split(make()))
        made = seen_as(jax.sharding.get_abstract_mesh())(made)
        with seen_as(NO_MESH):  # Flax looks for axes of annotations, which the mesh may lack.
            model, optimizer = nnx.merge(*jax.eval_shape(made))
    else:
        source = _nnx_state.shown_state(model, optimizer)
    planned = {f.name: getattr(options, f.name) for f in dataclasses.fields(PlanOptions)}
    if options.abstract:
        placed = _planner.plan(source, **planned).abstract()
    else:
        placed = _planner.shard_train_state(source, **planned)
    if options.precision is not None and options.precision.stores:
        _renew(model, optimizer, placed.tx.original)
    optimizer.tx = placed.tx
    update(model, optimizer, placed)
    return model, optimizer


def _renew(model: nnx.Module, optimizer: nnx.Optimizer, tx: optax.GradientTransformation) -> None:
    """Gives an optimizer the variables that it needs for a state of another structure."""

    def pair(model: nnx.Module) -> tuple[nnx.Module, nnx.Optimizer]:
        for _, node in nnx.iter_graph(model):  # whose metadata the optimizer's variables take
            if isinstance(node, nnx.Variable):
                node.set_metadata("eager_sharding", False)
        return model, nnx.Optimizer(model, tx, wrt=optimizer.wrt)

    like = nnx.eval_shape(lambda model: _nnx_state.called(lambda: pair(model)), model)
    optimizer.opt_state = like[1].opt_state


@checked
def quantize(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    codes: str = "nf4",
    *,
    where: str | None = None,
    block: int = 64,
) -> tuple[nnx.Module, nnx.Optimizer]:
    """Quantizes frozen weights of a model to 4 or 8 bits, in place: see `zerojax.quantize`.

    Call it before `shard`, or in the function that makes the model. A step's loss gets the model
    with its weights. To call the model yourself, make a second one, and go on training this one:
    `zerojax.nnx.merge(s, zerojax.manual.dequantize(s.params))` with
    `s = zerojax.nnx.state(model, optimizer)`.

    Example:
        >>> import zerojax.nnx
        >>> from flax import nnx
        >>> model = nnx.LoRALinear(64, 128, lora_rank=4, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
        >>> zerojax.nnx.shard(*zerojax.nnx.quantize(model, optimizer), stage=3)[0] is model
        True
        >>> step = zerojax.nnx.train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2))
        >>> float(step(model, optimizer, jnp.zeros((8, 64)))["loss"])
        1.0
    """
    old = state(model, optimizer)
    new = _quantize.quantize(old, codes, where=where, block=block)
    nnx.update(model, new.params)
    if jax.tree.structure(new.opt_state) != jax.tree.structure(old.opt_state):
        _renew(model, optimizer, optimizer.tx)
        update(model, optimizer, new)
    return model, optimizer


def _pair(make: PyTree) -> tuple[nnx.Module, nnx.Optimizer]:
    """Returns the model and the optimizer that a function makes, or a pair itself."""
    pair = _nnx_state.called(make)
    if not _nnx_state.is_pair(pair):
        raise TypeError(
            "zerojax.nnx.shard takes a model and its optimizer, or a function that returns both, "
            f"not only a {type(pair).__name__}. Call zerojax.nnx.shard(model, optimizer), with "
            "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )
    _optimizer(pair[1])
    return pair


class ModelStep:
    """A step that takes a model and its optimizer.

    `pure(model, optimizer, batch)` returns the arguments of `zerojax.verify` and `zerojax.audit`: a
    step of states without objects, and its arguments. `zerojax.forecast`, `choose` and `study` take
    this step, or its loss, with a function that makes the model and its optimizer.
    """

    def __init__(self, functional: Callable[..., PyTree]) -> None:
        self._functional = functional
        self._structure = Structure()

    def __repr__(self) -> str:
        return repr(self._functional)

    def pure(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: PyTree, rng: PyTree = None
    ) -> tuple:
        _nnx_state.check_arguments(model, batch, rng)
        placed = self._structure.state(model, optimizer)
        plan = _carried.carried_plan(placed)
        if plan is None:
            raise ValueError(
                "the model or its optimizer is not placed. First call zerojax.nnx.shard(model, "
                "optimizer, stage=3), with groups= and the like; do so again for a new optimizer "
                "of a sharded model."
            )
        traced = any(issubclass(kind, Tracer) for kind in kinds_of(batch))  # inside `jax.jit`
        back = placed if traced else plan._brought_back(placed)
        if back is not placed:
            update(model, optimizer, back)
            # New variables may show logical values only now.
            placed = self._structure.state(model, optimizer) if plan._pads_params else back
        # A step returns replicated counts; from counts elsewhere, it would compile a second time.
        everywhere = NamedSharding(plan.mesh, PartitionSpec())
        for variable in _nnx_state.stream_variables(rng, nnx.RngState):
            value = variable.get_value()
            if not isinstance(value, Tracer) and value.sharding != everywhere:
                variable.set_value(_move.moved(value, everywhere))
        keys = _keys(placed, rng)
        return self._functional, placed, batch, *([] if keys is None else [keys])

    def compile(self, *args: PyTree) -> "ModelStep":
        """Compiles the step for `(model, optimizer, batch[, rng])`, and runs nothing."""
        step, *inputs = self.pure(*args)
        return ModelStep(step.compile(*inputs))

    def load(self, path: str | os.PathLike[str], *args: PyTree) -> "ModelStep":
        """Loads what `compile(*args).save(path)` has written, as a step of `train_step` does."""
        step, *inputs = self.pure(*args)
        return ModelStep(step.load(path, *inputs))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a compiled step to a file."""
        self._functional.save(path)

    def _unmade(self, make: PyTree, rng: PyTree = None) -> tuple:
        """Returns the arguments of forecasts: a step, a function that makes a state, the state's
        shapes, and keys."""
        source = functools.partial(_nnx_state.made_state, make)
        made = functools.partial(state_of, source)
        shapes = make if isinstance(make, _nnx_state.State) else jax.eval_shape(made)
        return self._functional, source, shapes, _keys(shapes, rng)

    def __call__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, batch: PyTree, rng: PyTree = None
    ) -> dict[str, PyTree]:
        step, *args = self.pure(model, optimizer, batch, rng)
        metrics = step(*args)
        if isinstance(metrics, tuple):  # of a training step
            new, metrics = metrics
            self._structure.update(model, optimizer, new)
        aux = metrics.pop("aux", {})
        _nnx_state.advance(rng, aux.pop("drawn", []))
        return metrics | aux


def _keys(placed: _nnx_state.State, rng: PyTree) -> dict[str, PyTree] | None:
    """Returns the keys for a step: the loss's own, and one that folds the model's streams."""
    keys = {} if rng is None else {"loss": _nnx_state.without_objects(rng)}
    if any(map(is_key, jax.tree.leaves(placed.variables))):
        keys["streams"] = _device_key()
    return keys or None


@takes(StepOptions)
def train_step(loss_fn: Callable[..., PyTree], options: StepOptions) -> ModelStep:
    """Makes a step `(model, optimizer, batch[, rng]) -> metrics` that updates both in place.

    It updates parameters, optimizer state, batch statistics and the counts of random streams like a
    loop with `nnx.value_and_grad` and `optimizer.update`. Streams (`nnx.Rngs`) draw differently on
    each device and for each microbatch; `rng` is a key, or streams of yours, which advance in place
    as under `nnx.jit`. Batch statistics are means over the devices; give `nnx.BatchNorm`
    `axis_name="data"` for those of the whole batch. Variables of integers, booleans and other keys
    get their values from the first device, as with `mutable=`.

    Arguments:
        loss_fn: `loss_fn(model, batch[, rng])` returns a scalar, or `(scalar, aux)`.
        {options}

    A `nnx.Embed` without `dtype` computes in the dtype of its table, which `precision` may cast.

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
    return ModelStep(_step.train_step(loss, mutable=NNX_FIELDS, **vars(options)))


@takes(LossOptions)
def eval_step(loss_fn: Callable[..., PyTree], options: LossOptions) -> ModelStep:
    """Makes a step `(model, optimizer, batch[, rng]) -> metrics` that changes neither of these two.

    A `nnx.Rngs` as `rng` advances, as in `train_step`.

    Arguments:
        loss_fn: as in `train_step`.
        {options}

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
    return ModelStep(_step.eval_step(loss, mutable=NNX_FIELDS, **vars(options)))


def _call(
    loss_fn: Callable[..., PyTree],
    updates: bool,
    params: PyTree,
    batch: PyTree,
    keys: dict[str, jax.Array] | None = None,
    *,
    variables: dict[str, PyTree],
) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns the loss of a model made of `params` and `variables`, and the new variables."""
    keys = keys or {}
    model = nnx.merge(variables["graphdef"], params, variables["values"])
    # A `nnx.Embed` takes the dtype that its table has when it is made. If the table is cast later,
    # it would widen the rows again, and with them everything computed from them. Its constructor
    # takes a np.dtype from the array; users write jnp.float32, which stays.
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Embed) and isinstance(module.dtype, np.dtype):
            is_default = module.dtype == jnp.dtype(module.param_dtype)
            module.dtype = module.embedding.dtype if is_default else module.dtype
    if "streams" in keys:
        _nnx_state.set_apart(model, keys["streams"])
    rng = _nnx_state.with_objects(keys.get("loss"))
    before = [count.get_value() for count in _nnx_state.stream_variables(rng, nnx.RngCount)]
    args = (model, batch, *([] if rng is None else [rng]))
    loss, aux = split_aux(_refusals.called(loss_fn, args, {}, "model"), None)
    outputs: dict[str, PyTree] = {} if aux is None else {"aux": aux}
    if before:
        outputs["drawn"] = _nnx_state.drawn(rng, before)
    if updates:
        outputs["variables"] = variables | {"values": _left(model, params, variables["values"])}
    return loss, outputs


def _left(model: nnx.Module, params: PyTree, before: PyTree) -> PyTree:
    """Returns the variables of a model after its loss; None, which keeps it, for a stream's key."""
    own, new = dict(nnx.to_flat_state(params)), dict(nnx.to_flat_state(nnx.state(model)))
    for path in filter(new.__contains__, own):
        if source(nnx.as_pure(new.pop(path))) is not own[path]:
            raise ValueError(
                f"the loss assigns the parameter {'/'.join(map(str, path))} of the model, and only "
                "the optimizer of a step changes a nnx.Param. Assign it after the step, or in the "
                "loss that of a copy, nnx.clone(module). If the optimizer does not update it, make "
                "it a nnx.BatchStat, which a loss may assign."
            )
    for path in new.keys() ^ {path for path, _ in nnx.to_flat_state(before)}:
        what = "added" if path in new else "removed"
        raise ValueError(
            f"the loss {what} the variable {'/'.join(map(str, path))} of the model, but a step "
            "keeps the model's structure. Make it with the model, or return it as aux."
        )
    kept = {path: None if isinstance(value, nnx.RngKey) else value for path, value in new.items()}
    return nnx.as_pure(nnx.from_flat_state(kept))


@_compat.device_cache
def _device_key() -> jax.Array:
    """Returns a key that steps fold with the indices of the device and the microbatch."""
    return jax.random.key(0)
