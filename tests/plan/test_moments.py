"""Moments in bfloat16: which leaves, their bytes, and that sharding changes no bit of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx
from tests import nnx_models
from tests.conftest import make_mesh, mostly_slow
from tests.models import gpt, mlp
from tests.reference import assert_equal_bits, make_state
from tests.step.test_stream import ALL, is_on_host
from zerojax._plan.precision import MasterState, NarrowState
from zerojax._state.state import leaves_with_paths

MOMENTS = zerojax.Precision(moments="bfloat16")
MASTERS = zerojax.Precision(
    compute="bfloat16", param="bfloat16", master="float32", moments="bfloat16"
)
EITHER = mostly_slow([MOMENTS, MASTERS], lambda precision: precision is MASTERS)
LAYERS, DIM, ROWS = 4, 64, 32


def dtypes(tree):
    return {leaf.name: leaf.value.dtype.name for leaf in leaves_with_paths(tree)}


# -- which leaves


def narrow_in(tx, params=None):
    params = {"w": jnp.ones((16, 24)), "scale": jnp.ones(())} if params is None else params
    found = dtypes(jax.eval_shape(zerojax.narrow_moments(tx).init, params))
    return {name for name, dtype in found.items() if dtype == "bfloat16"}


def test_arrays_that_follow_a_parameter_are_moments():
    assert narrow_in(optax.adamw(1e-3)) == {"inner/0/mu/w", "inner/0/nu/w"}
    assert narrow_in(optax.sgd(0.1)) == set()
    label = lambda params: {"w": "trained", "scale": "frozen"}
    some = optax.multi_transform({"trained": optax.lion(0.1), "frozen": optax.set_to_zero()}, label)
    assert narrow_in(some) == {"inner/inner_states/trained/inner_state/0/mu/w"}


def test_what_has_another_shape_or_starts_as_the_parameter_is_none():
    factored = optax.adafactor(1e-3, momentum=0.9, min_dim_size_to_factor=8)
    found = narrow_in(factored)
    assert len(found) == 1 and found.pop().endswith("w")  # its momentum, not its rows and columns
    free = optax.contrib.schedule_free(optax.adamw(1e-3), 1e-3)
    names = dtypes(jax.eval_shape(free.init, {"w": jnp.ones((16, 24))}))
    assert "z/w" in names
    assert narrow_in(free) == {
        "inner/base_optimizer_state/0/mu/w",
        "inner/base_optimizer_state/0/nu/w",
    }
    assert "inner/inner/0/nu/w" in narrow_in(zerojax.master_weights(optax.adamw(1e-3)))
    assert not any("master" in name for name in narrow_in(zerojax.master_weights(optax.adam(0.1))))


def test_the_optimizer_sees_float32():
    seen = []

    def update(grads, state, params=None):
        seen.append({**dtypes(grads), **dtypes(state)})
        return grads, jax.tree.map(lambda m: 0.9 * m + 1, state)

    tx = optax.GradientTransformation(lambda p: {"m": jax.tree.map(jnp.zeros_like, p)}, update)
    params = {"w": jnp.ones(16, jnp.bfloat16)}
    tx = zerojax.narrow_moments(tx)
    updates, state = tx.update(params, tx.init(params), params)
    assert seen == [{"w": "float32", "m/w": "float32"}] and updates["w"].dtype == jnp.float32
    assert state.inner["m"]["w"].dtype == jnp.bfloat16 and int(state.count) == 1


@pytest.mark.parametrize("precision", EITHER)
def test_a_plan_counts_half_the_bytes(precision):
    made = gpt(True)
    state = make_state(made, optax.adamw(1e-3))
    wide = zerojax.Precision(
        compute=precision.compute, param=precision.param, master=precision.master
    )
    plans = [zerojax.plan(state, stage=1, precision=p) for p in (precision, wide)]
    narrow, full = (plan.bytes_per_device()["opt_state"] for plan in plans)
    masters = sum(
        leaf.bytes_per_device(plans[0].mesh) for leaf in plans[0].leaves if "master/" in leaf.path
    )
    counts = [4 * sum(x.path.endswith("count") for x in plan.leaves) for plan in plans]
    assert counts == [8, 4] and (masters > 0) == (precision is MASTERS)
    assert 2 * (narrow - masters - counts[0]) == full - masters - counts[1]
    placed = plans[0].place(state)
    moments = placed.opt_state.inner.inner if masters else placed.opt_state.inner
    for leaf, param in zip(*map(jax.tree.leaves, (moments[0].nu, placed.params)), strict=True):
        assert leaf.dtype == jnp.bfloat16 and leaf.shape == param.shape
        assert leaf.addressable_shards[0].data.nbytes * 8 in (leaf.nbytes, 8 * leaf.nbytes)


# -- the same bits, however they are made: all arithmetic here is exact


def momentum():
    return optax.sgd(2.0**-6, momentum=0.5)


def stacks(tx=None, layers=LAYERS, dim=DIM):
    blocks = {"w": jnp.zeros((layers, dim, dim)), "b": jnp.zeros((layers, dim))}
    params = {"blocks": blocks, "head": jnp.zeros((dim, 2 * dim))}
    return TrainState.create(apply_fn=None, params=params, tx=tx or momentum())


def loss(params, batch):
    """Linear in the parameters; the gradients are small integers over ROWS."""
    shape = params["blocks"]["w"].shape[1:]
    each = jnp.arange(shape[0] * shape[1]).reshape(shape) % 7 + 1

    def layer(x, p):
        return x + (batch @ (p["w"] * each)).sum(-1) + batch @ p["b"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), jnp.zeros(batch.shape[0]), params["blocks"])
    return jnp.mean(x + (batch @ params["head"]).sum(-1))


def batch_of(i, dim=DIM):
    return np.random.default_rng(i).integers(0, 1024, (ROWS, dim)).astype(np.float32)


def run(stage, devices=8, *, make=stacks, steps=3, dim=DIM, offload=None, **options):
    precision = options.pop("precision", MOMENTS)
    state = zerojax.shard_train_state(
        make, stage, mesh=make_mesh(devices), precision=precision, offload=offload
    )
    step = zerojax.train_step(loss, **options)
    for i in range(steps):
        state, _ = jax.block_until_ready(step(state, batch_of(i, dim)))
    assert step._cache_size() == 1
    return state


@functools.cache
def wanted(**options):
    """Without zerojax's stages: optax and one device."""
    state = stacks(zerojax.narrow_moments(momentum()), **options)
    for i in range(3):
        grads = jax.grad(loss)(state.params, batch_of(i, state.params["head"].shape[0]))
        state = state.apply_gradients(grads=grads)
    assert state.opt_state.inner[0].trace["blocks"]["w"].dtype == jnp.bfloat16
    return jax.device_get((state.params, state.opt_state))


def check(state, **options):
    shown = zerojax.logical(state)
    assert_equal_bits(jax.device_get((shown.params, shown.opt_state)), wanted(**options))


def test_the_numbers_are_not_those_of_rounding_to_the_nearest():
    """Or the tests below would say little."""
    tx, state = momentum(), stacks(momentum())
    params, opt_state = state.params, state.opt_state
    near = functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16).astype(jnp.float32))
    for i in range(3):
        updates, opt_state = tx.update(jax.grad(loss)(params, batch_of(i)), near(opt_state), params)
        params = optax.apply_updates(params, updates)
    off = np.asarray(params["blocks"]["w"]) != wanted()[0]["blocks"]["w"]
    assert off.mean() > 0.2


@pytest.mark.parametrize(
    ("stage", "devices"),
    mostly_slow(
        [(s, n) for s in range(4) for n in (1, 2, 8)],
        lambda s, n: (s, n) in ((0, 1), (1, 8), (3, 8)),
    ),
)
def test_every_stage_and_number_of_devices_gives_the_same_bits(stage, devices):
    check(run(stage, devices))


def test_microbatches_give_the_same_bits():
    check(run(2, accumulate=4))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("update", ["after", "backward"])
def test_state_in_host_memory_is_updated_layer_by_layer(stage, update):
    state = run(stage, offload=ALL, update=update)
    check(state)
    moments = state.opt_state.inner[0].trace
    assert all(map(is_on_host, jax.tree.leaves(moments)))
    ways = {leaf.path: leaf.rest.memory and leaf.memory for leaf in state.tx.plan.leaves}
    assert ways["opt_state/inner/0/trace/blocks/w"] == "host, updated layer by layer"


@pytest.mark.parametrize("stage", [1, 3])
def test_updates_in_backward_give_the_same_bits(stage):
    check(run(stage, update="backward"))


@pytest.mark.parametrize("precision", EITHER)
def test_adam_is_updated_layer_by_layer(precision):
    make = functools.partial(stacks, optax.adamw(1e-3))
    plan = zerojax.plan(make, precision=precision, offload=ALL)
    lines = [line for line in str(plan).splitlines() if "/w " in line and "bfloat16" in line]
    lines = [line for line in lines if line.startswith("opt_state")]
    assert len(lines) == 2 and all("updated layer by layer" in line for line in lines)
    for offload in (None, ALL):
        run(3, make=make, precision=precision, offload=offload, update="backward", steps=1)


def test_padding_changes_nothing_and_stays_zero():
    make = functools.partial(stacks, dim=12)
    state = run(3, make=make, dim=12)
    assert state.opt_state.inner[0].trace["blocks"]["w"].shape != (LAYERS, 12, 12)
    check(state, dim=12)
    trace = np.asarray(state.opt_state.inner[0].trace["blocks"]["w"])
    assert np.count_nonzero(trace) == np.count_nonzero(
        wanted(dim=12)[1].inner[0].trace["blocks"]["w"]
    )


# -- training


def trained(precision, steps=50, stage=3):
    made = mlp(False)
    state = make_state(made, optax.adamw(3e-3))
    state = zerojax.shard_train_state(state, stage, precision=precision)
    step = zerojax.train_step(made.loss)
    losses = []
    for _ in range(steps):
        state, metrics = jax.block_until_ready(step(state, made.batch))
        losses.append(float(metrics["loss"]))
    return losses


def test_training_ends_where_float32_moments_end():
    narrow, wide = trained(MOMENTS), trained(None)
    assert wide[-1] < 0.5 * wide[0]
    np.testing.assert_allclose(narrow, wide, rtol=0.03, atol=0.01 * wide[0])
    assert narrow != wide


def test_second_moments_follow_their_gradients():
    """Gradients of one size: rounded to the nearest, the mean of squares would stand at 1."""
    params = {"w": jnp.ones((16, 16))}
    tx = zerojax.narrow_moments(optax.adam(1e-3))
    state = tx.init(params)
    adam = state.inner[0]._replace(
        nu={"w": jnp.ones((16, 16), jnp.bfloat16)}, count=jnp.int32(2000)
    )
    state = state._replace(inner=(adam, *state.inner[1:]))
    grads = {"w": jnp.sqrt(2.0) + jnp.linspace(0, 1e-3, 256).reshape(16, 16)}

    @jax.jit
    def body(state, _):
        return tx.update(grads, state, params)[1], None

    state, _ = jax.lax.scan(body, state, None, 1000)
    nu = np.asarray(state.inner[0].nu["w"], np.float64)
    assert abs(nu.mean() - (2 - 0.999**1000)) < 0.02


def test_steps_that_are_not_finite_are_skipped():
    state = zerojax.shard_train_state(stacks, 3, precision=MOMENTS)
    step = zerojax.train_step(loss, skip_nonfinite=True)
    state, _ = step(state, batch_of(0))
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, np.full((ROWS, DIM), np.nan, np.float32))
    assert metrics["skipped"] == 1
    assert_equal_bits((state.params, state.opt_state), before)


@pytest.mark.parametrize("precision", EITHER)
def test_verify_and_checkpoints(precision, tmp_path):
    made = functools.partial(stacks, optax.adamw(1e-3), dim=12)
    state = zerojax.shard_train_state(made, 3, precision=precision)
    step = zerojax.train_step(loss)
    state, _ = jax.block_until_ready(step(state, batch_of(0, 12)))
    zerojax.verify(step, state, batch_of(1, 12)).raise_if_wrong()
    zerojax.save(tmp_path / "c", state)
    other = zerojax.shard_train_state(made, 1, precision=precision, mesh=make_mesh(2))
    restored = zerojax.restore(tmp_path / "c", like=other)
    shown = (zerojax.logical(restored).opt_state, zerojax.logical(state).opt_state)
    assert dtypes(shown[0]) == dtypes(shown[1])
    assert_equal_bits(*jax.device_get(shown))


def test_nnx_models():
    ends = []
    for precision in (MOMENTS, MASTERS):
        model, optimizer = nnx_models.make()
        model, optimizer = zerojax.nnx.shard(model, optimizer, stage=3, precision=precision)
        step = zerojax.nnx.train_step(nnx_models.loss_fn)
        ends.append([float(step(model, optimizer, nnx_models.BATCH)["loss"]) for _ in range(5)])
        state = nnx.as_pure(optimizer.opt_state)
        assert isinstance(state, NarrowState if precision is MOMENTS else MasterState)
        narrow = state if precision is MOMENTS else state.inner
        arrays = [x for x in jax.tree.leaves(narrow) if x.ndim]
        assert arrays and {x.dtype.name for x in arrays} == {"bfloat16"} and int(narrow.count) == 5
    assert all(end[-1] < end[0] for end in ends)


# -- what is stored already, and what is refused


@pytest.mark.parametrize("offload", [None, ALL])
def test_a_trained_optimizer_is_rounded_once(offload):
    made = mlp(False)
    state = make_state(made, optax.adam(1e-3))
    state = zerojax.shard_train_state(state, offload=offload)
    state, _ = jax.block_until_ready(zerojax.train_step(made.loss)(state, made.batch))
    before = jax.device_get(zerojax.logical(state).opt_state[0])
    state = zerojax.shard_train_state(state, 1, precision=MOMENTS)
    after = jax.device_get(zerojax.logical(state).opt_state.inner[0])
    assert int(after.count) == 1
    near = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (before.mu, before.nu))
    assert_equal_bits((after.mu, after.nu), near)
    zerojax.train_step(made.loss)(state, made.batch)


@pytest.mark.parametrize("precision", [MOMENTS, MASTERS])
def test_placing_again_narrows_once(precision):
    state = make_state(mlp(False), optax.adam(1e-3))
    for stage in (3, 1):
        state = zerojax.shard_train_state(state, stage, precision=precision)
        assert str(jax.tree.structure(state.opt_state)).count("NarrowState") == 1
    step = zerojax.train_step(mlp(False).loss)
    state, _ = jax.block_until_ready(step(state, mlp(False).batch))
    count = state.opt_state if precision is MOMENTS else state.opt_state.inner
    assert int(count.count) == 1


def test_masters_that_are_there_stay_as_they_are():
    """Also where moments become narrow later than parameters did."""
    state = make_state(mlp(False), optax.adam(1e-3))
    wide = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")
    state = zerojax.shard_train_state(state, 3, precision=wide)
    before = jax.device_get(state.opt_state.master)
    state = zerojax.shard_train_state(state, 3, precision=MASTERS)
    found = state.opt_state.inner
    assert isinstance(state.opt_state, NarrowState) and isinstance(found, MasterState)
    assert_equal_bits(found.master, before)
    assert set(dtypes(found.inner[0].nu).values()) == {"bfloat16"}
    state, _ = jax.block_until_ready(zerojax.train_step(mlp(False).loss)(state, mlp(False).batch))
    copies = jax.tree.map(lambda m: m.astype(jnp.bfloat16), state.opt_state.inner.master)
    assert_equal_bits(state.params, copies)
    state = zerojax.shard_train_state(state, 1, precision=MASTERS)
    assert str(jax.tree.structure(state.opt_state)).count("MasterState") == 1


def test_narrow_parameters_without_masters():
    precision = zerojax.Precision(param="bfloat16", moments="bfloat16")
    made = mlp(False)
    state = zerojax.shard_train_state(make_state(made, optax.adam(1e-3)), precision=precision)
    step = zerojax.train_step(made.loss)
    losses = []
    for _ in range(5):
        state, metrics = jax.block_until_ready(step(state, made.batch))
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1 and losses[-1] < losses[0]
    assert set(dtypes(state.opt_state.inner[0].mu).values()) == {"bfloat16"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "float8_e4m3fn"])
def test_other_dtypes_are_refused(dtype):
    message = rf"moments='{dtype}': moments can rest in bfloat16.*Pass 'bfloat16', or leave it out"
    with pytest.raises(ValueError, match=message):
        zerojax.Precision(moments=dtype)
    with pytest.raises(ValueError, match=message):
        zerojax.narrow_moments(optax.adam(1e-3), dtype)


def test_what_is_no_float_or_has_no_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"moments='int8'\): not a float dtype. Use one such as"):
        zerojax.Precision(moments="int8")
    with pytest.raises(ValueError, match=r"float8_e4m3fn', moments=.*Give master='float32' as"):
        zerojax.Precision(param="float8_e4m3fn", moments="bfloat16")
    pair = ({"w": jnp.ones((64, 16))}, ())
    with pytest.raises(ValueError, match=r"tuple does not carry it.*zerojax.narrow_moments\(tx\)"):
        zerojax.plan(pair, precision=MOMENTS)
    tx = zerojax.narrow_moments(optax.adam(0.1))
    zerojax.plan((pair[0], tx.init(pair[0])), tx=tx, precision=MOMENTS)
    made = mlp(False)
    plain = zerojax.shard_train_state(make_state(made, optax.adam(1e-3)))
    with pytest.raises(ValueError, match=r"how the state is stored.*placed without it. Place it"):
        zerojax.train_step(made.loss, precision=MOMENTS)(plain, made.batch)
