"""Causes of a difference: each mistake is named with its remedy, and the remedies pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zerojax
from tests.verify.steps import (
    MASKED,
    ROWS,
    W,
    X,
    check_by_hand,
    dropping,
    masked_loss,
    placed,
    squares,
    verified,
)

WHOLE = ["loss on the whole batch"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dropped", r"hold the same \S+ and 2 more hold different .*before the update.*pmean"),
        ("loss", r"step's loss is only that of the first device's part. Take the mean"),
        ("sum", r"gradients are 2 times too large: a sum over the devices. Take the mean"),
        ("twice", r"no gradients, so two causes are left.*not that of tx.*return the gradients"),
    ],
)
def test_faults_of_steps_of_ones_own_are_named(fault, message):
    report = check_by_hand(fault)
    assert not report.ok
    with pytest.raises(AssertionError, match=message):
        report.check()
    wrong = {check.path for check in report.wrong}
    assert ("loss" in wrong) == (fault != "twice")
    assert any(path.startswith(("params", "opt_state")) for path in wrong) == (fault != "loss")
    differ = {c.path for c in report.checks if c.copies_differ}
    assert differ >= ({"loss", "params/w"} if fault == "dropped" else set())
    assert report.checks[0].verdict == "wrong" and report.checks[0].excess > 2


def test_an_unfolded_key_is_named():
    report = check_by_hand("unfolded", loss=dropping, rng=jax.random.key(7))
    says = "loss and gradients are those of one key, the same on every device. Fold it: jax.random"
    assert says in report.causes[0] and len(report.causes) == 1


def test_an_optimizer_on_local_shards_is_named():
    """On five devices the shards are padded."""
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3))
    report = check_by_hand(tx=tx, stage=3, devices=5)
    assert {check.kind for check in report.wrong} == {"opt_state", "params"}
    assert "an update that is not that of tx or sees only shards" in report.causes[0]
    assert "outside of shard_map" in report.causes[0]


# -- losses that mean something else on a part of the batch


def contrastive(params, batch, gather=lambda x: x, first=lambda: 0):
    mine, others = batch["x"] @ params["w"], gather(batch["y"] @ params["w"])
    labels = jnp.arange(len(mine)) + first() * len(mine)
    return optax.softmax_cross_entropy_with_integer_labels(mine @ others.T, labels).mean()


def adapted(params, x, average=lambda grad: grad):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(params["w"])
    return squares({"w": params["w"] - average(grads)}, x).mean()


PAIRS = {"x": X, "y": np.roll(X, 3, 1)}


def summed(params, x):
    return squares(params, x).sum()


def equation(params, batch):
    """Of a physics-informed network: slopes at some points, and values at others."""
    slopes = jax.grad(lambda x: jnp.tanh(x @ params["w"]).mean())(batch["x"])
    return jnp.mean((99 * slopes) ** 2) + squares(params, batch["y"]).mean()


@jax.custom_vjp
def clipped(params, x):
    return squares(params, x).mean()


def clipped_forward(params, x):
    loss, grads = jax.value_and_grad(lambda params: squares(params, x).mean())(params)
    return loss, jax.tree.map(lambda g: g / jnp.linalg.norm(g), grads)


clipped.defvjp(clipped_forward, lambda grads, by: (jax.tree.map(lambda g: by * g, grads), None))


def policy(params, batch, mean=jnp.mean, unbiased=False):
    """PPO's loss, of an advantage that is normalised here, and of values."""
    ratio, gain = jnp.exp((batch["x"] @ params["w"]).mean(-1)), batch["gain"] - mean(batch["gain"])
    gain /= (gain.std(ddof=1) if unbiased else jnp.sqrt(mean(gain**2))) + 1e-8
    gains = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
    return ((batch["x"].sum(-1) - batch["values"]) ** 2).mean() - gains.mean()


def beside(params, batch, mean=jnp.mean):
    """A mean that is masked twice, once by zerojax."""
    return masked_loss(params, batch, zerojax.mean) + masked_loss(params, batch, mean)


def root(params, x, mean=jnp.mean):
    return jnp.sqrt(mean(squares(params, x)))


def with_entropy(params, batch, mean=jnp.mean):
    """Brax's PPO estimates an entropy from a key that the step does not see, which may weigh 0."""
    drawn = jax.random.normal(jax.random.key(7), batch["gain"].shape)
    return policy(params, batch, mean) + 0.0 * (batch["x"][:, 0] * drawn).mean()


def of_rows(loss):
    """A loss of rows that are normalised each by itself, as by LayerNorm."""
    norm = lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    return lambda params, batch: loss(params, batch | {"x": norm(batch["x"])})


GAINS = {"x": X, "values": X[:, 1], "gain": np.cumsum(X[:, 0]), "unread": X[:, 2]}
LATER = np.cumsum(X, 0)
NONE_LATER = {"x": X, "mask": np.arange(ROWS) < 13}


@pytest.mark.parametrize(
    ("loss", "batch", "message"),
    [
        (
            masked_loss,
            MASKED,
            r"\* Examples weigh .*, by a masked mean: use zerojax.mean\(values, w",
        ),
        (beside, MASKED, r"\* Examples weigh .*, by a masked mean: use zerojax.mean\(values, w"),
        (root, LATER, r"\* Examples weigh .* Or by a root, .*: take that mean with zerojax.mean"),
        (masked_loss, NONE_LATER, "loss of 1 of 2 parts is not finite: a mean.* zerojax.mean"),
        (summed, X, r"sum over the batch: .* is 2 times its.*Use a mean"),
        (contrastive, PAIRS, r"compares the examples.*all_gather\(x, 'data', tiled=True\)"),
        (adapted, X, r"takes a gradient itself.*jax.lax.pmean\(jax.grad\(...\)\(...\), 'data'\)"),
        (equation, PAIRS, r"to examples, take that of a sum, jnp.sum. Else each part needs"),
        (policy, GAINS, r"normalises batch leaf gain by its mean and deviation.* before the step"),
        (
            functools.partial(policy, unbiased=True),
            GAINS,
            r"^(?s:.)*\* The loss normalises batch leaf gain by its mean and deviation",
        ),
        (
            with_entropy,
            GAINS,
            r"key that the step does not see.* If that is not the cause: The loss normalises batch "
            r"leaf gain by.*zerojax\.mean\(x\)",
        ),
        (of_rows(masked_loss), MASKED, "by a masked mean: use zerojax.*Or by BatchNorm: give.*;"),
        (of_rows(contrastive), PAIRS, r"compares the examples.*all_gather\(x, 'data', tiled"),
    ],
)
def test_losses_that_mean_something_else_on_a_part_are_named(loss, batch, message):
    report = verified(loss, batch)
    assert [c.path for c in report.wrong] == WHOLE, str(report)
    with pytest.raises(AssertionError, match=message):
        report.check()
    whole = float(jax.jit(loss)(W, batch))
    assert report.losses["the whole batch at once"] == pytest.approx(whole, rel=1e-5)
    lost = ["The loss of 1 of 2 parts is not finite in the replay either; the rest is compared."]
    assert report.notes == lost * (batch is NONE_LATER)
    assert loss is not summed or verified(loss, batch, whole_batch=False).ok


@pytest.mark.parametrize(
    ("loss", "batch", "remedy"),
    [
        (adapted, X, {"average": lambda grad: lax.pmean(grad, "data")}),
        (beside, MASKED, {"mean": zerojax.mean}),
        (root, LATER, {"mean": zerojax.mean}),
        (policy, GAINS, {"mean": zerojax.mean}),
        (with_entropy, GAINS, {"mean": zerojax.mean}),
        (
            contrastive,
            PAIRS,
            {
                "gather": lambda x: lax.all_gather(x, "data", tiled=True),
                "first": lambda: lax.axis_index("data"),
            },
        ),
    ],
)
def test_their_remedies_pass(loss, batch, remedy):
    report = verified(functools.partial(loss, **remedy), batch)
    assert report.ok, str(report)
    assert report.losses["the step"] == pytest.approx(float(jax.jit(loss)(W, batch)), rel=1e-5)


@pytest.mark.parametrize("key", [(), (jax.random.key(0),)], ids=["", "key"])
def test_a_rule_that_clips_the_gradient_of_a_part_is_named(key):
    """Its loss is right on all parts."""
    loss = lambda params, x, *key: clipped(params, x)
    report = verified(loss, X, *key)
    assert [c.path for c in report.wrong] == ["grads on the whole batch/w"], str(report)
    assert "jax.custom_vjp" in report.causes[0] and "jax.vmap" in report.causes[0]
    rows = lambda params, x, *key: jax.vmap(clipped, (None, 0))(params, x[:, None]).mean()
    assert verified(rows, X, *key).ok and verified(loss, X, *key, whole_batch=False).ok


def balanced(mean, params, x):
    """Its value is 1 on any part; its gradient is that of the logarithm of a part's mean."""
    error = jnp.mean((x @ params["w"]) ** 2)
    return error / lax.stop_gradient(mean(error))


def diverse(dtype, mean, params, x):
    """A mean, and an entropy that is too small to be seen beside it."""
    y = x.astype(dtype) @ params["w"].astype(dtype)
    shares = mean(jax.nn.softmax(y).astype(jnp.float32).mean(0))
    return jnp.mean(y.astype(jnp.float32) ** 2) + 1e-3 * jnp.sum(shares * jnp.log(shares))


@pytest.mark.parametrize(
    "loss",
    [
        balanced,
        functools.partial(diverse, jnp.float32),
        functools.partial(diverse, jnp.bfloat16),
    ],
    ids=["balanced", "diverse", "of 16 bits"],
)
def test_a_gradient_that_differs_where_the_loss_does_not_is_named(loss):
    report = verified(functools.partial(loss, lambda x: x), X)
    assert [c.path for c in report.wrong] == ["grads on the whole batch/w"], str(report)
    assert "stop_gradient" in report.causes[0] and "jax.lax.pmean(x, 'data')" in report.causes[0]
    report = verified(functools.partial(loss, lambda x: lax.pmean(x, "data")), X)
    assert report.ok, str(report)


def test_a_rule_in_a_loss_that_rounds_to_16_bits_is_not_blamed():
    """The gradient of the bias is a sum over rows, in bfloat16."""
    rule = jax.custom_vjp(lambda y: y)
    rule.defvjp(lambda y: (y, None), lambda _, by: (by,))

    def loss(params, x):
        x, w, b = (v.astype(jnp.bfloat16) for v in (x, params["w"], params["b"]))
        return jnp.mean(((rule(x @ w + b) @ w.T).astype(jnp.float32) - 1) ** 2)

    x = np.random.default_rng(0).normal(size=(64, 32, 24)).astype(np.float32)
    state = placed(W | {"b": np.zeros(16, np.float32)}, devices=8)
    report = verified(loss, x, state=state)
    assert report.ok, str(report)


STATS = {"batch_stats": {"mean": np.zeros(16, np.float32)}}


def normalised(params, x, *rng, batch_stats, axis_name=None):
    """A layer with BatchNorm, beside dropout where there is a key."""
    mean = lambda v: lax.pmean(v.mean(0), axis_name) if axis_name else v.mean(0)
    h = x @ params["w"]
    center = mean(h)
    h = (h - center) * lax.rsqrt(mean((h - center) ** 2) + 1e-5)
    h = h * jax.random.bernoulli(*rng, 0.5, h.shape) if rng else h
    new = {"mean": 0.9 * batch_stats["mean"] + 0.1 * center}
    return (jax.nn.relu(h - x[:, :16]) ** 2).mean(), {"batch_stats": new, "out": h.mean()}


def of_batchnorm(*rng, accumulate=1, **options):
    made = {"accumulate": accumulate, "mutable": ("batch_stats",)}
    loss = functools.partial(normalised, **options)
    return verified(loss, X, *rng, state=placed(fields=STATS), made=made)


def test_batchnorm_is_named_and_its_remedy_passes():
    """Beside dropout too."""
    report, beside = of_batchnorm(), of_batchnorm(jax.random.key(3))
    for found in (report, beside):
        assert [c.path for c in found.wrong] == WHOLE, str(found)
        assert "most likely by BatchNorm: give it axis_name='data', or ('" in found.causes[0]
    assert {"batch_stats/mean", "aux/out"} <= {c.path for c in report.checks}
    assert of_batchnorm(axis_name="data").ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "in a jax.vmap whose axis is 'batch', with accumulate=1. Else"),
        ({"axis_name": "data"}, "as BatchNorm does: with accumulate=1 it is the same"),
    ],
)
def test_batchnorm_is_named_where_a_step_accumulates(options, message):
    assert message in of_batchnorm(accumulate=2, **options).causes[0]


def of_one_row(params, x, batch_stats, axis_name):
    """A model of one row, as in Equinox; its layers see the others by an axis."""

    def model(row):
        h = row @ params["w"]
        center = lax.pmean(h, axis_name)
        h = (h - center) * lax.rsqrt(lax.pmean((h - center) ** 2, axis_name) + 1e-5)
        return h, 0.9 * batch_stats["mean"] + 0.1 * center

    h, mean = jax.vmap(model, axis_name="batch")(x)
    return (jax.nn.relu(h) ** 2).mean(), {"batch_stats": {"mean": mean[0]}}


def test_batchnorm_in_a_vmap_is_named_with_both_axes():
    """The first layer normalises the batch as well, whatever its scale."""
    of = lambda axis: verified(
        functools.partial(of_one_row, axis_name=axis),
        np.exp(X),
        state=placed(fields=STATS),
        made={"mutable": ("batch_stats",)},
    )
    report = of("batch")
    assert [c.path for c in report.wrong] == WHOLE, str(report)
    says = "BatchNorm: give it axis_name='data', or ('batch', 'data') in a jax.vmap whose"
    assert says in report.causes[0], report.causes[0]
    assert of(("batch", "data")).ok


def from_the_state(params, x, batch_stats):
    new = {"key": jax.random.split(batch_stats["key"])[0]}
    return dropping(params, x, batch_stats["key"]), {"batch_stats": new}


KEY = jax.random.key(3)


@pytest.mark.parametrize(
    ("loss", "rng", "fields"),
    [
        (lambda params, x: dropping(params, x, KEY), (), {}),
        (lambda params, x, rng: dropping(params, x, KEY), (jax.random.key(1),), {}),
        (from_the_state, (), {"batch_stats": {"key": KEY}}),
    ],
    ids=["in the loss", "beside another", "in the state"],
)
def test_a_key_that_the_step_does_not_fold_is_named(loss, rng, fields):
    report = verified(loss, X, *rng, state=placed(fields=fields), made={"mutable": tuple(fields)})
    assert not report.ok
    assert "draws random numbers from a key that the step does not see" in report.causes[0]
    assert "step(state, batch, rng)" in report.causes[0]
