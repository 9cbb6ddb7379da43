"""Fields in `mutable=`: integers, keys, means and queues that a loss updates."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax

import zerojax
from tests.conftest import is_here, make_mesh
from tests.support import draw

W = {"w": draw.normal(0, 16, 8) / 4}
X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
BIG = 2**24  # the first integer whose successor float32 does not hold


class State(TrainState):
    c: Any = None


def placed(c, **options):
    make = lambda: State.create(apply_fn=None, params=W, tx=optax.sgd(0.1), c=c)
    return zerojax.shard_train_state(make, **options)


def errors(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def updating(new):
    return lambda params, x, c: (errors(params, x), {"c": new(params, x, c)})


def exact_fields():
    return {
        "tokens": jnp.int32(BIG),
        "large": jnp.uint32(2**32 - 100),
        "small": jnp.int8(-5),
        "flag": jnp.array([True, False]),
        "raw": jax.random.PRNGKey(123456789),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8), 3),
        "mean": jnp.float32(0),
    }


@jax.jit
def moved_on(c):
    return {
        "tokens": c["tokens"] + 1,
        "large": c["large"] + 3,
        "small": c["small"] - 1,
        "flag": ~c["flag"],
        "raw": jax.random.split(c["raw"])[0],
        "key": jax.random.split(c["key"])[0],
        "keys": jax.vmap(lambda key: jax.random.fold_in(key, 1))(c["keys"]),
    }


def bits(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def assert_same_everywhere(actual, wanted):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        for shard in bits(a).addressable_shards:
            np.testing.assert_array_equal(shard.data, bits(b))


@pytest.mark.parametrize(("stage", "accumulate", "devices"), [(0, 1, 4), (3, 2, 6)])
def test_integers_booleans_and_keys_are_those_of_one_device(stage, accumulate, devices):
    new = lambda params, x, c: {**moved_on(c), "mean": c["mean"] + x.mean()}
    step = zerojax.train_step(updating(new), mutable="c", accumulate=accumulate)
    state = placed(exact_fields(), stage=stage, mesh=make_mesh(devices))
    wanted, x = exact_fields(), np.resize(X, (devices * accumulate, 16))
    for _ in range(3):
        state, _ = step(state, x)
        wanted = moved_on(wanted) | {"mean": wanted["mean"] + x.mean()}
    mean = wanted.pop("mean")
    assert float(state.c["mean"]) == pytest.approx(float(mean), rel=1e-5)
    assert_same_everywhere({k: v for k, v in state.c.items() if k != "mean"}, wanted)
    report = zerojax.verify(step, state, x)
    assert report.ok, str(report)


def test_steps_that_are_left_out_keep_integers_and_keys():
    loss = updating(lambda params, x, c: moved_on(c) | {"mean": x.mean()})
    step = zerojax.train_step(loss, mutable="c", skip_nonfinite=True)
    state, metrics = step(placed(exact_fields(), mesh=make_mesh(2)), np.where(X > 1, np.nan, X))
    assert int(metrics["skipped"]) == 1
    assert_same_everywhere(state.c, exact_fields())


def test_where_devices_disagree_the_first_one_decides_for_all():
    new = lambda params, x, c: {
        "count": c["count"] + x[0, 0].astype(jnp.int32),
        "key": jax.random.fold_in(c["key"], x[0, 0]),
    }
    step = zerojax.train_step(updating(new), mutable="c", accumulate=2)
    x = np.arange(16.0, dtype=np.float32)[:, None] + np.ones(16, np.float32)
    c = {"count": jnp.int32(BIG), "key": jax.random.key(1)}
    state, _ = step(placed(c), x)
    first = {"count": jnp.int32(BIG + 1), "key": jax.random.fold_in(c["key"], 1)}
    assert_same_everywhere(state.c, first)
    report = zerojax.verify(step, placed(c), x)
    wrong = {"c/count on every part", "c/key on every part"}
    assert {check.path for check in report.wrong} >= wrong
    message = (
        r"parts of the batch disagree on c/count \(16777217, 16777218, .*\), c/key \(.*of the "
        r"first part. Make it from values that all devices share: .* jax.lax.psum\(x, 'data'\)"
    )
    with pytest.raises(AssertionError, match=message):
        report.check()
    assert len(report.causes) == 1


def test_what_is_none_stays_and_evaluation_may_return_a_key():
    loss = updating(lambda params, x, c: {"n": c["n"] + 1, "key": None})
    c = {"n": jnp.int32(0), "key": jax.random.key(5)}
    state, _ = zerojax.train_step(loss, mutable="c")(placed(c, mesh=make_mesh(2)), X)
    assert_same_everywhere(state.c, c | {"n": jnp.int32(1)})
    returned = updating(lambda params, x, c: c)
    assert_same_everywhere(zerojax.eval_step(returned, mutable="c")(state, X)["aux"]["c"], state.c)


# -- what belongs to a part of the batch

QUEUE = {"queue": jnp.zeros((32, 8)), "at": jnp.int32(0)}


def enqueued(gather):
    def new(params, x, c):
        keys = gather(lax.stop_gradient(x @ params["w"]))
        queue = lax.dynamic_update_slice(c["queue"], keys, (c["at"], 0))
        return {"queue": queue, "at": (c["at"] + len(keys)) % len(queue)}

    return updating(new)


def test_a_queue_that_gathers_is_that_of_one_device():
    gathering = enqueued(lambda x: lax.all_gather(x, "data", tiled=True))
    step = zerojax.train_step(gathering, mutable="c")
    state = placed(QUEUE, mesh=make_mesh(4))
    report = zerojax.verify(step, state, X)
    assert report.ok and not report.notes, str(report)
    state, _ = step(state, X)
    wanted = enqueued(lambda x: x)(W, X, QUEUE)[1]["c"]
    np.testing.assert_allclose(state.c["queue"], wanted["queue"], atol=1e-6)
    assert int(state.c["at"]) == int(wanted["at"]) == 16


def test_verify_tells_what_counts_a_part_alone():
    step = zerojax.train_step(enqueued(lambda x: x), mutable="c")
    report = zerojax.verify(step, placed(QUEUE), X)
    assert [check.path for check in report.wrong] == ["c/at on the whole batch"]
    assert "make different numbers of c/at (2 and 16), in mutable=. Count over" in report.causes[0]
    assert "parts of the batch update c/queue, in mutable=, and a step keeps" in report.notes[0]
    assert "jax.lax.all_gather(x, 'data', tiled=True)" in report.notes[0]
    assert zerojax.verify(step, placed(QUEUE), X, whole_batch=False).ok


@pytest.mark.parametrize(
    ("total", "accumulate", "message"),
    [
        (lambda x: x, 1, r"numbers of c/total \(101.\d+ and 109.\d+\), .*psum\(x, 'data'\), or"),
        (lambda x: lax.psum(x, "data"), 1, None),
        (lambda x: lax.psum(x, "data"), 2, r"psum\(x, 'data'\), times 2, or accept"),
    ],
)
def test_verify_tells_a_sum_of_floats_whose_mean_a_step_keeps(total, accumulate, message):
    new = lambda params, x, c: {"total": c["total"] + total(jnp.abs(x).sum(0))}
    step = zerojax.train_step(updating(new), mutable="c", accumulate=accumulate)
    report = zerojax.verify(step, placed({"total": 100 * jnp.ones(16)}), X)
    wrong = ["c/total on the whole batch"] if message else []
    assert [check.path for check in report.wrong] == wrong, str(report)
    assert not message or re.search(message, report.causes[0]), report.causes[0]
    assert len(report.causes) == len(wrong)


def test_a_field_returned_without_mutable_is_warned_of_and_metrics_are_not():
    """As Flax's BatchNorm trains where its loss closes over the state's statistics."""
    state = placed({"mean": jnp.zeros(8)}, mesh=make_mesh(2))

    def traced(**aux):
        zerojax.train_step(lambda params, x: (errors(params, x), aux)).trace(state, X)

    with pytest.warns(UserWarning, match=r"'c' in aux.*With mutable=\('c',\) the step") as seen:
        traced(c={"mean": jnp.ones(8)})
    assert is_here(seen[0], __file__)
    # Warnings are errors here.
    traced(c=jnp.zeros(3), d=jnp.zeros(8), step=jnp.int32(1), replace=jnp.float32(1))
