"""Which updates run a layer at a time: in parts, of state in host memory, and in backward."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support.models import OPTIMIZERS
from tests.support.printed import memory
from tests.support.reference import assert_close, train_state
from tests.support.schedules import train_step

LAYERS, DIM = 3, 8
FREE = jnp.arange(24.0).reshape(6, 4) / 24
ALL = zerojax.Offload(min_bytes=0)
BATCH = np.ones((4, DIM), np.float32)


def loss(params, x):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.mean(lax.scan(layer, x @ params["embed"], params["w"])[0] ** 2)


def make_state(tx):
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "w": jax.random.normal(keys[0], (LAYERS, DIM, DIM)),
        "embed": jax.random.normal(keys[1], (DIM, DIM)),
    }
    return train_state(params, tx)


def tracing(change):
    """An optimizer whose state is a trace of its updates."""

    def update(updates, state, params=None):
        state = change(updates, state)
        return state, state

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


def each(change):
    return tracing(lambda updates, state: jax.tree.map(change, updates, state))


def check_numbers(tx, devices, steps=2, options=(), **placing):
    """Compares steps with those of plain JAX."""
    state = make_state(tx)
    plain = jax.jit(lambda s: s.apply_gradients(grads=jax.grad(loss)(s.params, BATCH)))
    placing |= {"mesh": make_mesh(devices), "stacked": "w", "min_shard_size": 1}
    placed = zerojax.shard_train_state(state, **placing)
    step = train_step(loss, **dict(options))
    for _ in range(steps):
        state, (placed, _) = plain(state), step(placed, BATCH)
    assert_close(placed.params, state.params)
    assert_close(placed.opt_state, state.opt_state, 1e-4)


# -- state in host memory: the plan says of each leaf how it is updated


def ways_of(tx, params):
    """How the state of an optimizer is updated, by its path."""
    state = jax.eval_shape(lambda: (params, tx.init(params)))
    plan = zerojax.plan(state, stacked="w", tx=tx, offload=ALL)
    notes = memory(plan)
    on_host = [leaf.path for leaf in plan.leaves if leaf.is_on_host]
    return {path.removeprefix("1/"): notes[path] for path in on_host}


def looped(x):
    x, _ = lax.scan(lambda c, y: (0.5 * c + y, None), x, jnp.arange(3.0))
    return lax.cond(jnp.float32(2) > 1, lambda x: x + 1, lambda x: x - 1, x)


KEEP = {
    "where": lambda x: jnp.where(x > 0.5, x, -x),
    "sum of a layer": lambda x: x / jnp.sum(x, axis=(1, 2), keepdims=True),
    "moved": lambda x: jnp.moveaxis(jnp.moveaxis(x, 0, 2) * 2, 2, 0),
    "reshape": lambda x: jnp.sqrt(x.reshape(len(x), -1)),
    "expanded": lambda x: (x[:, None] * jnp.ones((1, 2, 1, 1)))[:, 0],
    "slice": lambda x: x[:, 1:3, ::2],
    "concatenated": lambda x: jnp.concatenate([x, 2 * x], axis=1),
    "argmax": lambda x: jnp.argmax(x, axis=2),
    "times a matrix": lambda x: x @ FREE,
    "batched product": lambda x: jnp.einsum("lab,lcb->lac", x, x),
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.uint8),
    "constants": lambda x: x + jnp.ones_like(x) * jnp.arange(6.0),
    "barrier": lambda x: lax.optimization_barrier((x, FREE))[0],
    "loops and branches": looped,
}
MIX = {
    "sum": lambda x: x / jnp.sum(x),
    "sum over layers": lambda x: x - x.sum(0, keepdims=True),
    "running": lambda x: jnp.cumsum(x, axis=0),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "reversed": lambda x: x[::-1],
    "first layer": lambda x: x[:1] + x,
    "flat": lambda x: jnp.sort(x.reshape(-1)).reshape(x.shape),
    "merged": lambda x: (x.reshape(-1, 6) @ jnp.eye(6)).reshape(x.shape),
    "product": lambda x: jnp.einsum("lab,mab->lm", x, x),
    "contracted": lambda x: x + jnp.einsum("lab,lac->bc", x, x).sum(),
    "number of layers": lambda x: x * x.shape[0],
    "mean over layers": lambda x: 0.9 * x + x / x.shape[0],
    "layers told apart": lambda x: x + jnp.arange(float(x.shape[0]))[:, None, None],
    "noise": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "gather": lambda x: jnp.take(x, jnp.array([0, 0, 0][: x.shape[0]]), axis=0),
    "scan over layers": lambda x: lax.scan(lambda c, y: (c + y, c), jnp.zeros_like(x[0]), x)[1],
}


def way_of(function):
    """Of a state that adds to each layer a sum over that layer's part of a result."""

    def summed(x):
        y = function(x).astype(jnp.float32)
        return x + y.sum(tuple(range(1, y.ndim)))[:, None, None]

    tx = each(lambda _, state: summed(state))
    return ways_of(tx, {"w": jnp.zeros((LAYERS, 4, 6))})["w"]


@pytest.mark.parametrize("name", KEEP)
def test_what_keeps_layers_apart_runs_by_layer(name):
    assert way_of(KEEP[name]) == "host, updated layer by layer"


@pytest.mark.parametrize("name", MIX)
def test_what_mixes_layers_runs_at_once(name):
    assert way_of(MIX[name]).startswith("host, updated at once: ")


BY_LAYER = "host, updated layer by layer"
AT_ONCE = "host, updated at once"


def for_its_shapes(updates, state):
    assert updates["w"].shape[0] == LAYERS
    return jax.tree.map(jnp.add, state, updates)


@pytest.mark.parametrize(
    ("tx", "way"),
    [
        (optax.adamw(1e-3), BY_LAYER),
        (optax.adan(1e-3), BY_LAYER),
        (OPTIMIZERS["clip_schedule"](), BY_LAYER),  # a norm of gradients is computed before
        (OPTIMIZERS["schedule_free"](), BY_LAYER),
        (OPTIMIZERS["inject_hyperparams"](), BY_LAYER),
        (optax.lamb(1e-3), f"{AT_ONCE}: reduce_sum mixes layers"),
        (optax.contrib.prodigy(1e-3), f"{AT_ONCE}: reshape mixes leaves"),
        (OPTIMIZERS["multi_steps"](), f"{AT_ONCE}: the update reads it with other leaves"),
        (
            tracing(for_its_shapes),
            f"{AT_ONCE}: the optimizer's update of one layer is not the update of a stack",
        ),
    ],
)
def test_the_plan_says_how_stacks_are_updated(tx, way):
    params = {"w": jnp.zeros((LAYERS, DIM, DIM)), "embed": jnp.zeros((DIM, DIM))}
    ways = ways_of(tx, params)
    assert {text for path, text in ways.items() if path.endswith("/w") or path == "w"} == {way}
    if way == BY_LAYER:
        assert {text for path, text in ways.items() if path.endswith("/embed")} == {AT_ONCE}


@pytest.mark.parametrize("tx", [OPTIMIZERS["clip_schedule"](), optax.contrib.prodigy(1e-3)])
def test_an_update_in_parts_gives_the_numbers_of_the_whole(tx):
    check_numbers(tx, devices=1, offload=ALL)


# -- in backward: a step that may update nothing there says why

NORM = "reduce_sum mixes layers"
GLOBAL = "the update reads something of all gradients, which is known after backward"
TOGETHER = "the update reads it with other leaves"
OTHER = "the optimizer's update of one layer is not the update of a stack"


def traced(tx):
    plan = zerojax.plan(make_state(tx), stage=3, mesh=make_mesh(2), stacked="w", min_shard_size=1)
    batch = jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype)
    return train_step(loss, plan=plan, update="backward").trace(plan.abstract(), batch)


@pytest.mark.parametrize("name", ["lion", "momentum", "schedule_free", "inject_hyperparams"])
def test_what_updates_each_element_alone_may_run_in_backward(name):
    traced(OPTIMIZERS[name]())


def with_others(updates, state):
    state = jax.tree.map(jnp.add, state, updates)
    return state | {"w": state["w"] + updates["embed"][0, 0]}


def for_others(updates, state):
    """Updated in backward, a stack would have no gradient left for them."""
    state = jax.tree.map(jnp.add, state, updates)
    return state | {"embed": state["embed"] + jnp.max(updates["w"])}


ON_ONE = NamedSharding(AbstractMesh((1,), ("x",)), P())


@pytest.mark.parametrize(
    ("tx", "reason"),
    [
        (OPTIMIZERS["adafactor"](), NORM),
        (optax.lamb(1e-3), NORM),
        (optax.contrib.prodigy(1e-3), "reshape mixes layers"),
        (OPTIMIZERS["clip_schedule"](), rf"{GLOBAL}.*optax\.clip do, .*update='auto'"),
        (optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)), GLOBAL),
        (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), GLOBAL),
        (OPTIMIZERS["multi_steps"](), TOGETHER),
        (optax.chain(optax.adaptive_grad_clip(0.1), optax.adamw(1e-3)), OTHER),
        (each(lambda g, s: s + g / g.shape[1]), "div mixes shards"),
        (each(lambda g, s: s + jnp.flip(g, 1)), "rev mixes layers"),
        (each(lambda g, s: s + g.mean(1, keepdims=True)), "reduce_sum mixes shards"),
        (tracing(with_others), TOGETHER),
        (tracing(for_others), "the update of other leaves reads its gradient"),
        (
            each(lambda g, s: jax.lax.with_sharding_constraint(s + g, ON_ONE)),
            "the update names devices",
        ),
    ],
)
def test_other_updates_are_refused_with_the_reason(tx, reason):
    with pytest.raises(ValueError, match=rf"params/w: {reason}"):
        traced(tx)


def test_a_copy_of_the_last_gradient_is_updated_too():
    """It reads nothing of the state (Adan's)."""
    check_numbers(optax.adan(1e-2), devices=2, options={"update": "backward"})


# -- updates that read a field that the loss returns (`mutable=`)


class Scaled(TrainState):
    """Its updates are scaled by what the loss makes of a field."""

    scale: jax.Array

    def apply_gradients(self, *, grads, scale):
        grads = jax.tree.map(lambda g: scale * g, grads)
        return super().apply_gradients(grads=grads, scale=scale)


def scaled_state():
    plain = make_state(optax.sgd(0.1, momentum=0.9))
    return Scaled.create(apply_fn=None, params=plain.params, tx=plain.tx, scale=jnp.float32(1))


def rescaled(params, x, scale):
    return loss(params, x), {"scale": 3 * scale}


def test_a_new_field_is_read_by_an_update_in_parts():
    state = scaled_state()
    plain = jax.jit(
        lambda s: s.apply_gradients(grads=jax.grad(loss)(s.params, BATCH), scale=3 * s.scale)
    )
    placed = zerojax.shard_train_state(state, mesh=make_mesh(1), stacked="w", offload=ALL)
    step = zerojax.train_step(rescaled, mutable=("scale",))
    for _ in range(2):
        state, (placed, _) = plain(state), step(placed, BATCH)
    assert placed.scale == state.scale == 9
    assert_close(placed.params, state.params)


def test_a_new_field_is_not_there_in_backward():
    plan = zerojax.plan(scaled_state(), mesh=make_mesh(2), stacked="w", min_shard_size=1)
    step = train_step(rescaled, plan=plan, mutable=("scale"), update="backward")
    batch = jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype)
    with pytest.raises(ValueError, match=r"params/w: the update reads a field that the loss retu"):
        step.trace(plan.abstract(), batch)


# -- how often an optimizer is traced


def traces(placing=(), precision=None, **options):
    """How often a user's `tx.update` is called from `shard_train_state` to the first step's end."""
    calls, tx = [], optax.adam(1e-3)

    def update(*args):
        calls.append(args)
        return tx.update(*args)

    placing = {"mesh": make_mesh(2), "stacked": "w", "min_shard_size": 1} | dict(placing)
    state = make_state(optax.GradientTransformation(tx.init, update))
    placed = zerojax.shard_train_state(state, stage=3, **placing)
    with jax.default_matmul_precision(precision):
        train_step(loss, **options)(placed, BATCH)
    return len(calls)


@pytest.mark.parametrize(
    ("placing", "options", "count"),
    [
        ({}, {}, 2),  # the plan's, and the one that XLA compiles
        ({"offload": ALL}, {}, 2),  # the plan's, of whole stacks, and the step's, of one layer
        ({"offload": ALL}, {"skip_nonfinite": True}, 3),  # the step's has a guard
        ({}, {"update": "backward"}, 3),  # whole stacks, a layer, a device's part of it
        ({"offload": ALL}, {"update": "backward"}, 3),
    ],
)
def test_an_update_is_traced_once_for_its_shapes(placing, options, count):
    assert traces(placing, **options) == count


def test_it_is_traced_again_for_other_settings():
    assert traces({"offload": ALL}, "float32") == 3
