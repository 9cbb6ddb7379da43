"""The arguments of a step: the plan that placed its state, and errors for wrong arguments.

Most errors are looked for only after a call has failed, so that correct calls pay next to nothing.
JAX names an argument of an inner function; these errors name the leaf and the remedy.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence

import flax.errors
import jax
import numpy as np
from jax.core import Tracer

from zerojax import _compat
from zerojax._plan.plan import Plan
from zerojax._plan.show import TITLES
from zerojax._run import agreement as _agreement
from zerojax._state import carried as _carried, refusals as _refusals, state as _state
from zerojax._state.state import OPT_STATE, PARAMS
from zerojax._table import human_bytes
from zerojax._types import PyTree

ELSEWHERE = {  # remedies for an argument on other devices
    "state": "Place it again: state = plan.place(state), or zerojax.shard_train_state.",
    "params": "Place them again: params = plan.place(state).params.",
    "batch": "Pass numpy arrays, or zerojax.shard_batch(batch, like=plan).",
    "rng": "Pass one that was not moved by jax.device_put: jax.random.key(n).",
}

NOTES = {  # remedies for what JAX says
    _compat.NOT_COMPILED_FOR: "A compiled step is for one plan, one optimizer object and one shape "
    "of batches. For others, such as a smaller last batch, call the step that it was compiled "
    "from, or compile that for them too: step.compile(state, batch).",
    _compat.OTHER_AXIS_TYPES: "JAX compiles a callback only where all meshes have the same types "
    "of axes. Place the state on a mesh of Auto axes, as zerojax.mesh makes it.",
    _compat.ORDERED: "JAX runs ordered effects on one device only. Leave ordered=True out of "
    "jax.debug.print and callbacks: each device then calls them for its own rows.",
    _compat.NO_KEY: "A number is no random key. Pass a step jax.random.key(0) after the batch.",
    _compat.STILL_READ: "numpy still reads an array of the state: for state in host memory, "
    "jax.device_get and np.asarray return the memory itself, which the step reuses. Copy it, "
    "jax.tree.map(np.array, state.params), or pass donate=False.",
}


@contextlib.contextmanager
def explained(args: tuple, named: dict[str, PyTree], plan: Plan | None) -> Iterator[None]:
    """Raises an error that names a step's wrong argument, in place of the error it led to."""
    try:
        if not _compat.REFUSES_DELETED and _refusals.has_gone((args, named)):
            raise ValueError("an argument has an array that was deleted")
        yield
    except Exception as error:
        if _compat.is_of_runtime(error):
            _agreement.check_order()
        try:
            signature = inspect.signature(lambda state, batch, rng=None: None)
            arguments = signature.bind(*args, **named).arguments
        except TypeError as wrong:
            check_kinds(args[0] if args else (), None)
            raise TypeError(
                f"a step is called as step(state, batch) or step(state, batch, rng): {wrong}."
            ) from error
        check_kinds(arguments["state"], arguments["batch"])
        blame(error, arguments, plan_of(arguments["state"], plan))
        raise


def plan_of(state: PyTree, passed: Plan | None) -> Plan | None:
    """Returns the plan that a state carries, or else the step's `plan=`."""
    carried = _carried.carried_plan(state)
    return passed if carried is None else carried


def blame(error: Exception, arguments: dict[str, PyTree], plan: Plan | None) -> None:
    """Raises an error for a wrong leaf of the named arguments, or adds a remedy to `error`."""
    for name, tree in arguments.items():
        _refusals.check_alive(tree, name)
        if isinstance(error, TypeError):
            _refusals.check_values(tree, name, or_shapes=True)
        if plan is not None and _compat.said(error, _compat.OTHER_DEVICES):
            _check_devices(name, tree, plan)
    if isinstance(error, jax.errors.JaxRuntimeError) and _compat.said(error, _compat.OUT_OF_MEMORY):
        error.add_note(_out_of_memory(plan))
    if any(map(_compat.is_mapped, jax.tree.leaves(arguments))):
        error.add_note(
            "jax.vmap is around value_and_grad, which splits what it gets over the devices. For "
            "the gradients of each example, have the loss return them as rows of its aux: "
            "losses, grads = jax.vmap(jax.value_and_grad(loss_of_one), (None, 0))(params, batch); "
            "return losses.mean(), grads; and pass has_aux=True."
        )
    if plan is not None and _compat.said(error, _compat.OTHER_MESH):
        raise ValueError(
            f"jax.set_mesh has set a mesh {dict(jax.sharding.get_abstract_mesh().shape)}, and the "
            f"state is placed on another one, {dict(plan.mesh.shape)}. Set the state's, "
            "jax.set_mesh(mesh), or none, or place the state on the one that is set: mesh=mesh."
        ) from error
    for words, note in NOTES.items():
        if _compat.said(error, words):
            error.add_note(note)
    if isinstance(error, flax.errors.ScopeParamShapeError):
        error.add_note(
            "If print(plan) shows that zerojax pads this parameter, so that the devices divide "
            "it, apply the model to the parameters of zerojax.unpad(state), by state.apply_fn, or "
            "place the state with pad=False."
        )


def find_plan(state: PyTree, passed: Plan | None = None) -> Plan:
    """Returns the plan that the state was placed by."""
    plan = plan_of(state, passed)
    kind = type(state).__name__
    if plan is None and _state.get_tx(state) is None:
        raise ValueError(
            f"a {kind} cannot carry its plan: it has no optimizer field, tx. Pass it: "
            "zerojax.train_step(loss_fn, plan=plan, tx=tx), with plan = zerojax.plan(state, "
            "stage=3), state = plan.place(state)."
        )
    if plan is None:
        raise ValueError(
            f"the state of type {kind} is not placed, or its optimizer was replaced since. First: "
            "state = zerojax.shard_train_state(state, stage=3)."
        )
    if passed is not None and passed != plan:
        raise ValueError(
            f"the plan that placed the state (stage {plan.stage} on {plan.mesh.devices.size} "
            f"devices) is not plan= (stage {passed.stage} on {passed.mesh.devices.size}). Place "
            "the state again: state = plan.place(state)."
        )
    return plan


def check_loss(loss_fn: object) -> None:
    """Raises for a model, a state or anything else that is no function."""
    if _refusals.is_flax_module(loss_fn) or not callable(loss_fn):
        raise TypeError(
            f"the loss is a {type(loss_fn).__name__}. Pass a function, loss_fn(params, batch) -> "
            "loss, that calls the model (loss_fn(model, batch) for zerojax.nnx)."
        )


def mutable_names(mutable: object) -> tuple[str, ...]:
    """Returns the names in `mutable=`; raises for other values, and for fields of the optimizer."""
    names = [mutable] if isinstance(mutable, str) else mutable
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"mutable={mutable!r} does not name fields of the state. Pass strings, such as "
            "mutable=('batch_stats',)."
        )
    for name in {PARAMS, OPT_STATE}.intersection(names):
        raise ValueError(
            f"mutable= names {name!r}, which the optimizer updates. Name fields that the loss "
            "updates, such as 'batch_stats'."
        )
    return tuple(names)


def check_kinds(state: PyTree, batch: PyTree) -> None:
    """Raises where the state or the batch is something else."""
    _refusals.check_functional(state)
    message = ""
    if _is_state(batch) and not _is_state(state):
        message = "state and batch are in the other order. Call step(state, batch)."
    elif isinstance(state, tuple) and state and _is_state(state[0]):
        message = (
            "the state is the tuple that a step returns, with the state first. Take it apart: "
            "state, metrics = step(state, batch)."
        )
    elif state is None or hasattr(state, "shape"):
        what = "None" if state is None else f"an array of shape {np.shape(state)}"
        message = f"the state is {what}. Call step(state, batch) with a placed state."
    elif isinstance(batch, Iterator):
        message = f"the batch is a {type(batch).__name__}. Pass one batch of it: next(batch)."
    if message:
        raise TypeError(message)


def _is_state(value: object) -> bool:
    parts = {PARAMS, OPT_STATE}
    return _state.get_tx(value) is not None or (isinstance(value, dict) and parts <= value.keys())


def _check_devices(name: str, tree: PyTree, plan: Plan) -> None:
    """Raises for an array that is on other devices than the plan's."""
    for leaf in _state.leaves_with_paths(tree):
        value = leaf.value
        if not isinstance(value, jax.Array) or isinstance(value, Tracer) or not value.committed:
            continue
        ids = sorted(device.id for device in value.sharding.device_set)
        if value.sharding.device_set != set(plan.mesh.devices.flat):
            there = f"only on device {ids[0]}" if len(ids) == 1 else f"on {len(ids)} devices"
            raise ValueError(
                f"{_refusals.where(name, leaf)} is {there}, and the plan's mesh has "
                f"{plan.mesh.devices.size}: incompatible devices. {ELSEWHERE[name]}"
            )


def _out_of_memory(plan: Plan | None) -> str:
    """Returns a note that says what takes memory, and how to need less of it."""
    look = (
        "print(plan) shows every leaf, zerojax.audit(step, state, batch) the contents of memory at "
        "the peak, zerojax.forecast(step, make_state, batch, gpus=...) what would fit."
    )
    if plan is None:
        return f"Out of memory. {look}"
    sizes = [(leaf.bytes_per_device(plan.mesh), leaf.path) for leaf in plan.leaves]
    largest = sorted(sizes, key=lambda pair: -pair[0])[:3]
    named = ", ".join(f"{path} {human_bytes(size)}" for size, path in largest)
    kinds = [f"{TITLES[kind]} {human_bytes(n)}" for kind, n in plan.bytes_per_device().items() if n]
    kinds.append(f"gradients {human_bytes(plan._gradient_bytes())}")
    higher = f"stage={plan.stage + 1}, " if plan.stage < 3 else "more devices, "
    return (
        f"Out of memory. By the plan, each device has {', '.join(kinds)}; the largest leaves are "
        f"{named}. Activations and gathered weights come on top. Save memory with {higher}more "
        f"microbatches (accumulate=) or jax.checkpoint around layers. {look}"
    )
