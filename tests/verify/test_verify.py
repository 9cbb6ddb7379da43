"""zerojax.verify: right steps pass, wrong ones are caught, and what cannot be told is said."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zerojax
from tests.conftest import make_mesh
from tests.verify.steps import (
    MASK,
    MASKED,
    ROWS,
    W,
    X,
    check_by_hand,
    dropping,
    masked_loss,
    mean_loss,
    placed,
    roots,
    squares,
    verified,
)
from zerojax.tools._verify.reference import Reference

PARTS, WHOLE = "mean over the parts", "the whole batch at once"
PLAIN = float(np.sum((X @ W["w"]) ** 2, -1).mean())


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (3, 4)])
def test_right_steps_pass(stage, accumulate):
    report = verified(state=placed(stage=stage), made={"accumulate": accumulate})
    assert report.ok and not report.causes and not report.notes, str(report)
    kinds = {check.kind for check in report.checks}
    assert kinds == {"loss", "grad_norm", "gradient", "params", "opt_state", "other"}
    assert len(report.checks) == 2 + 1 + 1 + 3 + 1 + 2  # metrics, grads, params, Adam, step, whole
    assert list(report.losses.values()) == pytest.approx([PLAIN] * 3, rel=1e-6)
    assert {check.verdict for check in report.checks} == {"ok"}


def test_dropout_passes_and_is_compared_with_the_whole_batch():
    """All random numbers alike, dropout by halves keeps everything: the loss without any."""
    report = verified(dropping, X, jax.random.PRNGKey(7), made={"accumulate": 4})
    assert report.ok and not report.notes, str(report)
    names = [f"{what}, all random numbers alike" for what in (PARTS, WHOLE)]
    assert list(report.losses) == ["the step", PARTS, *names]
    assert [report.losses[name] for name in names] == pytest.approx([PLAIN, PLAIN], rel=1e-5)
    assert report.losses["the step"] != pytest.approx(PLAIN, rel=0.1)


def test_gradients_of_a_whole_batch_that_does_not_fit_are_not_compared(monkeypatch):
    replay = Reference.replay

    def out_of_memory(self, split=None, *args, differentiate=True, **named):
        if split == self.in_one and differentiate:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
        return replay(self, split, *args, differentiate=differentiate, **named)

    monkeypatch.setattr(Reference, "replay", out_of_memory)
    report = verified()
    assert report.ok and "activations of the whole batch do not fit" in report.notes[0]
    assert list(report.losses.values()) == pytest.approx([PLAIN] * 3, rel=1e-6)


def until_large(rng):
    draw = lambda carry: (jax.random.split(carry[0])[0], jax.random.normal(carry[0]))
    return lax.while_loop(lambda carry: carry[1] < 1, draw, (rng, 0.0))[1]


def counted(rng):
    first = jax.random.randint(rng, (), 0, 3)
    return lax.while_loop(lambda n: n < 3, lambda n: n + 1, first)


@pytest.mark.parametrize(("draw", "compared"), [(jax.jit(until_large), False), (counted, True)])
def test_draws_that_cannot_be_alike_are_not_compared_with_the_whole_batch(draw, compared):
    loss = lambda params, x, rng: (squares(params, x) * draw(rng)).mean()
    report = verified(loss, X, jax.random.key(7))
    assert report.ok and all("another sample" in note for note in report.notes), report
    assert (len(report.notes), len(report.losses)) == ((0, 4) if compared else (1, 2))


def test_exact_means_and_aux_are_compared():
    def loss(params, batch):
        rows = squares(params, batch["x"])
        aux = {"rows": rows, "mean": batch["x"].mean(), "count": len(rows)}
        return masked_loss(params, batch, zerojax.mean), aux

    report = verified(loss, MASKED, made={"accumulate": 2})
    assert report.ok, str(report)
    compared = {c.path for c in report.checks if c.kind == "aux"}
    assert compared == {f"aux/{name}" for name in ("rows", "mean", "count")}
    (note,) = report.notes
    assert "differ in count (16 and 64), in aux" in note and "Return a count as a frac" in note
    whole = float(jax.jit(masked_loss)(W, MASKED))
    assert list(report.losses.values()) == pytest.approx([whole] * 3, rel=1e-5)


def test_state_and_batch_can_be_used_afterwards(compiled):
    state, batch = placed(), zerojax.shard_batch(X, like=make_mesh(2))
    step = zerojax.train_step(mean_loss)
    zerojax.verify(step, state, batch)
    np.testing.assert_array_equal(zerojax.gather_params(state)["w"], W["w"])
    compiled.clear()
    new, _ = jax.block_until_ready(step(state, batch))
    assert int(new.step) == 1 and not compiled, "verify compiled the step another time"


def test_right_steps_of_ones_own_pass():
    report = check_by_hand(stage=3)
    assert report.ok and "no gradients; their effect" in str(report), str(report)
    assert check_by_hand(loss=dropping, rng=jax.random.key(7)).ok


def test_gradients_that_a_step_returns_are_compared():
    state, tx = placed(tx=optax.sgd(0.1)), optax.sgd(0.1)

    def step(state, x, by):
        plan = state.tx.plan
        value, grads = zerojax.value_and_grad(mean_loss, plan)(state.params, x)
        grads = jax.tree.map(lambda g: by * g, grads)
        new = plan.constrain(state.apply_gradients(grads=grads))
        return new, {"loss": value, "grads": grads}

    like = zerojax.train_step(mean_loss, tx=tx)
    check = functools.partial(zerojax.verify, state=state, batch=X, like=like)
    assert check(jax.jit(lambda s, x: step(s, x, 1))).ok
    wrong = check(jax.jit(lambda s, x: step(s, x, 3)))
    assert {c.path for c in wrong.wrong} == {"grads/w", "params/w"}
    assert "nor a sum, nor those of one part" in wrong.causes[0]


# -- padding

FIVE = {"mesh": make_mesh(5)}  # W rests as [25, 16]
SOME = X[:60]


def padded_tuple(change):
    """Verifies a step of a tuple state, by hand: its loss and its optimizer see logical shapes."""
    tx = optax.adam(1e-3)
    state = W, tx.init(W)
    plan = zerojax.plan(state, stage=3, tx=tx, **FIVE)

    def step(state, x):
        params, opt_state = zerojax.unpad(state, plan)
        value, grads = zerojax.value_and_grad(mean_loss, plan)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        new, opt_state = plan.constrain((optax.apply_updates(params, updates), opt_state))
        metrics = {"loss": value, "grads": plan._pad_params(grads)}
        return ({"w": change(new["w"])}, opt_state), metrics

    like = zerojax.train_step(mean_loss, tx=tx, plan=plan)
    return zerojax.verify(jax.jit(step), plan.place(state), SOME, like=like)


def test_padding_that_is_not_zero_is_wrong():
    """It is the last of 25 rows, all that the fifth device has beyond four of its own."""
    report = padded_tuple(lambda w: w.at[24, 3].set(1e-30))
    (wrong,), (cause,) = report.wrong, report.causes
    assert (wrong.path, wrong.kind) == ("0/w", "padding")
    assert wrong.difference == pytest.approx(1e-30)
    assert {"grads/w", "0/w", "1/0/mu/w"} <= {check.path for check in report.checks}
    assert cause.startswith("The padding of 0/w is not zero after the step")
    assert "update with zerojax.unpad(state), and return plan.constrain(new_state)" in cause


# -- how far rounding may go


def attention(params, x):
    keys = x @ params["w"] + params["bias"]  # shifts all logits of a query alike
    return jnp.mean((jax.nn.softmax((x @ params["w"]) @ keys.mT) @ x - x[:, ::-1]) ** 2)


def test_noise_that_adam_blows_up_is_no_false_alarm():
    params, x = {**W, "bias": np.ones(16, np.float32)}, X.reshape(ROWS // 4, 4, 24)
    report = verified(attention, x, state=placed(params))
    assert report.ok, str(report)
    unseen = {c.path: c for c in report.checks if c.verdict == "too small to tell"}
    assert {"grads/bias", "params/bias"} <= unseen.keys() and len(unseen) <= 5
    assert 0 < unseen["params/bias"].scale <= unseen["params/bias"].tolerance


def test_narrow_precision_widens_the_tolerance_but_not_what_a_loss_means():
    paper = zerojax.Precision("bfloat16", reduce="float32", param="bfloat16", master="float32")
    report = verified(state=placed(stage=2, precision=paper))
    assert report.ok and report.tolerance == 5e-2, str(report)
    assert "mean over the parts, in float32" in report.losses
    state = placed(precision=zerojax.Precision("bfloat16"))
    tight = verified(state=state, tolerance=np.float32(1e-6))
    assert not tight.ok and tight.tolerance == np.float32(1e-6)
    loss = lambda params, batch: 1 + 1e-3 * masked_loss(params, batch)  # alike but for 0.1%
    report = verified(loss, MASKED, state=state)
    assert [c.path for c in report.wrong] == ["loss on the whole batch"], str(report)


def widened(params, x):
    return squares({"w": params["w"].astype(jnp.float32)}, x.astype(jnp.float32)).mean()


# Weights that are cast to bfloat16 are judged so where the loss widens them again.
@pytest.mark.parametrize(
    ("loss", "compute", "factor", "ok"),
    [
        (mean_loss, None, 1.01, False),
        (widened, "bfloat16", 1, True),
        (widened, "bfloat16", 8, False),
    ],
)
def test_gradients_that_are_reduced_wrongly_are_caught(loss, compute, factor, ok, monkeypatch):
    scatter = lax.psum_scatter
    monkeypatch.setattr(lax, "psum_scatter", lambda *args, **how: scatter(*args, **how) * factor)
    report = verified(loss, made={"precision": compute and zerojax.Precision(compute)})
    wrong = {check.path for check in report.wrong}
    assert report.ok == ok and (ok or wrong >= {"grads/w", "grad_norm"}), report


def of_16_bits(dtype, kept, params, batch, mean=jnp.mean):
    """A model that computes in a narrow dtype of its own; `kept`, what it may not widen."""
    w, h = params["w"].astype(dtype), batch["x"].astype(dtype)

    @jax.checkpoint
    def layer(h, _):
        return jax.nn.relu(kept(h @ w)) @ w.T * dtype.type(0.5), None

    h = lax.scan(layer, h, length=2)[0].astype(jnp.float32)
    return 1 + 1e-2 * mean(h[:, 0], where=batch["mask"])  # alike on all parts but for 0.1%


def bits(x):
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16), x.dtype)


@pytest.mark.parametrize(
    ("dtype", "kept", "mean", "ok"),
    [
        ("bfloat16", lambda x: x, jnp.mean, False),
        ("bfloat16", lambda x: x, zerojax.mean, True),
        ("bfloat16", bits, zerojax.mean, True),
        ("bfloat16", bits, jnp.mean, True),  # rounded as ever
        (
            "float16",
            jax.jit(lambda x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x)),
            jnp.mean,
            False,
        ),
    ],
)
def test_a_model_that_rounds_to_16_bits_hides_no_mask(dtype, kept, mean, ok):
    loss = functools.partial(of_16_bits, np.dtype(dtype), kept, mean=mean)
    report = verified(loss, MASKED)
    assert {c.path for c in report.wrong} == (set() if ok else {"loss on the whole batch"}), report
    limits = {c.path: c.tolerance for c in report.checks}
    assert limits["loss on the whole batch"] < 2e-5 or kept is bits
    assert ("grads on the whole batch/w" in limits) == (ok and kept is not bits)
    assert ok or "by a masked mean: use zerojax.mean" in report.causes[0]


# -- what is not finite


@pytest.mark.parametrize("x", [np.full_like(X, np.nan), 0 * X], ids=["loss", "gradients"])
def test_a_nan_on_both_sides_is_no_agreement(x):
    report = verified(roots, x)
    assert not report.ok and not report.wrong
    assert {check.path for check in report.not_finite} >= {"grads/w", "params/w"}
    assert str(report).startswith("cannot tell")
    with pytest.raises(AssertionError, match=r"not finite in the replay.*jax.debug_nans\(True\)"):
        report.check()


# -- the replay


@pytest.mark.parametrize("mean", [jnp.mean, zerojax.mean])
def test_parts_are_replayed_one_at_a_time_unless_they_speak_to_each_other(mean):
    """Then all are in memory at once, as a callback sees that stacks what is batched."""
    shapes = set()

    def note(x):
        shapes.add(x.shape)
        return np.zeros(x.shape[:-2], np.float32)

    def loss(params, batch):
        there = jax.ShapeDtypeStruct((), jnp.float32)
        seen = jax.pure_callback(note, there, batch["x"], vmap_method="expand_dims")
        return masked_loss(params, batch, mean) + lax.stop_gradient(seen.sum())

    verified(loss, MASKED, whole_batch=False)
    all_at_once = {(2, 1, ROWS // 2, 24)} if mean is zerojax.mean else set()
    assert shapes == {(ROWS // 2, 24)} | all_at_once


# -- the report, and what is refused


def test_the_report_prints_worst_first_and_turns_into_json():
    report = check_by_hand("sum", devices=8)
    lines = str(report).splitlines()
    assert lines[0].startswith("wrong: 3 of 7 comparisons")  # Adam hides it from params
    assert [c.path for c in report.wrong] == ["opt_state/0/nu/w", "loss", "opt_state/0/mu/w"]
    excess = [c.excess for c in report.wrong]
    assert excess == sorted(excess, reverse=True)
    with pytest.raises(AssertionError, match="wrong: 3 of 7 comparisons"):
        report.check()
    told = json.loads(json.dumps(report.to_dict()))
    assert told["ok"] is False and told["checks"][0]["path"] == report.checks[0].path
    assert told["losses"]["the step"] == pytest.approx(8 * told["losses"]["mean over the parts"])


STEP = zerojax.train_step(masked_loss)


@pytest.mark.parametrize(
    ("step", "batch", "options", "message"),
    [
        (None, MASKED, {}, r"cannot know its loss. .*like=zerojax.train_step\(loss_fn\)\)"),
        (None, MASKED, {"like": masked_loss}, "does not come from zerojax.train_step"),
        (3, MASKED, {"like": STEP}, r"returned a int.*wrap yours, lambda state, batch"),
        (STEP, {"x": X[:3], "mask": MASK[:3]}, {}, "which do not divide over 2 devices"),
    ],
)
def test_steps_that_cannot_be_verified(step, batch, options, message):
    by_hand = step if step is STEP else lambda state, batch: step
    with pytest.raises((TypeError, ValueError), match=message):
        zerojax.verify(by_hand, placed(), batch, **options)


@pytest.mark.parametrize("options", [{}, {"plan": "of other devices"}], ids=["", "rehearsed"])
def test_another_mesh_that_is_set_is_refused(options):
    """It has the state's axes, and other devices."""
    state = placed()
    options = options and {"plan": state.tx.plan}
    step, source = zerojax.train_step(mean_loss), (lambda: placed()) if options else state
    with jax.set_mesh(make_mesh(4)), pytest.raises(ValueError, match=r"Set the state's, jax\.set"):
        zerojax.verify(step, source, X, **options)


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
        zerojax.verify(step, placed(), MASKED, like=STEP, device=Small())
