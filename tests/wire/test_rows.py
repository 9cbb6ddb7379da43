"""Tables whose rows travel: values, gradients, what is sent instead of them, and when not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import zerojax
from tests import draw
from tests.collectives import collectives
from tests.conftest import make_mesh
from tests.reference import assert_close

VOCAB, DIM, READ = 512, 32, 16  # READ: rows that a device reads
EVERY = 8 * READ
AXES = ("node", "gpu")
NODES = Mesh(np.array(jax.devices()).reshape(2, 4), AXES, axis_types=(AxisType.Auto,) * 2)


def far_off(t):
    """Indices beyond either end, and repeated ones."""
    return jnp.where(t % 7 == 0, t + VOCAB, jnp.where(t % 5 == 0, -VOCAB - 1 - t, t % 11))


READS = {
    "repeated": lambda table, t: table[t % 3],
    "taken": lambda table, t: jnp.nan_to_num(jnp.take(table, far_off(t), axis=0), nan=3.0),
    "clipped": lambda table, t: jnp.take(table, far_off(t), axis=0, mode="clip"),
    "wrapped": lambda table, t: jnp.take(table, far_off(t), axis=0, mode="wrap"),
    "filled": lambda table, t: table.at[far_off(t)].get(mode="fill", fill_value=2.0),
    "negative": lambda table, t: table[t - VOCAB],
    "by_two": lambda table, t: table[t.reshape(-1, 2)],
    "sorted": lambda table, t: table.at[jnp.sort(t)].get(indices_are_sorted=True),
    "matrices": lambda table, t: table[t],
    "padded": lambda table, t: jnp.take(table, 2 * t, axis=0, mode="clip"),
    "by_columns": lambda table, t: table[t],
    "narrow": lambda table, t: table.astype("bfloat16")[t].astype("float32"),
    "narrow_on_its_way": lambda table, t: table.astype("bfloat16").astype("float32")[t],
}
SHAPES = {"matrices": (VOCAB, 4, 8), "padded": (VOCAB - 3, DIM), "by_columns": (VOCAB - 1, DIM)}
PARAMS = {n: draw.normal(seed, *SHAPES.get(n, (VOCAB, DIM))) for seed, n in enumerate(READS)}
SIZES = {VOCAB * DIM, *(np.prod(shape) for shape in SHAPES.values())}
TOKENS = draw.integers(1, VOCAB - 4, EVERY)


def loss(params, t):
    """Each of its tables is read in its own way."""
    weights = jnp.arange(1.0, DIM + 1)
    looked_up = [jnp.sin(READS[name](table, t)) for name, table in params.items()]
    return sum(jnp.mean((rows.reshape(-1, DIM) @ weights) ** 2) for rows in looked_up)


def planned(params, **options):
    mesh = NODES if "groups" in options else make_mesh()
    by_rows = {"padded": P("data", None)} if "padded" in params and "stage" in options else {}
    return zerojax.plan({"params": params}, mesh=mesh, overrides=by_rows, **options)


def placed(plan, params):
    return plan.place({"params": params})["params"]


def sent(function, *args):
    """What is sent, but for scalars: kinds, dtypes and elements."""
    every = collectives(jax.make_jaxpr(function)(*args))
    return [(c.kind, c.dtype, c.elements) for c in every if c.elements > 1]


BOTH = ("gpu", "node")
HSDP = dict.fromkeys(("params", "grads", "opt_state"), ("gpu",))
ALL = dict.fromkeys(HSDP, BOTH)
WAYS = {
    "stage 3": ({"stage": 3}, {}),
    "stage 1": ({"stage": 1}, {}),
    "two hops": ({"groups": ALL}, {"regather": "gpu"}),
    "gradients in two hops": ({"groups": HSDP | {"params": (), "opt_state": BOTH}}, {}),
    "weights in nodes": ({"groups": ALL | {"params": ("gpu",)}}, {}),
    "microbatches": ({"groups": HSDP | {"opt_state": BOTH}}, {"accumulate": 2}),
}
SOME = ("taken", "matrices")  # read in a way that is not the plainest


@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_one_device(way):
    options, how = WAYS[way]
    tables = PARAMS if way == "stage 3" else {name: PARAMS[name] for name in SOME}
    plan = planned(tables, **options)
    grad, params = zerojax.value_and_grad(loss, plan, **how), placed(plan, tables)
    value, grads = jax.jit(grad)(params, TOKENS)
    wanted_value, wanted = jax.jit(jax.value_and_grad(loss))(tables, TOKENS)
    assert float(value) == pytest.approx(float(wanted_value), rel=1e-3)
    for name, each in wanted.items():
        assert_close(grads[name][: len(each)], each, 1e-2 if "narrow" in name else 1e-5, name)
        assert not grads[name][len(each) :].any()  # the padding
    # No table travels, nor its gradient.
    moved = sent(grad, params, TOKENS)
    whole = [c for c in moved if c[0] != "all-to-all" and c[1] != "int32" and c[2] in SIZES]
    assert whole == [] and [c for c in moved if c[0] == "all-to-all"]


def read_once(shape=(VOCAB, DIM), read=lambda table, t: table[t], **options):
    """Returns a function that reads one table, and its arguments."""
    params = {"table": jnp.ones(shape)}
    plan = planned(params, **options)
    loss = lambda p, t: jnp.mean(read(p["table"], t) ** 2)
    return zerojax.value_and_grad(loss, plan), placed(plan, params), TOKENS


def test_what_is_sent_instead_of_a_table():
    """A shard for columns, indices, and rows; then rows and a shard again."""
    shard, own = VOCAB * DIM // 8, READ * DIM
    forward = [("all-gather", "int32", EVERY), ("all-to-all", "float32", shard)]
    ways = [("all-to-all", "float32", own), ("all-to-all", "float32", own)]
    back = [("all-to-all", "float32", shard)]
    assert sent(*read_once()) == [*forward, *ways, *back]
    by_columns = sent(*read_once(shape=(VOCAB - 1, DIM)))
    assert by_columns == [forward[0], *ways]  # a device's shard is its columns
    whole = sent(*read_once(stage=2))
    assert whole == [forward[0], *ways[1:], *back]  # and so it is where the table rests whole


def test_rows_travel_in_the_dtype_they_are_used_in_and_sums_in_that_for_sums():
    dtypes = lambda precision: [c[1] for c in sent(*read_once(precision=precision))]
    narrow = dtypes(zerojax.Precision(compute="bfloat16"))
    assert narrow == ["int32", "bfloat16", "bfloat16", "bfloat16", "bfloat16"]
    exact = dtypes(zerojax.Precision(compute="bfloat16", reduce="float32"))
    assert exact == ["int32", "bfloat16", "bfloat16", "bfloat16", "float32"]
    less = dtypes(zerojax.Precision(reduce="bfloat16"))
    assert less == ["int32", "float32", "float32", "bfloat16", "bfloat16"]
    codes = dtypes(zerojax.Precision(compute="bfloat16", gather="int8", reduce="int8"))
    assert codes == narrow


def test_gradients_of_frequent_tokens_are_summed_exactly():
    """One row is read 4096 times: in bfloat16, its gradient would stay at 256 of the addends."""
    params = {"table": jnp.ones((2**14, DIM))}
    plan = planned(params, precision=zerojax.Precision(compute="bfloat16"))
    grad = zerojax.value_and_grad(lambda p, t: jnp.mean(jnp.sum(p["table"][t], axis=1)), plan)
    _, grads = jax.jit(grad)(placed(plan, params), jnp.full(4096, 3))
    np.testing.assert_array_equal(grads["table"][:5], np.eye(5, 1, -3) * np.ones(DIM))


# -- where the table is gathered all the same

NOT_ROWS = {
    "another use": lambda table, t: table[t] @ table.T,
    "a use of another dtype": lambda table, t: table[t] @ table.astype("bfloat16").T,
    "parts of rows": lambda table, t: table[t, 4:],
    "columns": lambda table, t: table[:, t % DIM].T,
    "most rows": lambda table, t: table[jnp.concatenate([t] * 16)],
    "several times": lambda table, t: table[t] + table[t + 1] + table[t + 2],
    "in a loop": lambda table, t: jax.lax.map(lambda i: table[i], t.reshape(2, -1)),
    "under a checkpoint": lambda table, t: jax.checkpoint(lambda table: jnp.sin(table[t]))(table),
    "one-hot": lambda table, t: jax.nn.one_hot(t, VOCAB) @ table,
    "a table of few rows": lambda table, t: table[:32][t % 32],
}


@pytest.mark.parametrize("name", NOT_ROWS)
def test_is_gathered_once_for(name):
    function, *args = read_once(read=NOT_ROWS[name])
    moved = sent(function, *args)
    assert "all-to-all" not in {c[0] for c in moved}
    times = 2 if "dtype" in name else 1  # each dtype is gathered by itself
    assert [c[2] for c in moved if c[0] == "reduce-scatter"] == [VOCAB * DIM] * times


def test_rows_are_read_twice_where_that_pays_and_not_where_columns_do_not_divide():
    moved = sent(*read_once((4 * VOCAB, DIM), lambda table, t: table[t] * table[t + 1]))
    assert [c[0] for c in moved].count("all-to-all") == 8
    moved = sent(*read_once(shape=(VOCAB, DIM + 1)))
    assert {c[0] for c in moved} == {"all-gather", "reduce-scatter"}


def layered_loss(params, t):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["table"][t], params["layers"])
    return jnp.mean(x**2)


def test_beside_loops_and_where_microbatches_run_layer_by_layer():
    params = {
        "table": jax.random.normal(jax.random.key(3), (VOCAB, DIM)),
        "layers": jax.random.normal(jax.random.key(4), (3, DIM, DIM)) / 6,
    }
    plan = planned(params)
    wanted = jax.grad(layered_loss)(params, TOKENS)
    for order, exchanges in (("microbatches", 4), ("layers", 0)):
        options = {"accumulate": 2, "order": order, "prefetch": 1}
        grad = zerojax.value_and_grad(layered_loss, plan, **options)
        assert_close(jax.jit(grad)(placed(plan, params), TOKENS)[1], wanted, 1e-5)
        # All microbatches of a layer share the table that they are mapped over.
        kinds = [c[0] for c in sent(grad, placed(plan, params), TOKENS)]
        assert kinds.count("all-to-all") == exchanges
