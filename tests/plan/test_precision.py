"""Dtypes: master copies, compute, and what the options refuse."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh, mostly_slow
from tests.models import gpt, mlp
from tests.reference import assert_close, assert_equal_bits, make_state
from zerojax._plan import planner as _planner

BF16 = zerojax.Precision(compute="bfloat16", param="bfloat16", master="float32")


@pytest.mark.parametrize("stage", mostly_slow((0, 1, 2, 3), lambda stage: stage == 3))
def test_master_copies_train_like_float32_and_parameters_are_their_rounding(stage):
    made = gpt(True)
    state = make_state(made, optax.adamw(1e-3))
    steps = {
        "master": (zerojax.shard_train_state(state, stage, precision=BF16), BF16),
        "float32": (
            zerojax.shard_train_state(state, stage),
            zerojax.Precision(compute="bfloat16"),
        ),
    }
    ended = {}
    for name, (start, precision) in steps.items():
        step, current = zerojax.train_step(made.loss, precision=precision), start
        for _ in range(5):
            current, metrics = step(current, made.batch)
        ended[name] = current, float(metrics["loss"])
    (masters, loss), (full, full_loss) = ended["master"], ended["float32"]
    assert loss == pytest.approx(full_loss, rel=2e-3)
    copies = masters.opt_state.master
    assert_close(copies, full.params, 2e-3)
    jax.tree.map(
        lambda p, m: np.testing.assert_array_equal(p, m.astype(jnp.bfloat16)),
        masters.params, copies,
    )  # fmt: skip
    assert masters.params["embed"].dtype == jnp.bfloat16
    cut = P("data") if stage else P()
    assert copies["embed"].sharding.spec == cut


def test_steps_follow_the_precision_of_the_placed_state():
    made, seen = mlp(False), []

    def loss(params, batch):
        seen.append(batch["x"].dtype)
        return made.loss(params, batch)

    state = zerojax.shard_train_state(make_state(made, optax.adam(1e-3)), precision=BF16)
    zerojax.eval_step(loss)(state, made.batch)
    zerojax.train_step(loss)(state, made.batch)
    assert seen == [jnp.bfloat16] * 2


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "options", [{"reduce": "float32"}, {"reduce": "float32", "master": "float32"}]
)
def test_narrow_parameters_train_with_a_wider_reduction(options, accumulate):
    made = mlp(False)
    precision = zerojax.Precision(param="bfloat16", **options)
    state = zerojax.shard_train_state(make_state(made, optax.adam(1e-3)), precision=precision)
    step = zerojax.train_step(made.loss, accumulate=accumulate)
    for _ in range(2):
        state, metrics = step(state, made.batch)
    assert step._cache_size() == 1 and np.isfinite(float(metrics["loss"]))
    moments = state.opt_state.inner[0] if "master" in options else state.opt_state[0]
    assert moments.mu["in"]["w"].dtype == ("float32" if "master" in options else "bfloat16")


@pytest.mark.parametrize("options", [{}, {"master": "float32"}])
def test_storing_narrower_keeps_a_trained_optimizer(options):
    made = mlp(False)
    state, _ = zerojax.train_step(made.loss)(
        zerojax.shard_train_state(make_state(made, optax.adam(1e-3))), made.batch
    )
    before = jax.tree.map(np.asarray, state.opt_state[0].mu)
    precision = zerojax.Precision(param="bfloat16", **options)
    state = zerojax.shard_train_state(state, precision=precision)
    inner = state.opt_state.inner[0] if options else state.opt_state[0]
    assert int(inner.count) == 1
    same = jax.tree.map(lambda x: x.astype(np.float32), inner.mu)
    assert_close(same, before, 1e-2)


@pytest.mark.parametrize("options", [{}, {"master": "float32"}])
@pytest.mark.parametrize("born", [False, True])
def test_a_plan_places_as_its_precision_says(options, born):
    params = {"w": jnp.full((64, 16), 1 + 2**-12), "ids": jnp.arange(8)}
    make = lambda: TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1, 0.9))
    precision = zerojax.Precision(param="bfloat16", **options)
    given = make if born else make()
    plan = zerojax.plan(given, stage=3, precision=precision)
    placed = plan.place(given)
    wanted = zerojax.shard_train_state(make(), 3, precision=precision)
    assert jax.tree.structure(placed.opt_state) == jax.tree.structure(wanted.opt_state)
    parts = [(s.params, s.opt_state) for s in (plan.abstract(), placed, wanted)]
    for shape, one, other in zip(*map(jax.tree.leaves, parts), strict=True):
        assert shape.dtype == one.dtype == other.dtype
        assert shape.sharding.spec == one.sharding.spec == other.sharding.spec
    assert placed.params["w"].dtype == jnp.bfloat16 and placed.params["ids"].dtype == jnp.int32
    if options:  # from the parameters as given, not as rounded
        assert_equal_bits(placed.opt_state.master["w"], params["w"])
    plan.check_structure(placed)
    assert_equal_bits(plan.place(placed).params, placed.params)


def test_a_plan_keeps_where_parameters_lie_that_it_stores_narrower():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    along = jax.sharding.NamedSharding(mesh, P(None, "tensor"))
    params = {"w": jax.device_put(jnp.ones((64, 16)), along)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    plan = zerojax.plan(state, mesh=mesh, precision=BF16)
    assert plan.params[0].spec == P("data", "tensor")
    assert plan.place(state).opt_state.master["w"].sharding.spec == P("data", "tensor")


def test_precision_of_a_state_without_its_optimizer():
    state = ({"w": jnp.ones((64, 16))}, ())
    with pytest.raises(ValueError, match=r"type tuple does not carry it.*master_weights.*leave"):
        zerojax.plan(state, precision=BF16)
    tx = zerojax.master_weights(optax.adam(0.1))
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), state[0])
    zerojax.plan((narrow, tx.init(narrow)), tx=tx, precision=BF16)


def test_placing_again_keeps_one_master_copy():
    state = make_state(mlp(False), optax.adam(1e-3))
    for stage in (3, 1):
        state = zerojax.shard_train_state(state, stage, precision=BF16)
        assert str(jax.tree.structure(state.opt_state)).count("MasterState") == 1
    zerojax.train_step(mlp(False).loss)(state, mlp(False).batch)


def test_precision_that_placement_and_step_disagree_on():
    made = mlp(False)
    plain = zerojax.shard_train_state(make_state(made, optax.adam(1e-3)))
    with pytest.raises(ValueError, match=r"placed without it. Place it with.*precision=\.\.\."):
        zerojax.train_step(made.loss, precision=BF16)(plain, made.batch)
    stored = zerojax.shard_train_state(plain, precision=BF16)
    with pytest.raises(ValueError, match=r"Leave precision= out of the step, or place"):
        step = zerojax.train_step(made.loss, precision=zerojax.Precision(compute="float16"))
        step(stored, made.batch)
    for call in (zerojax.train_step, zerojax.eval_step):
        with pytest.raises(TypeError, match=r"must be a zerojax.Precision, got 'bfloat16'. Pass"):
            call(made.loss, precision="bfloat16")
    with pytest.raises(TypeError, match=r"must be a zerojax.Precision, got 'bfloat16'. Pass"):
        zerojax.shard_train_state(plain, precision="bfloat16")


def test_tiny_updates_add_up_in_the_masters():
    """A twentieth of a bf16 step each: without masters, any number of them is nothing."""
    params = {"w": jnp.full((16, 16), 256.0)}
    loss = lambda p, b: jnp.mean(p["w"].astype(jnp.float32).sum() + 0 * b)
    for precision, moves in ((BF16, True), (zerojax.Precision(param="bfloat16"), False)):
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
        state = zerojax.shard_train_state(state, 3, precision=precision)
        step = zerojax.train_step(loss)
        for _ in range(40):
            state, _ = jax.block_until_ready(step(state, np.zeros((8, 1), np.float32)))
        assert bool(jnp.all(state.params["w"] < 254)) == moves


def test_narrow_parameters_without_masters_are_warned_of_once():
    def plan(**options):
        state = make_state(mlp(False), optax.adam(1e-3))
        return zerojax.plan(state, precision=zerojax.Precision(**options))

    _planner._say_rounded.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(param="bfloat16", master="float32")
        plan(compute="bfloat16")
        plan(param="float32")
    with pytest.warns(
        UserWarning,
        match=r"param='bfloat16'\) without master= rounds .*master='float"
        r"32', .* FSDP2's .* does: Precision\(compute='bfloat16'",
    ):
        plan(param="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(param="bfloat16")


def test_master_weights_is_an_optax_transformation_like_any_other():
    tx = zerojax.master_weights(optax.adamw(1e-2))
    params = {"w": jnp.ones((4,), jnp.bfloat16)}
    state = tx.init(params)
    updates, state = tx.update({"w": jnp.ones(4)}, state, params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(new["w"], state.master["w"].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"call update\(grads, state, params\)"):
        tx.update({"w": jnp.ones(4)}, state)


def test_masters_start_from_the_parameters_as_given_and_may_be_born_sharded():
    make = lambda: make_state(mlp(False), optax.adam(1e-3))
    for state in (make, make()):
        placed = zerojax.shard_train_state(state, 3, precision=BF16)
        assert_close(placed.opt_state.master, make().params, 1e-7)


def test_batch_and_weights_are_computed_in_the_given_dtype():
    seen = {}

    def loss(params, batch):
        seen.update(w=params["in"]["w"].dtype, x=batch["x"].dtype, ids=batch["ids"].dtype)
        return jnp.mean(batch["x"] @ params["in"]["w"])

    made = mlp(False)
    batch = {"x": np.ones((8, 24), np.float32), "ids": np.ones(8, np.int32)}
    plan = zerojax.plan({"params": made.params})
    precision = zerojax.Precision(compute="bfloat16")
    value, grads = zerojax.value_and_grad(loss, plan, precision=precision)(made.params, batch)
    assert seen == {"w": jnp.bfloat16, "x": jnp.bfloat16, "ids": jnp.int32}
    assert value.dtype == grads["in"]["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute": "int8"}, r"compute='int8'\): not a float dtype. Use one such as"),
        ({"reduce": "half-ish"}, r"reduce='half-ish'\): neither a float dtype nor codes"),
        ({"master": "float32"}, r"Give param=\.\.\. as well"),
    ],
)
def test_bad_precision(options, message):
    with pytest.raises(ValueError, match=message):
        zerojax.Precision(**options)


def test_precision_needs_a_state_that_carries_its_optimizer():
    with pytest.raises(ValueError, match=r"tuple does not carry it.*zerojax.master_weights"):
        zerojax.shard_train_state(({"w": jnp.ones((8, 8))}, ()), precision=BF16)


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 2), (3, 1)])
def test_float64_is_exact_on_any_number_of_devices(stage, accumulate):
    with jax.enable_x64(True):
        rows = np.random.default_rng(0).normal(size=(24, 12))
        params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(12, 24)))}
        loss = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2)
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
        state = zerojax.shard_train_state(state, stage, mesh=make_mesh(6))
        step = zerojax.train_step(loss, accumulate=accumulate, donate=False)
        new, metrics = step(state, rows)
        value, grads = jax.value_and_grad(loss)(params, rows)
        assert metrics["loss"].dtype == jnp.float64
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-14)
        np.testing.assert_allclose(params["w"] - new.params["w"], grads["w"], rtol=0, atol=1e-15)
        assert zerojax.verify(step, state, rows).ok


def test_a_narrow_loss_is_divided_where_it_is_exact():
    """A third is another number in bfloat16, and must not multiply each gradient."""
    params = {"w": jnp.ones((12, 16))}
    plan = zerojax.plan({"params": params}, stage=0, mesh=make_mesh(3))
    loss = lambda params, x: jnp.mean(x @ params["w"]).astype(jnp.bfloat16)
    value, grads = zerojax.value_and_grad(loss, plan)(params, jnp.ones((12, 12)))
    assert value.dtype == jnp.float32 and float(value) == 12
    np.testing.assert_allclose(grads["w"], np.full((12, 16), 1 / 16), rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_aux_is_averaged_wide(accumulate):
    params = {"w": jnp.ones((16, 16))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    state = zerojax.shard_train_state(state)
    half, whole = jnp.float16(60000), jnp.bfloat16(256)
    aux = {"half": half, "int": jnp.int32(2**24 - 1), "rows": None, "narrow": whole}
    loss = lambda params, x: (jnp.mean(x @ params["w"]), aux | {"rows": x[:, 0]})
    x = jnp.arange(16.0, dtype=jnp.float16)[:, None] * jnp.ones(16, jnp.float16)
    for step in (zerojax.eval_step(loss), lambda s, x: zerojax.train_step(
        loss, accumulate=accumulate)(s, x)[1]):  # fmt: skip
        told = step(state, x)["aux"]
        assert {k: v.dtype.name for k, v in told.items()} == {
            "half": "float32", "int": "float32", "narrow": "float32", "rows": "float16"
        }  # fmt: skip
        assert (float(told["half"]), float(told["int"])) == (60000, 2**24 - 1)
        np.testing.assert_array_equal(told["rows"], np.arange(16))


F8 = "float8_e4m3fn"


@pytest.mark.parametrize("master", [None, "float32"])
def test_float8_parameters(master, mesh, tmp_path):
    keys = jax.random.split(jax.random.key(0))
    params = {"a": jax.random.normal(keys[0], (8, 16)), "b": jax.random.normal(keys[1], (16, 8))}
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["a"].astype(jnp.float32)) @ p["b"]) ** 2)
    precision = zerojax.Precision(param=F8, master=master, compute="float32") if master else None
    if not master:
        params["a"] = params["a"].astype(F8)
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.05))
    state = zerojax.shard_train_state(state, stage=3, mesh=mesh, precision=precision)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    step = zerojax.train_step(loss, accumulate=2)
    zerojax.verify(step, state, x).raise_if_wrong()
    first = None
    for _ in range(4):
        state, metrics = step(state, x)
        first = metrics["loss"] if first is None else first
    assert metrics["grad_norm"].dtype == jnp.float32 and metrics["loss"] < first
    assert state.params["a"].dtype == F8
    if master:  # exactly the copies, rounded
        copies = jax.tree.map(lambda m: m.astype(F8), state.opt_state.master)
        jax.tree.map(np.testing.assert_array_equal, state.params, copies)
    zerojax.save(tmp_path / "c", state)
    restored = zerojax.restore(tmp_path / "c", like=state)
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)


def test_precision_that_is_none():
    with pytest.raises(TypeError, match=r"precision must be.*got 'bfloat16'. Pass for example"):
        zerojax.plan({"params": {"w": jnp.ones((16, 16))}}, precision="bfloat16")
