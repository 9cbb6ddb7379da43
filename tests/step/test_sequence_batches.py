"""Batches whose sequences a step splits: where they rest, what a loss gets, and mistakes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.support.reference import assert_close, train_state
from zerojax import Sequences
from zerojax._loss.batch import BATCH, KEY, REPLICATED, Role, roles, spec

PARAMS = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(12, 16)), jnp.float32) / 4}
DRAWN = np.random.default_rng(1)


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=types)


MESHES = {
    "2 x 4": {"data": 2, "sequence": 4},
    "1 x 7": {"data": 1, "sequence": 7},
    "8": {"sequence": 8},
    "4 x 1": {"data": 4, "sequence": 1},
    "4 x 2": {"sequence": 4, "data": 2},
}


def placed(sizes=MESHES["2 x 4"], **options):
    state = train_state(PARAMS, optax.sgd(1.0))
    options = {"min_shard_size": 0, "sequence": "sequence"} | options
    return zerojax.shard_train_state(state, mesh=mesh_of(**sizes), **options)


def batch_of(rows=8, tokens=16):
    return {
        "x": DRAWN.normal(size=(rows, tokens, 12)).astype(np.float32),
        "mask": DRAWN.random((rows, tokens)) < 0.6,
        "label": DRAWN.integers(0, 8, rows),
    }


def loss(params, batch, rng=None):
    """Over tokens, it takes sums only."""
    out = jnp.tanh(batch["x"] @ params["w"])
    if rng is not None:
        out = out * jax.random.uniform(rng, (out.shape[0], 1, 1))
    errors = jnp.mean((out - batch["label"][:, None, None]) ** 2, -1)
    aux = {"errors": errors, "longest": jnp.max(batch["mask"].sum(1)), "rows": errors[:, 0]}
    return zerojax.mean(errors, where=batch["mask"]), aux


@pytest.mark.parametrize("tokens", [16, 18])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_a_step_gives_what_one_device_gives(name, accumulate, tokens):
    batch = batch_of(tokens=tokens)
    (value, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS, batch)
    state = placed(MESHES[name])
    step = zerojax.train_step(loss, accumulate=accumulate, donate=False)
    for each in (batch, zerojax.shard_batch(batch, state)):
        new, metrics = step(state, each)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-6)
        np.testing.assert_allclose(metrics["aux"]["errors"], aux["errors"], rtol=1e-5)
        np.testing.assert_allclose(metrics["aux"]["rows"], aux["rows"], rtol=1e-5)
        assert_close(jax.tree.map(jnp.subtract, PARAMS, zerojax.unpad(new).params), grads, 1e-5)
    evaluated = zerojax.eval_step(loss)(state, batch)
    assert float(evaluated["loss"]) == pytest.approx(float(value), rel=1e-6)


def test_leaves_rest_in_blocks_where_the_devices_divide_their_tokens():
    state = placed()
    whole = zerojax.shard_batch({**batch_of(), "uneven": np.ones((8, 18, 3))}, state)
    specs = {name: value.sharding.spec for name, value in whole.items()}
    both = P("data", "sequence")
    assert specs == {"x": both, "mask": both, "label": P("data"), "uneven": P("data")}
    assert whole["x"].addressable_shards[0].data.shape == (4, 4, 12)
    alone = zerojax.shard_batch(np.ones((3, 16)), placed(MESHES["8"]))
    assert alone.sharding.spec == P(None, "sequence")  # 8 devices share any number of rows
    plan = state.tx.plan
    shapes = jax.eval_shape(lambda: batch_of())
    assert zerojax.aot.batch(shapes, plan)["mask"].sharding.spec == both
    padded, mask = zerojax.pad_batch(batch_of(rows=3), plan)
    assert padded["x"].shape == (4, 16, 12) and mask.sum() == 3  # for 2 devices, not 8
    assert zerojax.run.process_slice(4, plan) == slice(0, 4)
    assert zerojax.shard_batch(np.ones((4, 16)), plan.mesh).sharding.spec == P("data")


def test_zero_shards_over_all_axes_and_says_which_one_splits_sequences():
    plan = placed().tx.plan
    assert (plan.size, plan.batch_axes) == (8, ("data", "sequence"))
    assert plan.params[0].rest.axes == ("sequence", "data")
    assert plan.sequence == Sequences("sequence", 0.1)
    assert "over data=2 x sequence=4 (cpu)" in str(plan) and "sequences over sequence" in str(plan)
    limited = placed(sequence=Sequences(most_gathered=0.5)).tx.plan
    without = placed(sequence=None, axis=plan.batch_axes).tx.plan
    assert len({plan, limited, without, placed().tx.plan}) == 3
    levels = {"node": 2, "gpu": 2, "sequence": 2}
    grouped = dict.fromkeys(("params", "grads", "opt_state"), "gpu")
    assert placed(levels, groups=grouped).tx.plan.batch_axes == (*levels,)
    assert placed(levels, axis=("gpu", "node")).tx.plan.batch_axes == (*levels,)
    assert placed(MESHES["4 x 2"], sequence="data", axis="sequence").tx.plan.size == 8


PARTS = zerojax.plan((PARAMS, ()), mesh=mesh_of(data=2, sequence=4), sequence="sequence")._splits
BOTH, KEYS = P("data", "sequence"), jax.random.split(jax.random.key(0), (8, 16))


@pytest.mark.parametrize(
    ("leaf", "written", "role"),
    [
        (np.ones((8, 16)), None, Role(BATCH, 0, 1)),
        (np.ones((8, 4, 2)), None, Role(BATCH, 0, 1)),
        (np.ones((8, 3)), None, Role(BATCH)),  # as a label, with fewer than there are devices
        (np.ones(8), None, Role(BATCH)),
        (1.0, None, Role(REPLICATED)),
        (jax.random.key(0), None, Role(KEY)),
        (KEYS, None, Role(BATCH)),
        (np.ones((8, 16)), P("data", None), Role(BATCH)),
        (np.ones((8, 16)), P(("data",), ("sequence",)), Role(BATCH, 0, 1)),
        (np.ones((3, 8, 16)), P(None, "data", "sequence"), Role(BATCH, 1, 2)),
        (np.ones((8, 3, 16)), P("data", None, "sequence"), Role(BATCH, 0, 2)),
        (np.ones((16, 8)), P("sequence", "data"), Role(BATCH, 1, 0)),
        (np.ones((3, 16)), P(None, "sequence"), Role(REPLICATED, 0, 1)),
        (np.ones((8, 16)), P(), Role(REPLICATED)),
    ],
)
def test_a_leaf_has_a_role_by_its_shape_or_its_spec(leaf, written, role):
    assert roles((leaf,), written, PARTS) == [role]
    again = roles((leaf,), spec(role, PARTS), PARTS)
    assert role.kind == KEY or again == [role]


def step_on(batch, written=None, **options):
    step = zerojax.train_step(lambda p, b: jnp.sum(p["w"]), batch_specs=written)
    return lambda: step(placed(**options), batch)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: placed(sequence="seq"), r"'seq' is no axis of the mesh.*\('data', 'sequence'\)"),
        (lambda: placed({"data": 8}), r"mesh=zerojax.mesh\(data=-1, sequence=2\)"),
        (
            lambda: placed(axis=("data", "sequence")),
            r"axis=\('data', 'sequence'\) name the same axis. Leave it out of axis=",
        ),
        (
            lambda: placed(sequence="data", axis="data"),
            r"sequence='data' and axis='data' name the same",
        ),
        (lambda: placed(sequence=4), r"axis=4\) must name one axis.*zerojax.mesh\(data=2, seq"),
        (lambda: placed(sequence=("sequence",)), r"\('sequence',\)\) must name one axis"),
        (lambda: Sequences(("a", "b")), r"axis=\('a', 'b'\)\) must name one axis of the mesh"),
        (lambda: Sequences(most_gathered=-1), r"most_gathered=-1\).*Pass 0.1, or math.inf"),
        (lambda: Sequences(most_gathered="0.1"), r"most_gathered='0.1'\) must be a share"),
        (
            step_on(np.ones((8, 3))),
            r"splits nothing of this batch \(the batch \[8, 3\]\).*4 tokens or more.*whole seq",
        ),
        (step_on(np.ones(8)), r"P?artitionSpec\('data', 'sequence'\).*without sequence=\."),
        (step_on(np.ones((8, 16)), P("data")), r"splits nothing of this batch"),
        (step_on(np.ones((8, 3)), BOTH), r"3 tokens are fewer than the 4 devices of 'sequence'"),
        (step_on(np.ones((16, 16)), P("sequence", "sequence")), r"P\('data', 'sequence'\) where"),
        (step_on(np.ones((16, 16)), P(("data", "sequence"))), r"split over 'data'. Use P\('data'"),
        (
            step_on(np.ones((8, 16)), P(None, "sequence")),
            r"no examples over 'data': all 2 groups.*PartitionSpec\('data', 'sequence'\)",
        ),
        (step_on(np.ones((16, 16)), P("data", "seq")), r"has P.*'seq'.* the second has tokens"),
        (step_on(np.ones(16), BOTH), r"for the batch of shape \(16,\)"),
        (step_on(np.ones((7, 16))), r"7 examples, which do not divide over 2 devices"),
    ],
)
def test_a_mistake_is_named_before_anything_compiles(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize("name", ["2 x 4", "8"])
def test_verify_and_gradients_alone_see_whole_sequences(name):
    """And all devices of a sequence draw the same numbers."""
    batch, state = batch_of(tokens=18), placed(MESHES[name])
    step = zerojax.train_step(loss, accumulate=2, donate=False)
    report = zerojax.verify(step, state, batch, jax.random.key(3))
    assert report.ok, str(report)
    graded = jax.jit(zerojax.value_and_grad(loss, state.tx.plan, has_aux=True))
    (value, aux), grads = graded(state.params, batch)
    wanted, wanted_grads = jax.jit(jax.value_and_grad(lambda p: loss(p, batch)[0]))(PARAMS)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    assert aux["errors"].shape == (8, 18)
    assert_close(grads, wanted_grads, 1e-5)


@pytest.mark.gpu_code
def test_verify_rehearses_sequences_on_fewer_devices():
    step = zerojax.train_step(loss, accumulate=2, donate=False)
    mesh = zerojax.aot.mesh("16xH100", (2, 8), ("data", "sequence"))
    options = {"mesh": mesh, "sequence": "sequence", "min_shard_size": 0}
    made = lambda: train_state(PARAMS, optax.sgd(1.0))
    rehearsed = zerojax.verify(step, made, batch_of(tokens=18), plan=zerojax.plan(made, **options))
    assert rehearsed.ok and "Ran on data=2, sequence=4 in place of" in str(rehearsed)


@pytest.mark.parametrize(
    "how", [{}, {"order": "layers"}, {"order": "layers", "update": "backward"}]
)
def test_aux_by_token_is_whole_in_any_order(how):
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 16)), jnp.float32) / 4}

    def deep(params, batch):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        x, _ = jax.lax.scan(layer, batch["x"], params["w"])
        return zerojax.mean(x[..., 0], where=batch["mask"]), {"x": x[..., 0]}

    options = {"mesh": mesh_of(data=2, sequence=4), "sequence": "sequence", "min_shard_size": 0}
    state = train_state(params, optax.sgd(1.0))
    state = zerojax.shard_train_state(state, stacked="w", **options)
    schedule = zerojax.Schedule(**how)
    step = zerojax.train_step(deep, accumulate=2, schedule=schedule, donate=False)
    for tokens in (16, 18):
        batch = {**batch_of(8, tokens), "x": DRAWN.normal(size=(8, tokens, 16)).astype("f")}
        (value, aux), grads = jax.jit(jax.value_and_grad(deep, has_aux=True))(params, batch)
        new, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
        np.testing.assert_allclose(metrics["aux"]["x"], aux["x"], atol=1e-6)
        split = P("data", "sequence") if tokens == 16 else P("data")
        assert metrics["aux"]["x"].sharding.spec == split
        assert_close(jax.tree.map(jnp.subtract, params, new.params), grads, 1e-5)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(12, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, axis_name="data", rngs=rngs)

    def __call__(self, x):
        return self.norm(self.lin(x))


def test_a_model_of_nnx_keeps_statistics_of_all_tokens():
    batch = batch_of()
    of_nnx = lambda model, batch: jnp.mean(model(batch["x"]) ** 3)
    model = Normed(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    zerojax.nnx.shard(model, optimizer, mesh=mesh_of(data=2, sequence=4), sequence="sequence")
    metrics = zerojax.nnx.train_step(of_nnx)(model, optimizer, batch)
    alone = Normed(nnx.Rngs(0))
    alone.norm.axis_name = None
    assert float(metrics["loss"]) == pytest.approx(float(of_nnx(alone, batch)), rel=1e-4)
    np.testing.assert_allclose(model.norm.mean[...], alone.norm.mean[...], atol=1e-6)
    np.testing.assert_allclose(model.norm.var[...], alone.norm.var[...], rtol=1e-4)


def test_axes_may_be_explicit():
    mesh = jax.make_mesh((2, 4), ("data", "sequence"))
    state = train_state(PARAMS, optax.sgd(1.0))
    state = zerojax.shard_train_state(state, mesh=mesh, sequence="sequence", min_shard_size=0)
    step = zerojax.train_step(loss, donate=False)
    for tokens, spec_ in ((16, P("data", "sequence")), (18, P("data"))):
        batch = batch_of(tokens=tokens)
        there = zerojax.shard_batch(batch, state)
        assert there["mask"].sharding.spec == spec_
        _, metrics = step(state, there)
        assert float(metrics["loss"]) == pytest.approx(float(loss(PARAMS, batch)[0]), rel=1e-6)


def test_a_bad_value_is_found_in_whole_sequences():
    def bad(params, batch):
        return zerojax.mean(jnp.log(batch["x"] @ params["w"] * 0 - 1))

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"Invalid value|invalid"):
        zerojax.train_step(bad)(placed(), batch_of(tokens=18))


def test_what_fills_the_last_block_has_a_derivative():
    """That of a norm has none at 0."""
    of_norms = lambda params, x: jnp.mean(jnp.linalg.norm(x @ params["w"], axis=-1))
    x, state = batch_of(tokens=18)["x"], placed()
    grads = jax.jit(zerojax.value_and_grad(of_norms, state.tx.plan))(state.params, x)[1]
    assert_close(grads, jax.jit(jax.grad(of_norms))(PARAMS, x), 1e-5)
