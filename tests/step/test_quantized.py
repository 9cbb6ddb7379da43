"""Frozen weights that rest and travel as codes: `zerojax.quantize`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support import nnx_models
from tests.support.collectives import collectives, every_equation
from tests.support.reference import assert_close, assert_equal_bits, train_state
from tests.support.schedules import train_step
from zerojax.checkpoint import export_safetensors, import_safetensors
from zerojax.manual import dequantize

LAYERS, DIM, RANK, ROWS = 3, 64, 4, 16
RNG = np.random.default_rng(0)
BATCH = RNG.normal(size=(ROWS, DIM)).astype("f")
CODES = 34 * DIM  # bytes of a layer: 32 of codes and 2 of a scale in a row
FROZEN = {"base": {"w": True, "norm": True}, "lora": {"a": False, "b": False}}


def normal(*shape):
    return RNG.normal(size=shape).astype("f") / 8


LORA = {"a": normal(LAYERS, DIM, RANK), "b": normal(LAYERS, RANK, DIM)}
BASE = {"w": normal(LAYERS, DIM, DIM), "norm": np.ones((LAYERS, DIM), "f")}
PARAMS = {"base": BASE, "lora": LORA}


def layer(x, p):
    base, lora = p["base"], p["lora"]
    return jnp.tanh(x @ base["w"] + x @ lora["a"] @ lora["b"]) * base["norm"], None


def scanned(params, x, wrap=lambda f: f):
    return jnp.mean(jax.lax.scan(wrap(layer), x, params)[0] ** 2)


def looped(params, x, wrap=lambda f: f):
    for n in range(LAYERS):
        x, _ = wrap(layer)(x, jax.tree.map(lambda w: w[n], params))
    return jnp.mean(x**2)


def narrow(params, x):
    return scanned(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))


def listed(params, x):
    """Layers with parameters of their own, which a step rolls up."""
    for one in params["layers"]:
        x, _ = jax.checkpoint(layer)(x, one)
    return jnp.mean(x**2)


LISTED = {"layers": [jax.tree.map(lambda w, n=n: w[n], PARAMS) for n in range(LAYERS)]}
rematted = functools.partial(scanned, wrap=jax.checkpoint)


def state_of(params=PARAMS, frozen=FROZEN):
    tx = optax.selective_transform(optax.adam(1e-2), freeze_mask=frozen)
    return train_state(params, tx)


def listed_state():
    return state_of(LISTED, {"layers": [FROZEN] * LAYERS})


@pytest.mark.parametrize(
    ("codes", "bits", "worst"), [("nf4", 4, 0.152), ("int4", 4, 1 / 14), ("int8", 8, 1 / 254)]
)
def test_codes_are_as_close_as_their_levels(codes, bits, worst):
    """Half the largest distance of two levels; a scale in bfloat16 adds 1/128 of a level."""
    w = normal(8, 192)
    w[0] = 0
    packed = zerojax.quantize({"w": w}, codes)["w"]
    assert packed.rows.nbytes == 8 * (192 * bits // 8 + 2 * 3)
    got = np.asarray(dequantize(packed))
    largest = np.abs(w.reshape(8, 3, 64)).max(-1, keepdims=True)
    off = np.abs(got - w).reshape(8, 3, 64)
    assert np.all(off <= largest * (worst * 1.01 + 1e-7)) and off.max() > 0
    assert not got[0].any() and got.shape == w.shape and got.dtype == w.dtype


def test_a_block_longer_than_rows_is_a_row():
    (node,) = zerojax.quantize([normal(8, 96)], "int8", block=10**15)
    assert node.coding.block == 96


def test_nf4_has_the_quantiles_of_a_normal_distribution():
    """As QLoRA defines them: 7 below 0, and 8 above."""
    above, below = (jax.scipy.stats.norm.ppf(jnp.linspace(0.9677083, 0.5, n)[:-1]) for n in (9, 8))
    levels = np.sort(np.concatenate([-below, [0.0], above])) / above[0]
    row = np.tile(levels.astype("f"), 4)[None]
    assert_close(dequantize(zerojax.quantize({"w": row}))["w"], row, 1e-5)


@pytest.mark.parametrize(
    ("loss", "stage", "make"),
    [(scanned, 1, state_of), (rematted, 2, state_of), (scanned, 3, state_of), (looped, 3, state_of)]
    + [(listed, 3, listed_state)],
)
def test_steps_are_those_of_one_device_with_the_same_weights(loss, stage, make):
    state = zerojax.quantize(make())
    plain = make().replace(params=dequantize(state.params))
    placed, step = zerojax.shard_train_state(state, stage=stage), zerojax.train_step(loss)
    before = jax.tree.map(np.asarray, placed.params)
    for _ in range(2):
        value, grads = jax.jit(jax.value_and_grad(loss))(plain.params, BATCH)
        plain = plain.apply_gradients(grads=grads)
        placed, metrics = step(placed, BATCH)
        assert_close(metrics["loss"], value)
    assert_close(dequantize(placed.params), plain.params)
    same = jax.tree.map(lambda a, b: a.dtype == np.uint8 and (a == b).all(), placed.params, before)
    assert sum(map(bool, jax.tree.leaves(same))) == (LAYERS if loss is listed else 1)


def traced(loss, state, stage=3, **options):
    plan = zerojax.plan(state, stage=stage)
    return train_step(loss, **options).trace(plan.abstract(), BATCH).jaxpr


@pytest.mark.parametrize(
    ("loss", "make", "times", "depth"),
    [(scanned, state_of, 2 * LAYERS, 1), (rematted, state_of, 2 * LAYERS, 1)]
    + [(narrow, state_of, 2 * LAYERS, 1), (looped, state_of, 2 * LAYERS, 0)]
    + [(functools.partial(looped, wrap=jax.checkpoint), state_of, 2 * LAYERS, 0)]
    + [(listed, listed_state, 2 * LAYERS, 1)],
)
def test_only_codes_travel(loss, make, times, depth):
    found = list(collectives(traced(loss, zerojax.quantize(make()))))
    codes = [one for one in found if one.dtype == "uint8"]
    assert {(c.kind, c.depth) for c in codes} == {("all-gather", depth)}
    assert sum(c.moved for c in codes) == times * CODES
    # Small adapters of a layer may travel as one array.
    assert max(c.elements for c in found if c.dtype != "uint8") <= 2 * DIM * RANK


def test_codes_rest_whole_and_silent_where_parameters_do():
    found = list(collectives(traced(scanned, zerojax.quantize(state_of()), stage=2)))
    assert found and not [c for c in found if c.dtype == "uint8"]


def test_a_compiled_step_gathers_codes_and_rests_on_an_eighth_of_them():
    placed = zerojax.shard_train_state(zerojax.quantize(state_of()), stage=3)
    (rows,) = jax.tree.leaves(placed.params["base"]["w"])
    assert rows.addressable_shards[0].data.nbytes == LAYERS * CODES // 8
    params = dequantize(zerojax.reshard(placed, dtype="bfloat16"))
    assert params["base"]["w"].dtype == params["lora"]["a"].dtype == jnp.bfloat16
    report = zerojax.audit(zerojax.train_step(scanned), placed, BATCH).check()
    dtypes = {t.dtypes for t in report.traffic if t.kind == "all-gather" and "nf4" in str(t)}
    assert dtypes == {("u8",)}, str(report)


@pytest.mark.gpu_code
def test_gpu_code_gathers_codes_ahead():
    plan = zerojax.plan(zerojax.quantize(state_of()), stage=3, mesh=zerojax.aot.mesh("8xH100"))
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype), plan)
    report = zerojax.audit(zerojax.train_step(rematted), plan.abstract(), batch, plan=plan).check()
    gathers = [t for t in report.traffic if t.kind == "all-gather"]
    assert {"u8" in t.dtypes for t in gathers} == {True}, str(report)
    # With the adapters and the norm of a layer; its weight alone would be 16 KiB.
    assert max(t.wire_bytes for t in gathers) < 4.5 * 2**10, str(report)


def test_rows_of_a_table_are_decoded_and_not_the_table():
    params = {"table": normal(512, DIM), "head": normal(DIM, 8)}
    state = state_of(params, {"table": True, "head": False})
    loss = lambda p, ids: jnp.mean((p["table"][ids] @ p["head"]) ** 2)
    plan = zerojax.plan(zerojax.quantize(state), stage=3)
    ids = np.arange(ROWS, dtype=np.int32)
    jaxpr = zerojax.train_step(loss).trace(plan.abstract(), ids).jaxpr
    floats = [v.aval.size for e in every_equation(jaxpr) for v in e.outvars if v.aval.dtype == "f"]
    assert max(floats) < 512 * DIM
    placed = plan.place(zerojax.quantize(state))
    full = dequantize(zerojax.quantize(state).params)
    assert_close(zerojax.eval_step(loss)(placed, ids)["loss"], loss(full, ids))


@pytest.mark.parametrize("fill", [None, 0.0, 1.0])
def test_rows_that_a_table_does_not_have(fill):
    """NaN, as JAX returns it, or what the loss asks for."""
    params = {"table": normal(6, DIM), "head": normal(DIM, 8)}
    state = zerojax.quantize(state_of(params, {"table": True, "head": False}))

    def loss(params, ids):
        rows = params["table"].at[ids].get(mode="fill", fill_value=fill)
        return jnp.mean((jnp.nan_to_num(rows, nan=2.0) @ params["head"]) ** 2)

    placed, ids = zerojax.shard_train_state(state, stage=3), np.arange(ROWS, dtype=np.int32)
    wanted = loss(dequantize(state.params), ids)
    assert_close(zerojax.eval_step(loss)(placed, ids)["loss"], wanted)


def test_weights_are_seen_in_the_dtype_of_the_others():
    seen = []

    def loss(params, x):
        seen.append(params["base"]["w"].dtype)
        return scanned(params, x.astype(seen[-1]))

    for options in ({"compute": "bfloat16"}, {"param": "bfloat16", "master": "float32"}, {}):
        precision = zerojax.Precision(**options)
        plan = zerojax.plan(zerojax.quantize(state_of()), stage=3, precision=precision)
        zerojax.train_step(loss).trace(plan.abstract(), BATCH)
        assert {leaf.dtype.name for leaf in plan.params if "nf4" in leaf.path} == {"uint8"}
    assert [d.name for d in dict.fromkeys(seen)] == ["bfloat16", "float32"]


def test_codes_may_rest_in_host_memory():
    offload = zerojax.Offload(opt_state=False, params=True, min_bytes=CODES // 8)
    placed = zerojax.shard_train_state(zerojax.quantize(state_of()), stage=3, offload=offload)
    (rows,) = jax.tree.leaves(placed.params["base"]["w"])
    assert rows.sharding.memory_kind == "pinned_host"
    full, step = dequantize(zerojax.quantize(state_of()).params), zerojax.train_step(scanned)
    eqns = every_equation(step.trace(placed, BATCH).jaxpr)
    copies = [v.aval for e in eqns if e.primitive.name == "device_put" for v in e.outvars]
    # Layers of the whole array: on CPUs, what waits for forward is a copy of a device's shard.
    layers = [t for t in copies if t.shape[-2:] == rows.shape[-2:]]
    back = [t for t in layers if "host" in str(t.memory_space).lower()]
    assert copies and not back
    placed, metrics = step(placed, BATCH)
    assert_close(metrics["loss"], scanned(full, BATCH))
    (rows,) = jax.tree.leaves(placed.params["base"]["w"])
    assert rows.sharding.memory_kind == "pinned_host"


def test_numpy_weights_may_be_put_into_codes_where_the_state_is_made():
    numbers = jax.tree.map(np.array, PARAMS)
    made = zerojax.shard_train_state(lambda: zerojax.quantize(state_of(numbers)), stage=3)
    passed = zerojax.shard_train_state(zerojax.quantize(state_of(numbers)), stage=3)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(made.params), passed.params)


def test_a_mask_that_is_a_function_keeps_its_optimizer_state():
    frozen = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "base" in jax.tree_util.keystr(path), params
    )
    tx = optax.multi_transform({True: optax.set_to_zero(), False: optax.adam(1e-2)}, frozen)
    state = train_state(PARAMS, tx)
    state = state.apply_gradients(grads=PARAMS)  # moments that are not zeros
    packed = zerojax.quantize(state)
    assert_equal_bits(jax.tree.leaves(packed.opt_state), jax.tree.leaves(state.opt_state))
    assert zerojax.plan(packed, stage=3).leaves and traced(scanned, packed)


# -- files


def test_checkpoints_move_codes_between_stages(tmp_path):
    placed = zerojax.shard_train_state(zerojax.quantize(state_of()), stage=3)
    zerojax.save(tmp_path / "saved", placed)
    other = zerojax.plan(zerojax.quantize(state_of()), stage=1, mesh=make_mesh(4))
    restored = zerojax.restore(tmp_path / "saved", other)
    assert_equal_bits(zerojax.gather_params(restored), zerojax.gather_params(placed))


def test_files_have_codes_or_weights(tmp_path):
    params = {"w": normal(4, 98, 128), "v": normal(64, 256), "bias": normal(128)}
    plan = zerojax.plan({"params": zerojax.quantize(params, where="^[wv]$")}, stage=3)
    placed = plan.place({"params": zerojax.quantize(params, where="^[wv]$")})
    want = zerojax.gather_params(placed, plan)
    theirs = {"x": {str(n): {"weight": params["w"][n].T} for n in range(4)}}
    theirs |= {"v": params["v"], "bias": params["bias"]}
    names = {"w": ("x.{}.weight", "out in -> in out")}
    export_safetensors(tmp_path / "weights", params)
    export_safetensors(tmp_path / "theirs", theirs)
    export_safetensors(tmp_path / "codes", placed, plan=plan)
    for name, options in (("weights", {}), ("theirs", {"names": names}), ("codes", {})):
        got = import_safetensors(tmp_path / name, plan, **options)
        assert_equal_bits(zerojax.gather_params(got, plan), want)
    export_safetensors(tmp_path / "named", placed, plan=plan, names=names | {"v": "v"})
    got = import_safetensors(tmp_path / "named", {"params": params}, names=names)
    assert_equal_bits(got, jax.tree.map(np.asarray, dequantize(want)))
    export_safetensors(tmp_path / "merged", dequantize(want))
    got = import_safetensors(tmp_path / "merged", {"params": params})
    assert_equal_bits(got, jax.tree.map(np.asarray, dequantize(want)))


# -- other families


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.LoRALinear(DIM, 128, lora_rank=RANK, rngs=rngs)
        self.down = nnx.LoRALinear(128, DIM, lora_rank=RANK, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def test_a_nnx_model_trains_over_codes_in_place():
    loss = lambda model, x: jnp.mean((model(x) - x) ** 2)

    make = lambda: zerojax.nnx.quantize(*nnx_models.make(Net, nnx.LoRAParam))
    model, optimizer = zerojax.nnx.shard(make, stage=3)
    full = dequantize(zerojax.gather_params(zerojax.nnx.state(model, optimizer)))
    streamed = dict(zerojax.stream(zerojax.nnx.state(model, optimizer)))
    assert_equal_bits(streamed["up.kernel"], full["up"]["kernel"])
    step = zerojax.nnx.train_step(loss)
    assert model.up.kernel.get_raw_value().rows.addressable_shards[0].data.nbytes == DIM * 68 // 8
    value = step(model, optimizer, BATCH)["loss"]
    assert step(model, optimizer, BATCH)["loss"] < value
    assert step._structure.places is not None  # the objects are not split at each call
    nnx.update(model, full)
    assert_close(value, loss(model, BATCH))


class QArray(NamedTuple):
    """As libraries of quantization have it, and some users."""

    qvalue: Any
    scale: Any


def test_integers_of_others_rest_and_travel_as_they_are():
    codes = RNG.integers(-127, 127, (LAYERS, DIM, DIM), np.int8)
    params = {"w": QArray(codes, np.full((LAYERS, 1, DIM), 1e-3, "f")), "x": LORA}
    state = state_of(params, {"w": QArray(True, True), "x": {"a": False, "b": False}})

    def loss(params, x):
        def layer(x, p):
            w = p["w"].qvalue.astype(x.dtype) * p["w"].scale
            return jnp.tanh(x @ w + x @ p["x"]["a"] @ p["x"]["b"]), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    for stage, times in ((3, 2), (1, 0)):
        found = list(collectives(traced(loss, state, stage=stage)))
        assert sum(c.moved for c in found if c.dtype == "int8") == times * codes.size
    placed = zerojax.shard_train_state(state, stage=3)
    assert_close(zerojax.eval_step(loss)(placed, BATCH)["loss"], loss(params, BATCH))


# -- refusals


def test_what_the_optimizer_updates_is_not_put_into_codes():
    trained = train_state(PARAMS, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"got a function\. Call it in the function that you pass"):
        zerojax.quantize(lambda: trained)
    with pytest.raises(ValueError, match=r"found no frozen matrix in the state\. Pass where="):
        zerojax.quantize(trained)
    with pytest.raises(ValueError, match=r"params/base/w is stored in nf4.*Freeze it, as in optax"):
        zerojax.plan(zerojax.quantize(trained, where="base/w"), stage=3)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"where": ""}, "where= has the path pattern '', which is empty or has an empty altern"),
        ({"where": "kernel"}, "where= has the path pattern 'kernel', which matches no parameter"),
        ({"where": "lora/a"}, r"lora/a, float32\[3, 64, 4\].*Pass a narrower pattern"),
        ({"codes": "int3"}, "Pass one of 'nf4', 'int4', 'int8'"),
        ({"block": 16}, "must be an integer, 32 or more"),
    ],
)
def test_options_are_checked(options, remedy):
    with pytest.raises(ValueError, match=remedy):
        zerojax.quantize(state_of(), **options)


def test_a_placed_state_is_refused():
    placed = zerojax.shard_train_state(state_of(), stage=3)
    with pytest.raises(ValueError, match=r"Call it first: zerojax\.shard_train_state"):
        zerojax.quantize(placed)


def test_a_model_called_on_codes_says_how_to_decode_them():
    packed, x = zerojax.quantize(state_of()).params["base"]["w"], jnp.ones((2, DIM))
    says = r"float32\[3, 64, 64\] is stored in nf4.*zerojax\.manual\.dequantize\(params\)"
    for call in (
        lambda: x @ packed,
        lambda: jnp.dot(x, packed),
        lambda: jax.jit(lambda x: x @ packed)(x),
        lambda: packed[0],
        lambda: packed * 2,
        lambda: np.asarray(packed),
        lambda: jnp.asarray(packed, jnp.bfloat16),
    ):
        with pytest.raises(TypeError, match=says):
            call()
    model, _ = zerojax.nnx.quantize(*nnx_models.make(Net, nnx.LoRAParam))
    with pytest.raises(TypeError, match=r"zerojax\.nnx\.merge\(s, zerojax\.manual\.dequantize\("):
        model(jnp.ones((8, DIM)))


def test_a_restore_of_codes_as_weights_says_so(tmp_path):
    """And the other way round."""
    codes, weights = zerojax.quantize(state_of()), state_of()
    zerojax.save(tmp_path / "codes", zerojax.shard_train_state(codes, stage=3))
    zerojax.save(tmp_path / "weights", zerojax.shard_train_state(weights, stage=3))
    says = "are quantized on one side only.*zerojax.quantize.*dequantize"
    for path, like in (("codes", weights), ("weights", codes)):
        with pytest.raises(ValueError, match=says) as raised:
            zerojax.restore(tmp_path / path, like=zerojax.plan(like, stage=1))
        assert "another model" not in str(raised.value)
