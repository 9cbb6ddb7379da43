"""Causes of a difference: each mistake is named with its remedy, and the remedies pass."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax

import zerojax
from tests.models import ROWS, Model
from tests.verify.steps import (
    MASKED,
    W,
    X,
    check_by_hand,
    dropping,
    masked_loss,
    placed,
    squares,
    verified,
)


@pytest.mark.parametrize(("fault", "message"), [
    ("dropped", r"hold the same \S+ and 2 more hold different .*before the update.*pmean"),
    ("loss", r"step's loss is what the first device's part alone gives. Take the mean"),
    ("sum", r"gradients are 8 times too large: a sum over the devices. Take the mean"),
    ("twice", r"no gradients, so two causes are left.*another than tx.*return them"),
])  # fmt: skip
def test_faults_of_steps_of_ones_own_are_named(fault, message):
    report = check_by_hand(fault)
    assert not report.ok
    with pytest.raises(AssertionError, match=message):
        report.raise_if_wrong()
    wrong = {check.path for check in report.wrong}
    assert ("loss" in wrong) == (fault != "twice")
    assert any(path.startswith(("params", "opt_state")) for path in wrong) == (fault != "loss")


def test_an_unfolded_key_is_named():
    report = check_by_hand("unfolded", loss=dropping, rng=jax.random.key(7))
    says = "loss and gradients are what one and the same key gives on every device. Fold it: jax.ra"
    assert says in report.causes[0] and len(report.causes) == 1


@pytest.mark.parametrize("devices", [8, 5])
def test_an_optimizer_on_local_shards_is_named(devices):
    """On five devices the shards are padded."""
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3))
    report = check_by_hand(tx=tx, stage=3, devices=devices)
    assert {check.kind for check in report.wrong} == {"opt_state", "params"}
    assert "Each device ran the optimizer on its own shards alone" in report.causes[0]
    assert "outside of shard_map" in report.causes[0]


def contrastive(params, batch, gather=lambda x: x, first=lambda: 0):
    mine, others = batch["x"] @ params["w"], gather(batch["y"] @ params["w"])
    labels = jnp.arange(len(mine)) + first() * len(mine)
    return optax.softmax_cross_entropy_with_integer_labels(mine @ others.T, labels).mean()


def empty_parts(params, batch):
    return masked_loss(params, {**batch, "mask": jnp.arange(len(batch["x"])) < batch["few"]})


def adapted(params, x, average=lambda grad: grad):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(params["w"])
    return squares({"w": params["w"] - average(grads)}, x).mean()


PAIRS = {"x": X, "y": jnp.roll(X, 3, 1)}


@pytest.mark.parametrize(("loss", "batch", "message"), [
    (masked_loss, MASKED, r"Most likely a masked mean: use zerojax.mean\(values, where=mask\)"),
    (contrastive, PAIRS, r"compares the examples.*all_gather\(x, 'data', tiled=True\)"),
    (lambda p, x: squares(p, x).sum(), X, r"sum over the batch: .* is 8 times its.*Use a mean"),
    (masked_loss, {"x": X, "mask": jnp.arange(ROWS) < 13},
     r"6 of 8 parts.*not finite: a mean over no true element. Use zerojax.mean"),
    (adapted, X, r"takes a gradient itself.*jax.lax.pmean\(jax.grad\(...\)\(...\), 'data'\)"),
], ids=["masked", "contrastive", "sum", "empty", "gradient"])  # fmt: skip
def test_losses_that_mean_something_else_on_a_part_are_named(loss, batch, message):
    step, state = zerojax.train_step(loss), placed(W)
    report = zerojax.verify(step, state, batch)
    assert [c.path for c in report.wrong] == ["loss on the whole batch"], report
    with pytest.raises(AssertionError, match=message):
        report.raise_if_wrong()
    assert report.losses["the whole batch at once"] == pytest.approx(
        float(loss(W, batch)), rel=1e-5
    )
    assert zerojax.verify(step, state, batch, whole_batch=False).ok


def test_the_remedy_for_a_gradient_in_the_loss_passes():
    loss = functools.partial(adapted, average=lambda grad: lax.pmean(grad, "data"))
    zerojax.verify(zerojax.train_step(loss), placed(W), X).check()


def test_the_remedy_for_in_batch_negatives_passes():
    gather = lambda x: lax.all_gather(x, "data", tiled=True)
    loss = functools.partial(contrastive, gather=gather, first=lambda: lax.axis_index("data"))
    report = zerojax.verify(zerojax.train_step(loss), placed(W), PAIRS)
    assert report.ok, report
    assert report.losses["the step"] == pytest.approx(float(contrastive(W, PAIRS)), rel=1e-5)


def policy(params, batch, normalised):
    """The loss of a policy and of values, as PPO has it."""
    ratio, gain = jnp.exp((batch["x"] @ params["w"]).mean(-1)), normalised(batch["gain"])
    gains = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
    return ((batch["x"].sum(-1) - batch["values"]) ** 2).mean() - gains.mean()


def by_deviation(gain, mean=jnp.mean):
    return (gain - mean(gain)) / (jnp.sqrt(mean((gain - mean(gain)) ** 2)) + 1e-8)


def test_an_advantage_normalised_over_the_minibatch_is_named_and_its_remedies_pass():
    gain = jnp.cumsum(X[:, 0])
    batch = {"x": X, "values": X[:, 1], "gain": gain, "unread": X[:, 2]}

    def verified(normalised, **other):
        step = zerojax.train_step(functools.partial(policy, normalised=normalised))
        return zerojax.verify(step, placed(W), {**batch, **other})

    cause = verified(by_deviation).causes[0]
    assert "normalises batch leaf gain by its mean and deviation" in cause
    assert "before the step" in cause and "masked" not in cause
    assert verified(lambda gain: gain, gain=by_deviation(gain)).ok
    assert verified(functools.partial(by_deviation, mean=zerojax.mean)).ok


class Normalised(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(nn.Dense(16)(x))
        return nn.Dense(4)(nn.relu(x))


def normalised(axis_name=None, rate=None):
    model = Normalised(axis_name)
    fields = Normalised().init(jax.random.key(2), X)

    def loss(params, x, *rng, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        if rng:
            x = x * jax.random.bernoulli(*rng, 1 - rate, x.shape)
        out, new = model.apply(variables, x, mutable=["batch_stats"])
        return (out**2).mean(), {**new, "out": out.mean()}

    rng = None if rate is None else jax.random.key(3)
    stats = {"batch_stats": fields["batch_stats"]}
    return Model(fields["params"], loss, X, rng=rng, fields=stats)


@pytest.mark.parametrize("rate", [None, pytest.param(0.1, marks=pytest.mark.slow), 0.5])
def test_batchnorm_is_named_and_its_remedy_passes(rate):
    """Beside dropout too."""
    report = verified(normalised(rate=rate))
    assert [c.path for c in report.wrong] == ["loss on the whole batch"], report
    assert "Most likely BatchNorm: give it axis_name='data'" in report.causes[0]
    assert any(c.path.startswith("batch_stats/") for c in report.checks)
    assert "aux/out" in {c.path for c in report.checks}
    assert verified(normalised("data", rate)).ok
    split = verified(normalised("data", rate), accumulate=4)
    assert "as BatchNorm does: with accumulate=1 it is the same" in split.causes[0]


def test_batchnorm_is_named_where_a_step_accumulates():
    cause = verified(normalised(), accumulate=4).causes[0]
    assert "Most likely BatchNorm: give it axis_name='data', with accumulate=1. Else" in cause


def with_a_key_in_the_state():
    def loss(params, x, batch_stats):
        new = {"key": jax.random.split(batch_stats["key"])[0]}
        return dropping(params, x, batch_stats["key"]), {"batch_stats": new}

    return Model(W, loss, X, fields={"batch_stats": {"key": jax.random.key(3)}})


@pytest.mark.parametrize("made", [
    Model(W, lambda params, x: dropping(params, x, jax.random.key(3)), X),
    Model(W, lambda params, x, rng: dropping(params, x, jax.random.key(3)), X, jax.random.key(1)),
    with_a_key_in_the_state(),
], ids=["in the loss", "beside another", "in the state"])  # fmt: skip
def test_a_key_that_the_step_does_not_fold_is_named(made):
    report = verified(made)
    assert not report.ok
    assert "draws random numbers from a key that the step does not see" in report.causes[0]
    assert "step(state, batch, rng)" in report.causes[0]


def test_an_optimizer_that_cannot_run_on_a_shard_is_no_cause():
    """Adafactor's factors of a shard have other shapes than those of the matrix."""
    params = {"w": jnp.ones((256, 128)) / 16}
    make = lambda: TrainState.create(apply_fn=None, params=params, tx=optax.adafactor(1e-2))
    state = zerojax.shard_train_state(make)
    plan = state.tx.plan
    loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)

    @jax.jit
    def wrong(state, x):
        value, grads = zerojax.value_and_grad(loss, plan)(state.params, x)
        grads = jax.tree.map(lambda g: g + 0.05, grads)
        return plan.constrain(state.apply_gradients(grads=grads)), {"loss": value}

    found = zerojax.verify(wrong, state, jnp.ones((32, 256)), loss_fn=loss)
    assert not found.ok and "two causes are left" in str(found)
