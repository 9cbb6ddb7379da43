"""On CPU devices, a collective that needs nothing of a loop of collectives may run in its midst.
`tests/test_steps.py` looks at the steps of the table."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support.collectives import unordered
from tests.support.processes import python
from tests.support.reference import train_state
from tests.support.schedules import train_step
from zerojax import _fence as fence

LAYERS, DIM = 4, 64


def gathers_after_a_loop(wait):
    """The fault in plain JAX. With 512 rows a device it ends the process within 16 steps."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    gather = lambda shard: lax.all_gather(shard, "d", axis=0, tiled=True)

    def run(stack, shards, x):
        layer = lambda x, shard: (jnp.tanh(x @ gather(shard)), None)
        y, _ = lax.scan(layer, x, stack)
        shards, y = wait(shards, y)
        return y, list(map(gather, shards))

    specs = (P(None, "d"), P("d"), P("d"))
    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=(P("d"), P()), check_vma=False
    )
    shards = [np.ones(128 * i, "f") for i in range(8, 0, -1)]
    args = np.ones((LAYERS, DIM, DIM), "f"), shards, np.ones((64, DIM), "f")
    return unordered(zerojax.audit(jax.jit(sharded).lower(*args).compile()).module)


def test_the_fence_orders_them_and_a_barrier_does_not():
    """Where a barrier does, XLA:CPU may have been mended, and the fence may go in time."""
    loops, left = gathers_after_a_loop(lambda shards, y: lax.optimization_barrier((shards, y)))
    assert loops and len(left) == 8
    wait = lambda shards, y: (fence.wait(shards, fence.mark([y])), y)
    assert gathers_after_a_loop(wait) == (1, [])


TRAINS = """
import jax, jax.numpy as jnp, numpy as np, optax, zerojax
from flax.training.train_state import TrainState

def loss(params, x):
    def layer(h, w):
        h = h + jax.nn.softmax(h @ w["q"] @ h.swapaxes(-1, -2)) @ h @ w["o"]
        return h + jnp.tanh((h * w["scale"] + w["bias"]) @ w["up"]) @ w["down"], None
    h, _ = jax.lax.scan(jax.checkpoint(layer), params["in"][x[:, :-1]], params["layers"])
    logits = (h * params["scale"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, x[:, 1:]).mean()

def make():
    draw = lambda *shape: np.random.default_rng(0).normal(size=shape).astype("f") / 16
    layers = {"q": draw(4, 256, 256), "o": draw(4, 256, 256), "up": draw(4, 256, 1024)}
    layers |= {"down": draw(4, 1024, 256), "scale": draw(4, 256), "bias": draw(4, 256)}
    ends = {"in": draw(512, 256), "out": draw(256, 512), "scale": draw(256)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return TrainState.create(apply_fn=None, params=ends | {"layers": layers}, tx=tx)

state, step = zerojax.shard_train_state(make, stage=3), zerojax.train_step(loss)
for _ in range(25):
    state, metrics = step(state, np.ones((32, 17), "int32"))
    loss = float(metrics["loss"])
print(loss)
"""


@pytest.mark.ci
def test_a_step_that_jax_loads_from_its_cache_runs_in_order(tmp_path):
    """XLA:CPU forgets there that loops have collectives. The process ended in most second runs."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    flags |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    runs = [python(TRAINS, **flags) for _ in range(3)]
    assert [code for code, *_ in runs] == [0, 0, 0], runs[-1][2]
    assert len({printed for _, printed, _ in runs}) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_what_waits_is_unchanged(dtype):
    values = {"w": np.arange(6).reshape(2, 3).astype(dtype), "key": jax.random.key(3)}
    waited = jax.jit(lambda v, outs: fence.wait(v, fence.mark(outs)))
    got = waited(values, [np.asarray(3, dtype), np.float32("nan"), np.float32("-inf")])
    np.testing.assert_array_equal(got["w"], values["w"])
    assert (jax.random.key_data(got["key"]) == jax.random.key_data(values["key"])).all()


def of_scans(x, many):
    carried, rows = lax.scan(lambda total, row: (total + lax.psum(row, "d"), total), x[0], x)
    return carried, rows, lax.scan(lambda none, row: (none, lax.psum(row, "d")), (), many)[1]


def of_branches(x, many):
    is_more, sums = lax.psum(x.sum(), "d") > 0, lambda x: lax.psum(x, "d")
    inner = lambda x: lax.cond(x.sum() > 1, sums, jnp.sin, x) + lax.psum(x, "d")
    return lax.cond(is_more, inner, jnp.cos, x), lax.cond(x.sum() > 2, sums, jnp.sin, many)


def of_whiles(x, many):
    turn = lambda carry: (carry[0] + 1, carry[1] / lax.psum(jnp.abs(carry[1]), "d"))
    run = lambda x: lax.while_loop(lambda carry: carry[0] < 3, turn, (0, lax.stop_gradient(x)))
    return jnp.sin(x) * run(x)[1], run(many)[1]


def of_calls(x, many):
    called = jax.jit(lambda x: of_scans(x, x)[0])
    return jax.checkpoint(lambda x: of_branches(x, x)[0])(x), called(many)


def of_keys(x, many):
    turn = lambda key, _: (jax.random.fold_in(key, lax.psum(jnp.int32(1), "d")), None)

    def drawn(x):
        key = jax.random.fold_in(jax.random.key(0), lax.stop_gradient(x[0, 0]).astype(int))
        return jax.random.uniform(lax.scan(turn, key, None, 3)[0])

    return drawn(x), drawn(many)


def of_truths(x, many):
    turn = lambda truth, row: (truth & (lax.psum(row.sum(), "d") > 3), None)
    truth = lambda x: lax.scan(turn, jnp.array(True), x)[0].astype("f")
    return truth(lax.stop_gradient(x)), truth(many)


def of_complex(x, many):
    turn = lambda total, row: (total + lax.psum(lax.complex(row, row), "d"), None)
    total = lambda x: lax.scan(turn, jnp.zeros(x.shape[1], "complex64"), x)[0]
    return jnp.abs(total(x)), jnp.abs(total(many))


def of_constants(x, many):
    turn = lambda total, row: (total + lax.psum(row, "d"), None)
    total = lambda x: lax.scan(turn, jnp.zeros(x.shape[1]), x)[0]
    return total(x), total(many)


def of_four_bits(x, many):
    turn = lambda total, row: (total + lax.psum(row, "d").astype("int4"), None)
    total = lambda x: lax.scan(turn, (x[0] > 3).astype("int4"), lax.stop_gradient(x))[0].astype("f")
    return total(x), total(many)


ALL = [of_scans, of_branches, of_whiles, of_calls, of_keys, of_truths, of_complex, of_constants]


@pytest.mark.parametrize("loops", [*ALL, of_four_bits])
def test_loops_and_branches_run_in_order(loops):
    def code(x, many):
        loss = lambda x: sum(jnp.sum(out) for out in jax.tree.leaves(loops(x, many)))
        return jax.value_and_grad(loss)(x), lax.all_gather(many, "d"), lax.psum(x, "d")

    def compiled(code):
        code = lambda x, many, code=code: jax.tree.map(lambda x: x[None], code(x, many))
        mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = {"in_specs": P("d"), "out_specs": P("d"), "check_vma": False}
        return jax.jit(jax.shard_map(code, mesh=mesh, **specs)).lower(*args).compile()

    args = jnp.arange(48.0).reshape(16, 3), jnp.ones((32, 4))
    run, (count, left) = fence.in_order(code), unordered(zerojax.audit(compiled(code)).module)
    kept, free = unordered(zerojax.audit(compiled(run)).module)
    assert left and free == [] and kept >= count
    parts = [x.reshape(8, -1, x.shape[1]) for x in args]
    wanted = jax.jit(jax.vmap(code, axis_name="d"))(*parts)
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(compare, compiled(run)(*args), wanted)


def translated(params, batch):
    """Each of two loops has a table of its own; the gradient of the second needs no first loop."""
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    x, _ = lax.scan(layer, params["source"][batch["source"]], params["encoder"])
    y = params["target"][batch["target"]] + jnp.mean(x)
    y, _ = lax.scan(layer, y, params["decoder"])
    return jnp.mean(y * params["labels"][batch["target"]])


@pytest.mark.parametrize(("stage", "accumulate"), [(2, 2), (3, 1)])
def test_tables_are_gathered_and_reduced_between_loops(stage, accumulate):
    tables = {name: np.ones((1024, DIM), "f") for name in ("source", "target", "labels")}
    loops = {name: np.ones((LAYERS, DIM, DIM), "f") for name in ("encoder", "decoder")}
    state = train_state(tables | loops, optax.sgd(0.1))
    plan = zerojax.plan(state, stage=stage)
    step = zerojax.train_step(translated, accumulate=accumulate)
    batch = jax.ShapeDtypeStruct((64,), "int32")
    report = zerojax.audit(step, plan.abstract(), {"source": batch, "target": batch})
    assert unordered(report.module)[1] == []


def balanced(params, x):
    """Each layer adds to a sum, whose gradient passes through the loops unchanged."""
    turn = lambda c, w: ((c[0] + jnp.tanh(c[0] @ w), c[1] + jnp.mean(c[0] ** 2)), None)
    x, balance = jnp.tanh(x @ params["in"]), 0.0
    for name in ("one", "other"):
        (x, balance), _ = lax.scan(turn, (x, balance + 0.0), params[name])
    return jnp.mean((x @ params["head"]) ** 2) + balance


@pytest.mark.parametrize(("stage", "layers"), [(3, (5, 3)), (1, (5, 1)), (3, (1, 5))])
def test_loops_of_sums_and_of_one_turn_are_in_order(stage, layers):
    one, other = (np.ones((n, DIM, DIM)) for n in layers)
    params = {"in": np.ones((DIM, DIM)), "one": one, "other": other, "head": np.ones((DIM, 512))}
    plan = zerojax.plan(train_state(params, optax.sgd(0.1)), stage=stage, min_shard_size=0)
    batch = jax.ShapeDtypeStruct((16, DIM), "float32")
    report = zerojax.audit(zerojax.train_step(balanced), plan.abstract(), batch)
    count, free = unordered(report.module)
    assert count and free == []


@pytest.mark.parametrize("stage", [2, 3])
def test_loops_of_means_over_the_batch_are_in_order(stage):
    def loss(params, x):
        turn = lambda h, row: (jnp.tanh(h @ params["w"] + zerojax.mean(row)), None)
        h, _ = lax.scan(turn, x, jnp.stack([x, 2 * x]))
        return jnp.mean(h @ params["head"]) + jnp.mean(jnp.sin(x @ params["other"]))

    params = {"w": np.ones((DIM, DIM)), "head": np.ones((DIM, 512)), "other": np.ones((DIM, 700))}
    plan = zerojax.plan(train_state(params, optax.sgd(0.1)), stage=stage, min_shard_size=0)
    batch = jax.ShapeDtypeStruct((16, DIM), "float32")
    report = zerojax.audit(zerojax.train_step(loss), plan.abstract(), batch)
    assert unordered(report.module) == (1, [])


@pytest.mark.parametrize("turns", [2, 1])
def test_loops_in_order_keep_their_scopes(turns):
    def loss(params, x):
        turn = lambda h, row: (jnp.tanh(h @ params["w"] + zerojax.mean(row)), None)
        with jax.named_scope("mixer"):
            h = jax.checkpoint(lambda x: lax.scan(turn, x, jnp.stack([x] * turns))[0])(x)
        return jnp.mean(h**2)

    plan = zerojax.plan(train_state({"w": np.ones((DIM, DIM))}, optax.sgd(0.1)), min_shard_size=0)
    batch = jax.ShapeDtypeStruct((16, DIM), "float32")
    report = zerojax.audit(zerojax.train_step(loss), plan.abstract(), batch)
    scopes = [t.scope for t in report.traffic if "zerojax_sum" in t.scope]
    assert len(scopes) >= turns
    assert all(re.search("mixer[^:]*zerojax_sum", scope) for scope in scopes), scopes


def loss(params, batch):
    x = jnp.tanh(batch @ params["inner"])
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    return jnp.mean((x * params["norm"]) @ params["head"])


@pytest.mark.gpu_code
@pytest.mark.parametrize("layers", [2, 4])
def test_backward_gathers_again_on_gpus(layers):
    """A loop that prefetches orders its gathers by itself, a short one too."""

    def make():
        params = {"stack": jnp.ones((layers, DIM, DIM)), "norm": jnp.ones(DIM)}
        params |= dict.fromkeys(("inner", "head"), jnp.ones((DIM, DIM)))
        return train_state(params, optax.sgd(0.1))

    plan = zerojax.plan(make, mesh=zerojax.aot.mesh("8xH100"), min_shard_size=0)
    step = train_step(loss, plan=plan, prefetch=1)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((64, DIM), "float32"), plan)
    traffic = zerojax.audit(step, plan.abstract(), batch).traffic
    gathered = sum(t.wire_bytes * t.trips for t in traffic if t.kind == "all-gather")
    # Forward gathers all of them, backward the stack again but for its last layer, and what the
    # end of the loss read last is kept.
    wanted = (2 + 2 * layers - 1) * DIM * DIM
    assert gathered == pytest.approx(wanted * 4 * 7 / 8, rel=0.03)


def test_a_narrow_gradient_of_a_head_waits_for_the_loop_before_it():
    """XLA:CPU reduces it in float32, and would do so last, in the midst of the loop."""

    def layer(x, w):
        return x + jnp.tanh(x * w["scale"] @ w["up"]) @ w["down"], None

    def loss(params, tokens):
        x, _ = lax.scan(jax.checkpoint(layer), params["embed"][tokens[:, :-1]], params["layers"])

        def losses(read):
            x, label = read
            logits = (x @ params["head"] + params["bias"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, label)

        rows = x.reshape(-1, x.shape[-1]), tokens[:, 1:].reshape(-1)
        return jnp.mean(lax.map(jax.checkpoint(losses), rows, batch_size=16))

    layers = {"up": np.ones((3, 72, 200), "f"), "down": np.ones((3, 200, 72), "f")}
    params = {"embed": np.ones((65, 72), "f"), "layers": layers | {"scale": np.ones((3, 72), "f")}}
    params |= {"head": np.ones((72, 65), "f"), "bias": np.ones(65, "f")}
    state = train_state(params, optax.adamw(1e-2))
    narrow = {"compute": "bfloat16", "param": "bfloat16", "master": "split", "moments": "int8"}
    plan = zerojax.plan(state, stage=3, precision=zerojax.Precision(**narrow))
    batch = jax.ShapeDtypeStruct((32, 17), "int32")
    report = zerojax.audit(zerojax.train_step(loss), plan.abstract(), batch)
    assert unordered(report.module) == (2, [])
