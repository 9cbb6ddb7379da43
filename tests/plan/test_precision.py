"""The dtypes of a state and its step: masters, narrow moments, what is computed and averaged in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support.linear import BATCH
from tests.support.reference import assert_equal_bits, train_state
from tests.support.shapes import shape

HALF = {"compute": "bfloat16", "param": "bfloat16"}
STORED = {
    "param": {"param": "bfloat16"},
    "master": HALF | {"master": "float32"},
    "moments": {"moments": "bfloat16"},
    "all": HALF | {"master": "float32", "moments": "bfloat16"},
}
STORED = {name: zerojax.Precision(**options) for name, options in STORED.items()}
MASTER, MOMENTS, ALL = (STORED[name] for name in ("master", "moments", "all"))
TWO = make_mesh(2)


def made(tx=None, **params):
    params = params or {"w": np.full((64, 16), 1 + 2**-12, "f"), "ids": np.arange(8)}
    return train_state(params, tx or optax.sgd(0.1, 0.9))


def dtypes(tree):
    leaves = jax.tree.leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): leaf.dtype.name for path, leaf in leaves}


def counted(state, kind):
    return str(jax.tree.structure(state.opt_state)).count(kind)


# -- placement


@pytest.mark.parametrize(("name", "born"), [("param", True), ("master", True), ("master", False)])
def test_a_plan_places_as_its_precision_says(name, born):
    given = made if born else made()
    plan = zerojax.plan(given, precision=STORED[name], mesh=TWO)
    placed = plan.place(given)
    for planned, leaf in zip(*map(jax.tree.leaves, (plan.abstract(), placed)), strict=True):
        assert (planned.dtype, planned.sharding) == (leaf.dtype, leaf.sharding)
    assert placed.params["w"].dtype == jnp.bfloat16 and placed.params["ids"].dtype == jnp.int32
    if name == "master":  # from the parameters as given, not as rounded
        assert_equal_bits(placed.opt_state.master["w"], made().params["w"])
    plan._check_structure(placed)
    assert_equal_bits(plan.place(placed).params, placed.params)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.filterwarnings("ignore:.*without master=")
def test_a_trained_optimizer_is_kept_and_rounded_once(name):
    state = made(optax.adam(0.1), w=np.ones((64, 16), "f"))
    adam, *rest = state.opt_state
    mean = np.random.default_rng(0).normal(size=(64, 16)).astype("f")
    adam = adam._replace(count=jnp.int32(7), mu={"w": mean})
    state = state.replace(opt_state=(adam, *rest))
    for stage in (3, 1):
        state = zerojax.shard_train_state(state, stage, precision=STORED[name], mesh=TWO)
    is_wide = name == "master"
    (mu,) = (x for x in jax.tree.leaves(state.opt_state) if x.shape and np.asarray(x).std() > 0)
    assert mu.dtype == ("float32" if is_wide else "bfloat16")
    assert_equal_bits(mu, mean if is_wide else mean.astype(jnp.bfloat16))
    assert 7 in [int(x) for x in jax.tree.leaves(state.opt_state) if not x.shape]
    assert counted(state, "MasterState") == (name in ("master", "all"))
    assert counted(state, "NarrowState") == (name in ("moments", "all"))


def test_masters_that_are_there_stay_where_moments_become_narrow_later():
    state = zerojax.shard_train_state(made(optax.adam(0.1)), precision=MASTER, mesh=TWO)
    before = jax.device_get(state.opt_state.master)
    state = zerojax.shard_train_state(state, precision=ALL, mesh=TWO)
    assert_equal_bits(state.opt_state.inner.master, before)
    assert dtypes(state.opt_state.inner.inner[0].nu)["w"] == "bfloat16"


def test_a_plan_keeps_where_parameters_lie_that_it_stores_narrower():
    mesh = zerojax.mesh(data=4, tensor=2)
    along = NamedSharding(mesh, P(None, "tensor"))
    params = {"w": jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=along)}
    state = jax.eval_shape(optax.adam(0.1).init, params)
    state = TrainState(0, apply_fn=None, params=params, tx=optax.adam(0.1), opt_state=state)
    plan = zerojax.plan(state, mesh=mesh, precision=MASTER)
    specs = {leaf.path: leaf.spec for leaf in plan.leaves}
    assert specs["params/w"] == specs["opt_state/master/w"] == P("data", "tensor")


# -- moments


def several():
    label = lambda params: {"w": "trained", "scale": "frozen"}
    return optax.multi_transform({"trained": optax.lion(0.1), "frozen": optax.set_to_zero()}, label)


@pytest.mark.parametrize(
    ("tx", "names"),
    [
        (optax.adamw(1e-3), {"0/mu/w", "0/nu/w"}),
        (optax.sgd(0.1), set()),
        (several(), {"inner_states/trained/inner_state/0/mu/w"}),
        # Not rows and columns, which have other shapes, nor copies of parameters.
        (optax.adafactor(1e-3, momentum=0.9, min_dim_size_to_factor=8), {"4/ema/w"}),
        (
            optax.contrib.schedule_free(optax.adamw(1e-3), 1e-3),
            {"base_optimizer_state/0/mu/w", "base_optimizer_state/0/nu/w"},
        ),
        (zerojax.manual.master_weights(optax.adamw(1e-3)), {"inner/0/mu/w", "inner/0/nu/w"}),
    ],
)
def test_moments_are_what_follows_a_parameter_and_does_not_start_as_it(tx, names):
    params = {"w": shape(16, 24), "scale": shape()}
    narrow = dtypes(jax.eval_shape(zerojax.manual.narrow_moments(tx).init, params).inner)
    assert {name for name, dtype in narrow.items() if dtype == "bfloat16"} == names


def test_the_optimizer_sees_float32():
    seen = []

    def update(grads, state, params=None):
        seen.append({**dtypes(grads), **dtypes(state)})
        return grads, jax.tree.map(lambda m: 0.9 * m + 1, state)

    tx = optax.GradientTransformation(lambda p: {"m": jax.tree.map(jnp.zeros_like, p)}, update)
    tx, params = zerojax.manual.narrow_moments(tx), {"w": jnp.ones(16, jnp.bfloat16)}
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert seen == [{"w": "float32", "m/w": "float32"}] and updates["w"].dtype == jnp.float32
    assert state.inner["m"]["w"].dtype == jnp.bfloat16 and int(state.count) == 1


def test_second_moments_follow_their_gradients():
    """Gradients of one size: rounded to the nearest, the mean of squares would stand at 1."""
    params = {"w": np.ones((16, 16), "f")}
    tx = zerojax.manual.narrow_moments(optax.adam(1e-3))
    state = tx.init(params)
    start = {"w": jnp.ones((16, 16), jnp.bfloat16)}
    adam = state.inner[0]._replace(nu=start, count=jnp.int32(2000))
    state = state._replace(inner=(adam, *state.inner[1:]))
    grads = {"w": np.sqrt(2.0) + np.linspace(0, 1e-3, 256, dtype="f").reshape(16, 16)}

    @jax.jit
    def run(state):
        body = lambda state, _: (tx.update(grads, state, params)[1], None)
        return jax.lax.scan(body, state, None, 1000)[0]

    second = np.asarray(run(state).inner[0].nu["w"], np.float64)
    assert abs(second.mean() - (2 - 0.999**1000)) < 0.02


# -- steps


def test_tiny_updates_add_up_in_the_masters():
    """A twentieth of a bfloat16 step each: without masters, any number of them is nothing."""
    loss = lambda p, x: jnp.mean(p["w"].astype(jnp.float32).sum() + 0 * x)
    state = made(optax.sgd(0.125), w=np.full((16, 16), 256, "f"))
    state = zerojax.shard_train_state(state, precision=MASTER, mesh=TWO)
    step = zerojax.train_step(loss)
    for _ in range(40):
        state, _ = step(state, BATCH)
    assert np.all(state.opt_state.master["w"] == 251)
    assert np.all(state.params["w"] == jnp.bfloat16(251))
    assert state.opt_state.master["w"].sharding.spec == P("data")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("options", [{"reduce": "float32"}, {"moments": "bfloat16"}])
@pytest.mark.filterwarnings("ignore:.*without master=")
def test_narrow_parameters_without_masters(options, accumulate):
    precision = zerojax.Precision(param="bfloat16", **options)
    state = made(optax.sgd(1.0, 0.5), w=np.zeros((64, 16), "f"))
    state = zerojax.shard_train_state(state, precision=precision, mesh=TWO)
    step = zerojax.train_step(lambda p, x: jnp.mean((x @ p["w"]).sum(1)), accumulate=accumulate)
    for wanted in (-1, -2.5):
        state, _ = step(state, BATCH)
        assert np.all(state.params["w"] == wanted)
    assert step._cache_size() == 1
    assert set(dtypes((state.params, state.opt_state)).values()) <= {"bfloat16", "int32"}


def test_steps_compute_in_the_dtype_that_the_state_was_placed_with():
    seen = []

    def loss(params, batch):
        seen.append({**dtypes(params), **dtypes(batch)})
        return jnp.mean(batch["x"] @ params["w"])

    state = zerojax.shard_train_state(made(w=np.ones((64, 16), "f")), precision=MASTER)
    batch = {"x": BATCH, "ids": np.ones(8, np.int32)}
    zerojax.eval_step(loss).trace(state, batch)
    zerojax.train_step(loss).trace(state, batch)
    plan = zerojax.plan({"params": {"w": np.ones((64, 16), "f")}})
    grad = zerojax.value_and_grad(loss, plan, precision=zerojax.Precision(compute="bfloat16"))
    value, grads = jax.eval_shape(grad, {"w": shape(64, 16)}, batch)
    assert len(seen) >= 3
    assert all(one == {"w": "bfloat16", "x": "bfloat16", "ids": "int32"} for one in seen)
    assert value.dtype == grads["w"].dtype == jnp.float32


def test_float64_is_exact_on_any_number_of_devices():
    with jax.enable_x64(True):
        rows, w = (np.random.default_rng(0).normal(size=size) for size in ((12, 12), (12, 9)))
        loss = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2)
        state = zerojax.shard_train_state(made(optax.sgd(1.0), w=w), mesh=make_mesh(3))
        new, metrics = zerojax.train_step(loss, accumulate=2)(state, rows)
        value, grads = jax.jit(jax.value_and_grad(loss))({"w": w}, rows)
        assert metrics["loss"].dtype == jnp.float64
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-14)
        np.testing.assert_allclose(w - new.params["w"], grads["w"], rtol=0, atol=1e-15)


def test_a_narrow_loss_is_divided_where_it_is_exact():
    """A third is another number in bfloat16, and must not multiply each gradient."""
    params = {"w": np.ones((12, 16), "f")}
    plan = zerojax.plan({"params": params}, stage=0, mesh=make_mesh(3))
    loss = lambda params, x: jnp.mean(x @ params["w"]).astype(jnp.bfloat16)
    value, grads = zerojax.value_and_grad(loss, plan)(params, np.ones((12, 12), "f"))
    assert value.dtype == jnp.float32 and float(value) == 12
    np.testing.assert_allclose(grads["w"], np.full((12, 16), 1 / 16), rtol=1e-6)


def test_aux_is_averaged_wide():
    aux = {"half": jnp.float16(60000), "int": jnp.int32(2**24 - 1), "narrow": jnp.bfloat16(256)}
    loss = lambda params, x: (jnp.mean(x @ params["w"]), aux | {"rows": x[:, 0]})
    state = zerojax.shard_train_state(made(w=np.ones((16, 16), "f")), mesh=TWO)
    x = np.arange(16, dtype=np.float16)[:, None] * np.ones(16, np.float16)
    step = zerojax.train_step(loss, accumulate=2, donate=False)
    for told in (zerojax.eval_step(loss)(state, x)["aux"], step(state, x)[1]["aux"]):
        wide = dict.fromkeys(("half", "int", "narrow"), "float32")
        assert dtypes(told) == wide | {"rows": "float16"}
        assert (float(told["half"]), float(told["int"])) == (60000, 2**24 - 1)
        np.testing.assert_array_equal(told["rows"], np.arange(16))


def test_float8_parameters_of_the_users_own(tmp_path):
    float8, draw = jnp.float8_e4m3fn, np.random.default_rng(0)
    a, b, x = (draw.normal(size=size).astype("f") for size in ((8, 16), (16, 8), (8, 8)))
    params = {"a": a.astype(float8), "b": b}
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["a"].astype(jnp.float32)) @ p["b"]) ** 2)
    wanted = jax.jit(loss)(params, x)
    state = zerojax.shard_train_state(made(optax.sgd(0.05), **params), mesh=TWO)
    state, metrics = zerojax.train_step(loss, accumulate=2)(state, x)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert metrics["grad_norm"].dtype == jnp.float32 and state.params["a"].dtype == float8
    zerojax.save(tmp_path / "c", state)
    assert_equal_bits(zerojax.restore(tmp_path / "c", like=state).params, state.params)
