"""Model FLOP/s utilization: the FLOPs that a step needs, over those that the devices could do."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh

from zerojax._axis_types import NO_MESH, typed
from zerojax._declared import checked
from zerojax._loss.arguments import find_plan
from zerojax._loss.fields import with_fields
from zerojax._loss.trace import traced_where_it_can_be, with_absent
from zerojax._plan.plan import Plan
from zerojax._plan.precision import Precision, cast_floats
from zerojax._state import state as _state
from zerojax._state.packed import weights_of
from zerojax._step.step import Step
from zerojax._step.step_options import precision_of
from zerojax._types import Device, PyTree
from zerojax.tools._forecast.model_flops import OF_WEIGHTS, needed
from zerojax.tools._hlo import gpus as _known


@checked
def step_flops(step: Step, state: PyTree, batch: PyTree, rng: PyTree = None) -> float:
    """Counts the FLOPs that a step needs on all devices: three times those of forward's matmuls.

    It counts the loss as you wrote it: recomputation in backward does not count, but gradients of
    frozen parameters do, although the step makes none. Of a mixture of experts, those count that
    tokens are sent to, by `ragged_dot` or by one-hot masks; and of rooms that rows are gathered
    into, all. The model FLOP/s utilization is `step_flops(...) / (seconds * peak_flops())`.

    Arguments:
        step: from `zerojax.train_step`.
        state, batch, rng: the step's arguments, or their shapes.

    Example:
        >>> state = zerojax.shard_train_state(({"w": jnp.ones((64, 16))}, ()), stage=3)
        >>> plan = zerojax.plan(state)
        >>> step = zerojax.train_step(lambda p, x: jnp.mean(x @ p["w"]), plan=plan, tx=optax.sgd(1))
        >>> print(zerojax.tools.step_flops(step, state, np.ones((8, 64))))  # 3 * 2 * 8 * 64 * 16
        49152.0
    """
    if not isinstance(step, Step):
        raise TypeError(
            f"step_flops takes a step of zerojax.train_step, got a {type(step).__name__}: "
            "step_flops(step, state, batch); with nnx "
            "step_flops(*step.pure(model, optimizer, batch))."
        )
    options = step.recipe.options
    plan, loss_fn = find_plan(state, options.plan), step.recipe.loss_fn
    return needed_flops(loss_fn, plan, batch, rng, options.mutable, options.precision)


@checked
def peak_flops(devices: Sequence[Device] | None = None) -> float | None:
    """Adds up the data-sheet FLOP/s of the devices, dense and in 16 bits; by default, of all.

    Returns None if zerojax does not know one of them.

    Example:
        >>> print(zerojax.tools.peak_flops())  # of emulated CPU devices
        None
    """
    devices = jax.devices() if devices is None else devices
    gpus = [_known.of_device_kind(device.device_kind) for device in devices]
    known = [gpu.flops for gpu in gpus if gpu is not None]
    return sum(known) if len(known) == len(gpus) else None


def needed_flops(
    loss_fn: Callable[..., PyTree],
    plan: Plan,
    batch: PyTree,
    rng: PyTree,
    mutable: Sequence[str],
    precision: Precision | None = None,
) -> float:
    """Counts three times the FLOPs of forward's matmuls over the global batch: the step does not
    need those that backward computes again."""
    # A loss may need its inputs in this dtype: its `scan` carries what a layer returns.
    compute = precision_of(plan, precision).compute

    def counted(mesh: AbstractMesh) -> float:
        def forward(state: PyTree, *args: PyTree) -> PyTree:
            logical = plan.unpad(state)
            params, treedef = jax.tree.flatten(_state.get_params(logical))
            if mesh is plan._explicit_mesh:
                seen = map(plan._seen_by_loss, plan.params)
                params = [typed(v, leaf.sharding) for v, leaf in zip(params, seen, strict=True)]
            params = weights_of(treedef.unflatten(params))
            return with_fields(loss_fn, logical, mutable)(*cast_floats([params, *args], compute))

        traced = jax.make_jaxpr(forward, axis_env=sizes)(*shapes)
        facts = [OF_WEIGHTS] * len(jax.tree.leaves(shapes[0]))
        facts += [None] * (len(traced.jaxpr.invars) - len(facts))
        return 3 * needed(traced.jaxpr, facts)

    args = (batch,) if rng is None else (batch, rng)
    shapes = jax.tree.map(_state.shape_dtype, (plan.abstract(), *args))
    sizes = [(axis, plan.mesh.shape[axis]) for axis in plan.batch_axes]
    mesh = with_absent(plan.mesh.abstract_mesh, plan._absent)
    meshes = [mesh, *filter(None, [plan._explicit_mesh]), NO_MESH]
    return traced_where_it_can_be(counted, meshes, plan.batch_axes)[0]
