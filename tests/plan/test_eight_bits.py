"""Masters as weights with corrections, moments as codes: how exact they are, where they train, what
they weigh, and what opens them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zerojax
from tests.conftest import make_mesh
from tests.plan.test_precision import MOMENTS, dtypes, made
from tests.plan.test_rounding import numbers
from tests.support.compared import masters_of, moments_of
from tests.support.reference import assert_equal_bits
from tests.support.schedules import train_step
from zerojax import _compat
from zerojax._plan import encodings, kept

WEIGHTS = {"param": "bfloat16", "master": "split"}
SPLIT, SEVEN = zerojax.Precision(**WEIGHTS), zerojax.Precision(**WEIGHTS, moments="int8")
MASTER = zerojax.Precision(param="bfloat16", master="float32")
EIGHT = zerojax.Precision(moments="int8")
TWO, FOUR = make_mesh(2), make_mesh(4)
STEP, COUNT = 2.0**-23, 2000  # a float32 number, relative to the size of 1; steps


def steps_of(count, make):
    """What a state of 8 bits decodes to after each of many updates of the same numbers."""
    return np.asarray(jax.lax.map(lambda i: make(encodings.salt(i, 3)), jnp.arange(count)))


# -- corrections


@pytest.mark.parametrize(("salt", "steps"), [(None, 129), (7, 258)])
def test_a_weight_and_its_correction_are_the_master(salt, steps):
    x = numbers()
    weight, code = jax.jit(encodings.split)(x, None if salt is None else jnp.uint32(salt))
    got = np.asarray(encodings.joined(weight, code), np.float64)
    assert_equal_bits(weight, x.astype(jnp.bfloat16))
    assert np.max(np.abs(got / x - 1)) <= steps * STEP
    again = encodings.split(np.float32(got), jnp.uint32(8))
    assert_equal_bits(again, (weight, code))


def test_a_code_of_one_side_of_the_middle_fits_the_weight_of_the_other():
    """XLA may round what it computes twice in two ways."""
    bits = np.arange(1, 64) << 16 | 0x3F808000
    middle, *apart = ((bits + far).astype(np.uint32).view(np.float32) for far in (0, -2, 2))
    below, above = map(encodings.split, apart)
    assert np.all(np.asarray(below[0]) < np.asarray(above[0]))
    for weight, code in ((below[0], above[1]), (above[0], below[1])):
        got = np.asarray(encodings.joined(weight, code), np.float64)
        assert np.max(np.abs(got / middle - 1)) < 4 * STEP


def test_what_no_correction_can_change():
    values = np.array([0, -0.0, np.inf, -np.inf, np.nan, 2**-100, 3.4e38], np.float32)
    weight, code = encodings.split(values)
    np.testing.assert_allclose(encodings.joined(weight, code), values, rtol=2e-5)
    # The user may set a weight anew, and its correction is that of the old one.
    others = encodings.joined(jnp.zeros(255, jnp.bfloat16), jnp.arange(-127, 128, dtype=jnp.int8))
    assert np.max(np.abs(np.asarray(others))) < 1e-40
    others = encodings.joined(jnp.full(2, -jnp.inf, jnp.bfloat16), jnp.array([-127, 127], jnp.int8))
    np.testing.assert_array_equal(np.float32(others.astype(jnp.bfloat16)), -np.inf)


@pytest.mark.parametrize("master", ["float32", "split"])
def test_an_infinite_weight_stays(master):
    """As that of a mask may be, whose gradient is zero."""
    tx = zerojax.manual.master_weights(optax.sgd(0.5), master)
    params = {"w": jnp.array([-jnp.inf, jnp.inf, 1], jnp.bfloat16)}
    updates, _ = tx.update({"w": jnp.array([0.0, 0.0, 1.0])}, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(np.float32(new["w"]), [-np.inf, np.inf, 0.5])


def test_updates_smaller_than_a_correction_add_up():
    tx = zerojax.manual.master_weights(optax.sgd(2.0**-20), "split")
    params = {"w": jnp.linspace(0.6, 0.9, 4096, dtype=jnp.bfloat16)}
    start, steep = params["w"], jax.tree.map(jnp.ones_like, params)

    @jax.jit
    def run(params, state):
        def body(both, _):
            updates, state = tx.update(steep, both[1], both[0])
            return (optax.apply_updates(both[0], updates), state), None

        return lax.scan(body, (params, state), None, COUNT)[0]

    params, state = run(params, tx.init(params))
    masters = np.asarray(encodings.joined(params["w"], state.correction["w"]), np.float64)
    # Each was an eighth of a step between corrections.
    wanted = np.asarray(start, np.float64) - COUNT * 2.0**-20
    assert abs((masters - wanted).mean()) < 2e-5
    assert_equal_bits(params["w"], masters.astype(np.float32).astype(jnp.bfloat16))


# -- codes


def blocks(signs):
    """Rows of which one in five is zero, over fourteen octaves."""
    x = 2.0 ** np.random.default_rng(1).uniform(-7, 7, (40, 150))
    x[:, ::5] = 0
    return np.float32(x * np.random.default_rng(2).choice([-1, 1], x.shape) if signs else x)


@pytest.mark.parametrize("signs", [True, False])
def test_codes_are_a_sixteenth_off_at_most(signs):
    x = blocks(signs)
    for salt, most in ((None, 1 / 16), (jnp.uint32(9), 1 / 8)):
        codes, scales = encodings.encoded(x, salt)
        got = np.asarray(encodings.decoded(codes, scales))
        assert codes.dtype == jnp.int8 and scales.shape == (40, 3)
        assert np.all(np.abs(got - x) <= most * np.abs(x))
        assert_equal_bits(encodings.decoded(*encodings.encoded(got, jnp.uint32(1))), got)
    got = steps_of(COUNT, lambda salt: encodings.decoded(*encodings.encoded(x[:2], salt)))
    off = np.abs(got.astype(np.float64).mean(0) - x[:2])  # of two codes, an eighth apart
    assert np.all(off <= 4.5 * np.abs(x[:2]) / 16 / np.sqrt(COUNT))


def test_small_numbers_of_a_block_vanish_at_random_if_it_has_signs_and_else_stay():
    x = np.full((1, 64), 2.0**-19, np.float32)
    x[:, 0] = 1
    plain = steps_of(64, lambda salt: encodings.decoded(*encodings.encoded(x**2, salt)))
    np.testing.assert_array_equal(plain[:, 0, 1:], np.float32(1.375 * 2.0**-32))
    x[:, 0] = -1
    got = steps_of(COUNT, lambda salt: encodings.decoded(*encodings.encoded(x, salt)))[:, 0, 1:]
    assert np.unique(got).size == 2 and np.any(got == 0)
    assert abs(got.mean() / 2.0**-19 - 1) < 0.05


def test_blocks_that_are_not_finite_and_blocks_of_zeros():
    x = np.zeros((4, 128), np.float32)
    x[0, 3], x[1, 100], x[2, :] = np.nan, -np.inf, 3e38
    codes, scales = encodings.encoded(x)
    got = np.asarray(encodings.decoded(codes, scales))
    assert np.isnan(got[0, :64]).all() and np.isnan(got[1, 64:]).all()
    assert np.all(got[0, 64:] == 0) and np.all(got[1, :64] == 0)
    np.testing.assert_allclose(got[2], 3e38, rtol=1 / 8)
    assert not np.any(codes[3]) and not np.any(scales[3])


def test_codes_look_like_finite_floats():
    codes = jnp.arange(-127, 128, dtype=jnp.int8)
    floats = encodings.as_float(codes)
    assert np.isfinite(np.asarray(floats, np.float32)).all()
    assert_equal_bits(encodings.as_stored(floats, codes.dtype), codes)
    assert min(int(np.min(encodings.encoded(blocks(signs))[0])) for signs in (0, 1)) == -127


@pytest.mark.parametrize("signs", [True, False])
@pytest.mark.parametrize("first", ["zeros", "codes of float32 moments"])
def test_a_step_is_no_larger_than_with_moments_in_float32(signs, first):
    """Of the smallest gradients float32 has no square: those divide by `eps` alone."""
    draw, tx = np.random.default_rng(0), optax.adam(1.0, eps=1e-15)
    steep = 10.0 ** draw.uniform(-30, 0, (64, 64))
    steep[:, 0] = 1
    grads = {"w": np.float32(steep * draw.choice([-1, 1], steep.shape) if signs else steep)}
    params = jax.tree.map(np.zeros_like, grads)
    eight = zerojax.manual.narrow_moments(tx, "int8")
    wide, narrow = tx.init(params), eight.init(params)
    if first != "zeros":
        _, wide = jax.jit(tx.update)(grads, wide)
        narrow = kept._with_narrow(tx, params, wide, jnp.int8)
    for _ in range(20):
        wanted, wide = jax.jit(tx.update)(grads, wide)
        found, narrow = jax.jit(eight.update)(grads, narrow)
        wanted, found = (np.abs(updates["w"]) for updates in (wanted, found))
        assert np.all(found <= 1.3 * wanted + 1)
    moment = encodings.decoded(narrow.inner[0].mu["w"], narrow.scales[0].mu["w"])
    assert np.all(np.asarray(moment)[np.abs(grads["w"]) < 1e-20] == 0)  # as checkpoints have it


# -- steps


HALVED = optax.sgd(2.0**-6, momentum=0.5)


def stacks(dim, tx=HALVED):
    blocks = {"w": np.zeros((4, dim, dim), "f"), "b": np.zeros((4, dim), "f")}
    return made(tx, blocks=blocks, head=np.zeros((dim, 2 * dim), "f"))


def linear(params, batch):
    """Its gradients are small integers, so that all arithmetic is exact but the rounding."""
    size = params["head"].shape[0]
    each = jnp.arange(size * size).reshape(size, size) % 7 + 1

    def layer(x, p):
        return x + (batch @ (p["w"] * each)).sum(-1) + batch @ p["b"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), jnp.zeros(batch.shape[0]), params["blocks"])
    return jnp.mean(x + (batch @ params["head"]).sum(-1))


def drawn(dim, tx=HALVED):
    """Whatever the parameters are, the gradients of `linear` are small integers."""
    draw, params = np.random.default_rng(7), stacks(dim).params
    return made(tx, **jax.tree.map(lambda x: draw.normal(size=x.shape).astype("f"), params))


def wrapped(dim, precision):
    """A state on one device, of an optimizer that the user has wrapped."""
    tx = zerojax.manual.narrow_moments(HALVED, precision.moments)
    if precision is not SEVEN:
        return drawn(dim, tx)
    state = drawn(dim, zerojax.manual.master_weights(tx, "split"))
    return state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params))


HOST = {"offload": zerojax.Offload(min_bytes=0)}
NODES = zerojax.mesh(node=4, gpu=2)
GROUPS = {"mesh": NODES, "axis": ("node", "gpu"), "groups": {"params": "gpu"}}
PLACED = [
    (0, 16, {}, {}),
    (1, 16, {}, {"accumulate": 4}),
    (2, 16, {}, {"accumulate": 4}),
    (3, 16, {}, {"update": "backward"}),
    (3, 19, {}, {}),  # padded, and the head is sharded along its rows
    (3, 16, GROUPS, {}),
    (3, 16, HOST, {}),
]
ROUNDED = [(SEVEN, *row) for row in PLACED if row[0] != 1]
ROUNDED += [(MOMENTS, *PLACED[at]) for at in (1, 3, 4, 6)]


@pytest.mark.parametrize(("precision", "stage", "dim", "placed", "options"), ROUNDED)
@pytest.mark.filterwarnings("ignore:.*is stored padded")
def test_sharding_changes_no_bit(precision, stage, dim, placed, options):
    wanted, below = wrapped(dim, precision), 2 if precision is SEVEN else 1024
    one = jax.jit(lambda s, batch: s.apply_gradients(grads=jax.grad(linear)(s.params, batch)))
    placed = {"mesh": TWO} | placed
    state = zerojax.shard_train_state(drawn(dim), stage, precision=precision, **placed)
    step = train_step(linear, **options)
    for seed in range(3):
        batch = np.random.default_rng(seed).integers(0, below, (32, dim)).astype("f")
        wanted = one(wanted, batch)
        state, _ = step(state, batch)
    narrow = state.opt_state.inner if precision is SEVEN else state.opt_state
    kinds = {x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(narrow.inner)}
    assert kinds == {"offload" in placed}
    state = zerojax.unpad(state)
    assert dtypes(state.opt_state) == dtypes(wanted.opt_state)
    assert_equal_bits((state.params, state.opt_state), (wanted.params, wanted.opt_state))
    if precision is SEVEN:
        trace, correction = state.opt_state.inner.inner[0].trace, state.opt_state.correction
        assert all(np.unique(each["blocks"]["w"]).size > 8 for each in (trace, correction))


def model(tx=None):
    draw = np.random.default_rng(0)
    params = {"w": draw.normal(size=(256, 512)).astype("f"), "b": np.zeros(64, "f")}
    return made(tx or optax.adamw(1e-3), **params)


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + jnp.mean(params["b"])


@pytest.mark.parametrize(("precision", "wanted"), [(SPLIT, 11), (SEVEN, 5)])
def test_bytes_of_a_parameter_on_each_device(precision, wanted):
    plan = zerojax.plan(model(), stage=3, precision=precision, mesh=FOUR)
    state = plan.place(model())
    held = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state))
    gradient = jax.eval_shape(zerojax.value_and_grad(loss, plan), state.params, np.ones((8, 256)))
    count, scales = 256 * 512 / 4, 2 * 2 / 64 if precision is SEVEN else 0
    assert held / count == pytest.approx(wanted + scales, rel=0.03)
    assert gradient[1]["w"].dtype.itemsize + wanted == (7 if precision is SEVEN else 13)


def test_codes_of_a_new_state_are_not_computed_while_xla_compiles():
    """It folds what it knows: of a large stack of zeros, that took minutes."""
    plan = zerojax.plan(model, stage=3, precision=EIGHT, mesh=FOUR)
    assert " reduce(" in plan._born_sharded(model).lower().compile().as_text()


def test_host_memory_has_three_bytes():
    plan = zerojax.plan(
        model(), stage=3, precision=SEVEN, mesh=FOUR, offload=zerojax.Offload(min_bytes=128)
    )
    count = 256 * 512 / 4
    assert plan.host_bytes_per_device()["opt_state"] / count == pytest.approx(3 + 1 / 16, rel=0.01)


def test_codes_in_host_memory_are_updated_layer_by_layer():
    text = str(zerojax.plan(drawn(16), stage=3, precision=SEVEN, mesh=TWO, **HOST))
    assert text.count("host, updated layer by layer") == 5, text


def kernels(leaves):
    """The kernels of an update of so many equal matrices, without their names."""
    params = {str(k): jnp.ones((64, 128), jnp.bfloat16) for k in range(leaves)}
    tx = zerojax.manual.narrow_moments(optax.adamw(1e-3), "int8")
    tx = zerojax.manual.master_weights(tx, "split")
    text = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
    found = set()
    for body in re.findall(r"^%?fused_computation.*?\{\n(.*?)^\}", text, re.S | re.M):
        names: dict[str, str] = {}
        body = re.sub(r", metadata=\{.*?\}", "", body)
        found.add(re.sub(r"%[\w.-]+", lambda m: names.setdefault(m[0], str(len(names))), body))
    return found


@pytest.mark.skipif(not _compat.KEEPS_BARRIERS, reason="XLA:CPU drops barriers")
def test_equal_leaves_have_equal_kernels():
    """XLA compiles those once: an update of many layers in a Python loop has few."""
    assert kernels(4) == kernels(2)


def test_the_plan_says_what_a_leaf_is_kept_as():
    tx = optax.chain(optax.trace(0.9), optax.adafactor(1e-3, min_dim_size_to_factor=8))
    text = str(zerojax.plan(model(tx), stage=1, precision=SEVEN, mesh=TWO))
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("opt_state")}
    wanted = {
        "correction/w": "8-bit correction",
        "inner/inner/0/trace/w": "8 bits",
        "inner/inner/0/trace/b": "wide: a vector",
        "inner/scales/0/trace/w": "scales of 8 bits",
        "inner/inner/1/0/v_row/w": "wide: ",
    }
    for path, said in wanted.items():
        assert said in rows[f"opt_state/{path}"], text
    assert "kept as" not in str(zerojax.plan(model(tx), stage=1, precision=MASTER, mesh=TWO))


def test_verify_knows_that_codes_are_rounded_at_random():
    half = zerojax.Precision(**WEIGHTS, moments="int8", compute="bfloat16")
    state = zerojax.shard_train_state(model(), stage=3, precision=half)
    batch = np.random.default_rng(0).normal(size=(16, 256))
    step = zerojax.train_step(loss, accumulate=2)
    state, _ = step(state, batch.astype("f"))
    zerojax.verify(step, state, batch.astype("f")).check()


@pytest.mark.parametrize(
    ("precision", "path"),
    [(SPLIT, "params/w (master)"), (EIGHT, "opt_state/inner/0/mu/w (decoded)")],
)
def test_verify_compares_what_codes_stand_for(precision, path):
    """Corrections that are lost change no weight; codes that are three off may be a third off."""
    state = zerojax.shard_train_state(model(), stage=3, precision=precision, mesh=TWO)
    step, batch = zerojax.train_step(loss), np.random.default_rng(0).normal(size=(16, 256))

    def broken(state, batch):
        new, metrics = step(state, batch)
        opt_state = new.opt_state
        if precision is SPLIT:
            correction = jax.tree.map(jnp.zeros_like, opt_state.correction)
            return new.replace(opt_state=opt_state._replace(correction=correction)), metrics
        adam, *others = opt_state.inner
        codes = jnp.clip(adam.mu["w"].astype("int32") + 3, -127, 127).astype("int8")
        inner = (adam._replace(mu=adam.mu | {"w": codes}), *others)
        return new.replace(opt_state=opt_state._replace(inner=inner)), metrics

    report = zerojax.verify(step, state, batch.astype("f")).check()
    assert path in [check.path for check in report.checks]
    report = zerojax.verify(broken, state, batch.astype("f"), like=step)
    assert path in [check.path for check in report.wrong], report


# -- checkpoints

SAVED = {None: None, "master": MASTER, "split": SPLIT, "seven": SEVEN}


def decoded(state):
    """The numbers that a state of any precision stands for."""
    state = jax.device_get(state)
    masters, inner = state.params, state.opt_state
    if hasattr(inner, "master") or hasattr(inner, "correction"):
        masters, inner = masters_of(masters, inner)
    adam, *_ = moments_of(inner) if hasattr(inner, "scales") else inner
    found = {"master": masters["w"], "mu": adam.mu["w"], "nu": adam.nu["w"]}
    found = {name: np.asarray(value, np.float32) for name, value in found.items()}
    return found | {"count": int(adam.count)}


@pytest.mark.parametrize(
    ("first", "others"),
    [(None, ["split", "seven"]), ("master", ["seven"]), ("seven", [None, "master", "split"])],
)
def test_a_state_opens_with_another_precision(first, others, tmp_path):
    state = zerojax.shard_train_state(model(), stage=3, precision=SAVED[first], mesh=TWO)
    batch = np.random.default_rng(0).normal(size=(8, 256)).astype("f")
    for _ in range(2):
        state, _ = zerojax.train_step(loss)(state, batch)
    zerojax.save(tmp_path / "c", state)
    wanted = decoded(state)
    for second in others:
        placed = {"offload": zerojax.Offload(min_bytes=128)} if second == "seven" else {}
        plan = zerojax.plan(model(), stage=1, precision=SAVED[second], mesh=FOUR, **placed)
        opened = zerojax.restore(tmp_path / "c", like=plan)
        for ours, leaf in zip(plan._shardings, jax.tree.leaves(opened), strict=True):
            assert leaf.sharding == ours
        got = decoded(opened)
        for name, value in wanted.items():
            narrower = second in ("split", "seven") and first in (None, "master")
            apart = 129 * STEP * narrower if name == "master" else 0
            least = 0
            if name in ("mu", "nu") and second == "seven":
                apart, least = 1 / 16, 2.0**-15 * np.max(np.abs(value))
            off = np.abs(got[name] - value)
            assert np.all(off <= apart * np.abs(value) + least), (second, name)
        zerojax.train_step(loss).lower(opened, batch)


@pytest.mark.parametrize("precision", [SPLIT, MASTER])
def test_parameters_may_be_narrow_already(precision):
    """The optimizer sees float32 from now on, and its state has to be that."""
    state = made(optax.adam(1e-3), w=jnp.ones((64, 64), jnp.bfloat16))
    plan = zerojax.plan(state, stage=3, mesh=TWO, precision=precision)
    assert {jnp.dtype(x.dtype).name for x in plan.leaves if "/mu/" in x.path} == {"float32"}


@pytest.mark.parametrize("kind", ["master", "split"])
def test_weights_that_are_read_alone_bring_their_masters(kind, tmp_path):
    """Those of the old weights would undo them, or correct other ones."""
    state = zerojax.shard_train_state(model(), stage=3, precision=SAVED[kind], mesh=TWO)
    new = model().params | {"w": model().params["w"] * np.float32(1.7)}
    zerojax.save(tmp_path / "weights", {"params": new})
    options = {"like": state, "keep": "step|opt_state"}
    with pytest.raises(ValueError, match=r"not params/., which are one .*keep='opt_state/inner'"):
        zerojax.restore(tmp_path / "weights", **options)
    opened = zerojax.restore(tmp_path / "weights", like=state, keep="step|opt_state/inner")
    found = decoded(opened)["master"]
    assert np.max(np.abs(found / new["w"] - 1)) <= (129 * STEP if kind == "split" else 0)
    assert_equal_bits(jax.device_get(opened.params["w"]), new["w"].astype(jnp.bfloat16))


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"weights in bfloat16. Pass param='bfloat16'"):
        zerojax.Precision(param="float16", master="split")
    with pytest.raises(ValueError, match=r"Pass them in bfloat16"):
        tx = zerojax.manual.master_weights(optax.sgd(0.1), "split")
        tx.update({"w": jnp.ones(4)}, tx.init({"w": jnp.ones(4)}), {"w": jnp.ones(4)})
    state = zerojax.shard_train_state(model(), precision=MASTER, mesh=TWO)
    with pytest.raises(ValueError, match=r"Save the state, and restore it with like="):
        zerojax.shard_train_state(state, precision=SPLIT, mesh=TWO)
