"""zerojax.verify: right steps pass, and wrong ones are caught and explained."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import zerojax
from tests.conftest import make_mesh
from tests.models import mlp
from tests.reference import assert_equal_bits
from tests.verify.steps import (
    MASK,
    MASKED,
    W,
    X,
    check_by_hand,
    dropping,
    masked_loss,
    placed,
    roots,
    squares,
    verified,
)
from zerojax._step import parameter as _parameter

PARTS, WHOLE = "mean over the parts", "the whole batch at once"


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (1, 4), (2, 4), (3, 1)])
def test_right_steps_pass(stage, accumulate):
    report = verified(mlp(False), stage, accumulate=accumulate)
    assert report.ok and not report.causes and not report.notes, report
    kinds = {check.kind for check in report.checks}
    assert kinds == {"loss", "grad_norm", "gradient", "params", "opt_state", "other"}
    wanted = float(mlp(False).loss(mlp(False).params, mlp(False).batch))
    assert list(report.losses.values()) == pytest.approx([wanted] * 3, rel=1e-6)
    assert len(report.checks) == 2 + 4 + 4 + 9 + 1 + 1  # metrics, grads, params, Adam, step, whole


def test_layer_loops_pass():
    params = {"layers": jax.random.normal(jax.random.key(2), (3, 24, 24)) / 5, "b": jnp.ones(24)}

    def loss(params, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        x, _ = lax.scan(layer, x, params["layers"])
        return (x @ params["b"]).mean()

    report = zerojax.verify(zerojax.train_step(loss, prefetch=1), placed(params), X)
    assert report.ok, report


@pytest.mark.parametrize(
    ("accumulate", "key"),
    [(1, jax.random.PRNGKey(7)), (4, jax.random.key(7))],
    ids=["raw", "typed"],
)
def test_dropout_passes_and_is_compared_with_the_whole_batch(accumulate, key):
    """All random numbers alike, dropout by halves keeps everything: the loss without any."""
    step = zerojax.train_step(dropping, accumulate=accumulate)
    report = zerojax.verify(step, placed(W), X, key)
    assert report.ok, report
    assert not report.notes
    names = [f"{what}, all random numbers alike" for what in (PARTS, WHOLE)]
    assert list(report.losses) == ["the step", PARTS, *names]
    plain = float(squares(W, X).mean())
    assert [report.losses[name] for name in names] == pytest.approx([plain, plain], rel=1e-5)
    assert report.losses["the step"] != pytest.approx(plain, rel=0.1)


def until_large(params, x, rng):
    draw = lambda carry: (jax.random.split(carry[0])[0], jax.random.normal(carry[0]))
    _, scale = jax.lax.while_loop(lambda carry: carry[1] < 1, draw, (rng, 0.0))
    return (squares(params, x) * scale).mean()


@pytest.mark.parametrize("loss", [
    until_large,
    lambda p, x, rng: (squares(p, x) * jax.random.gamma(rng, 2.0)).mean(),
    lambda p, x, rng: (squares(p, x) * jax.random.poisson(rng, 9.0)).mean(),
], ids=["loop", "gamma", "poisson"])  # fmt: skip
def test_draws_that_cannot_be_alike_are_not_compared_with_the_whole_batch(loss):
    report = zerojax.verify(zerojax.train_step(loss), placed(W), X, jax.random.key(7))
    assert report.ok, report
    assert "another sample" in report.notes[0]
    assert list(report.losses) == ["the step", PARTS]


@pytest.mark.parametrize("tx", [
    optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3)),
    optax.contrib.muon(1e-3), optax.lion(1e-4), optax.adafactor(1e-2, min_dim_size_to_factor=8),
], ids=["clip", "muon", "lion", "adafactor"])  # fmt: skip
def test_optimizers_pass(tx):
    report = verified(mlp(False), tx=tx)
    assert report.ok, report
    assert {c.verdict for c in report.checks} == {"ok"}, "tolerances too wide to tell"


@pytest.mark.parametrize("accumulate", [1, 4])
def test_exact_means_pass(accumulate):
    loss = functools.partial(masked_loss, mean=zerojax.mean)
    step = zerojax.train_step(loss, accumulate=accumulate)
    report = zerojax.verify(step, placed(W), MASKED)
    assert report.ok, report
    whole = float(masked_loss(W, MASKED))
    assert list(report.losses.values()) == pytest.approx([whole] * 3, rel=1e-5)


def test_aux_and_its_rows_are_compared():
    def loss(params, x):
        rows = squares(params, x)
        return rows.mean(), {"rows": rows, "mean": x.mean(), "count": x.shape[0]}

    report = zerojax.verify(zerojax.train_step(loss, accumulate=2), placed(W), X)
    assert report.ok, report
    assert {c.path for c in report.checks if c.kind == "aux"} == {
        "aux/rows", "aux/mean", "aux/count"
    }  # fmt: skip


@pytest.mark.parametrize("stage", [0, 3])
def test_state_and_batch_can_be_used_afterwards(stage):
    state, batch = placed(W, stage=stage), zerojax.shard_batch(X)
    before = zerojax.gather_params(state)
    step = zerojax.train_step(lambda p, x: squares(p, x).mean())
    zerojax.verify(step, state, batch)
    assert_equal_bits(zerojax.gather_params(state), before)
    new, _ = jax.block_until_ready(step(state, batch))
    assert int(new.step) == 1
    assert step._cache_size() == 1, "verify compiled the step another time"


def test_right_steps_of_ones_own_pass():
    for stage in (0, 3):
        report = check_by_hand(stage=stage)
        assert report.ok, report
        assert "no gradients; what they did" in str(report)
    assert check_by_hand(loss=dropping, rng=jax.random.key(7)).ok


def test_gradients_that_a_step_returns_are_compared():
    state, tx = placed(W, optax.sgd(0.1)), optax.sgd(0.1)
    plan = zerojax.plan(state, stage=3)
    loss = lambda p, x: squares(p, x).mean()

    def step(state, x, by):
        value, grads = zerojax.value_and_grad(loss, plan)(state.params, x)
        grads = jax.tree.map(lambda g: by * g, grads)
        new = plan.constrain(state.apply_gradients(grads=grads))
        return new, {"loss": value, "grads": grads}

    check = functools.partial(zerojax.verify, state=state, batch=X, loss_fn=loss, tx=tx)
    assert check(jax.jit(lambda s, x: step(s, x, 1))).ok
    wrong = check(jax.jit(lambda s, x: step(s, x, 3)))
    assert {c.path for c in wrong.wrong} == {"grads/w", "params/w"}
    assert "nor a sum, nor those of one part" in wrong.causes[0]


FIVE = {"mesh": make_mesh(5)}  # W rests as [25, 16]
SOME = X[:60]


@pytest.mark.parametrize(("stage", "accumulate", "tx"), [
    (1, 1, optax.adam(1e-3)), (2, 2, optax.contrib.muon(1e-3)), (3, 2, optax.adam(1e-3)),
    (3, 1, optax.contrib.muon(1e-3)), (3, 1, optax.adafactor(1e-2, min_dim_size_to_factor=8)),
], ids=["adam1", "muon2", "adam3", "muon3", "adafactor3"])  # fmt: skip
def test_padded_states_pass(stage, accumulate, tx):
    state = placed(W, tx, stage, **FIVE)
    plan = state.tx.plan
    step = zerojax.train_step(lambda p, x: squares(p, x).mean(), accumulate=accumulate)
    report = zerojax.verify(step, state, SOME)
    assert report.ok and not report.notes, report
    padded = {leaf.path for leaf in plan.leaves if leaf.rest.padding}
    assert {c.path for c in report.checks if c.kind == "padding"} == padded
    assert padded and ("params/w" in padded) == (stage == 3)
    checked = {c.path: c for c in report.checks if c.kind in ("params", "opt_state", "gradient")}
    assert {"params/w", "grads/w"} <= set(checked) and padded <= set(checked)
    assert {c.verdict for c in checked.values()} == {"ok"}, "tolerances too wide to tell"


@pytest.mark.parametrize("shards", [(), ("gpu",)])
def test_padded_groups_pass(shards):
    """Over two hosts of three, `w` rests as [24, 18]."""
    devices = make_mesh(6).devices.reshape(2, 3)
    mesh = Mesh(devices, ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    over = {"params": shards, "grads": shards, "opt_state": ("gpu", "node")}
    columns = {"w": PartitionSpec(None, ("gpu", "node"))}
    state = placed(W, mesh=mesh, groups=over, overrides=columns)
    assert state.params["w"].shape == (24, 18 if shards else 16)
    report = zerojax.verify(zerojax.train_step(lambda p, x: squares(p, x).mean()), state, SOME)
    assert report.ok, report
    assert sum(check.kind == "padding" for check in report.checks) == 2 + bool(shards)


def padded_tuple(change=lambda state: state):
    """Verifies a step of a tuple state, by hand: its loss and its optimizer see logical shapes."""
    tx = optax.adam(1e-3)
    state = W, tx.init(W)
    plan = zerojax.plan(state, stage=3, tx=tx, **FIVE)
    loss = lambda p, x: squares(p, x).mean()

    def step(state, x):
        params, opt_state = zerojax.logical(state, plan)
        value, grads = zerojax.value_and_grad(loss, plan)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = plan.constrain((optax.apply_updates(params, updates), opt_state))
        return change(new), {"loss": value, "grads": plan.pad_params(grads)}

    return zerojax.verify(jax.jit(step), plan.place(state), SOME, loss_fn=loss, tx=tx, plan=plan)


def test_padded_states_without_an_optimizer_field_pass():
    report = padded_tuple()
    assert report.ok, report
    assert {"grads/w", "0/w", "1/0/mu/w"} <= {check.path for check in report.checks}


def test_padding_that_is_not_zero_is_wrong():
    """It is the last of 25 rows, all that the fifth device has beyond four of its own."""

    def change(state):
        params, opt_state = state
        return {"w": params["w"].at[24, 3].set(1e-30)}, opt_state

    report = padded_tuple(change=change)
    (wrong,) = report.wrong
    assert (wrong.path, wrong.kind) == ("0/w", "padding")
    assert wrong.difference == pytest.approx(1e-30)
    (cause,) = report.causes
    assert cause.startswith("The padding of 0/w is not zero after the step")
    assert "update with zerojax.logical(state), and return plan.constrain(new_state)" in cause


def test_a_wrong_row_of_a_padded_leaf_is_found():
    """The last row that is no padding."""

    def change(state):
        params, opt_state = state
        return {"w": params["w"].at[23, 3].add(1e-2)}, opt_state

    (wrong,) = padded_tuple(change=change).wrong
    assert (wrong.path, wrong.kind) == ("0/w", "params")
    assert wrong.difference == pytest.approx(1e-2, rel=1e-3)


def test_a_step_that_leaves_splitting_to_the_compiler_is_compared_with_the_whole_batch():
    state = placed(W, stage=0)

    @jax.jit
    def step(state, batch):
        value, grads = jax.value_and_grad(masked_loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value

    report = zerojax.verify(step, state, zerojax.shard_batch(MASKED), loss_fn=masked_loss)
    assert report.ok, report
    assert "whole batch: the two are compared" in report.notes[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_fault_in_the_library_itself_is_caught(stage, monkeypatch):
    reduced = _parameter.Parameter.reduced
    monkeypatch.setattr(
        _parameter.Parameter, "reduced", lambda self, grad: reduced(self, grad) * 1.01
    )
    report = zerojax.verify(
        zerojax.train_step(lambda p, x: squares(p, x).mean()), placed(W, stage=stage), X
    )
    assert {"grads/w", "grad_norm"} <= {check.path for check in report.wrong}


def test_a_step_that_is_left_out_agrees():
    step = zerojax.train_step(roots, skip_nonfinite=True)
    report = zerojax.verify(step, placed(W), jnp.zeros_like(X))
    assert report.ok and "both sides skip the step" in report.notes[0], report


@pytest.mark.parametrize(("options", "result", "error", "message"), [
    ({}, None, TypeError, r"cannot know its loss. Pass zerojax.verify\(step.*loss_fn=loss_fn\)"),
    ({"loss_fn": masked_loss}, 3, TypeError, r"returned a int.*wrap yours, lambda state, batch"),
])  # fmt: skip
def test_steps_that_cannot_be_verified(options, result, error, message):
    with pytest.raises(error, match=message):
        zerojax.verify(lambda state, batch: result, placed(W), MASKED, **options)


def test_options_that_the_step_knows_already():
    with pytest.raises(ValueError, match=r"knows its loss and options. Leave loss_fn=.*out"):
        zerojax.verify(zerojax.train_step(masked_loss), placed(W), MASKED, accumulate=2)
    with pytest.raises(ValueError, match="which does not divide over 8 devices"):
        zerojax.verify(zerojax.train_step(masked_loss), placed(W), {"x": X[:3], "mask": MASK[:3]})


def test_a_state_too_large_for_one_device_is_refused_before_anything_runs():
    class Small:
        def memory_stats(self):
            return {"bytes_limit": 40_000, "bytes_in_use": 35_904}

        def __str__(self):
            return "cuda:0"

    def step(state, batch):
        raise NotImplementedError("ran")

    # w, Adam's two moments and two counters, twice; gradients, twice.
    needed = 2 * (3 * 24 * 16 * 4 + 8) + 2 * 24 * 16 * 4
    text = r"needs {:.1f} KiB on cuda:0, and 4.0 KiB are free.*device=jax.devices\('cpu'\)"
    with pytest.raises(ValueError, match=text.format(needed / 1024)):
        zerojax.verify(step, placed(W), MASKED, loss_fn=masked_loss, device=Small())
