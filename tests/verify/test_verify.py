"""zerojax.verify: right steps pass, and wrong ones are caught and explained."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import zerojax
from tests.conftest import make_mesh
from tests.models import ROWS, Model, mlp
from tests.reference import assert_equal_bits, make_state
from zerojax._step import parameter as _parameter
from zerojax._verify import replay as _replay

SPEC = PartitionSpec("data")
W = {"w": jax.random.normal(jax.random.key(0), (24, 16)) / 5}
X = jax.random.normal(jax.random.key(1), (ROWS, 24))
# Uneven over the parts, and none without a true element.
MASK = (jnp.arange(ROWS) % 8 == 0) | (jnp.arange(ROWS) % 7 < jnp.arange(ROWS) // 16)
MASKED = {"x": X, "mask": MASK}
ADAM = optax.adam(1e-3)  # its own small eps: full-size steps from rounding noise


def squares(params, x):
    return jnp.sum((x @ params["w"]) ** 2, -1)


def masked_loss(params, batch, mean=jnp.mean):
    return mean(squares(params, batch["x"]), where=batch["mask"])


def placed(params, tx=ADAM, stage=3, **options):
    state = make_state(Model(params, None, None), tx)
    return zerojax.shard_train_state(state, stage, **options)


def verified(made, stage=3, tx=ADAM, accumulate=1, **options):
    state = zerojax.shard_train_state(make_state(made, tx), stage)
    step = zerojax.train_step(made.loss, accumulate=accumulate, mutable=tuple(made.fields))
    rng = [] if made.rng is None else [made.rng]
    return zerojax.verify(step, state, made.batch, *rng, **options)


# -- steps that are right


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


@pytest.mark.parametrize("accumulate", [1, 4])
def test_dropout_passes_and_is_not_held_against_the_whole_batch(accumulate):
    step = zerojax.train_step(dropping, accumulate=accumulate)
    report = zerojax.verify(step, placed(W), X, jax.random.key(7))
    assert report.ok, report
    assert "another sample" in report.notes[0]
    assert list(report.losses) == ["the step", "mean over the parts"]


@pytest.mark.parametrize("tx", [
    optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3)),
    optax.contrib.muon(1e-3), optax.lion(1e-4), optax.adafactor(1e-2, min_dim_size_to_factor=8),
], ids=["clip", "muon", "lion", "adafactor"])  # fmt: skip
def test_optimizers_pass(tx):
    report = verified(mlp(False), tx=tx)
    assert report.ok, report
    assert {c.verdict for c in report.checks} == {"ok"}, "tolerances too wide to tell"


def attention(params, x):
    keys = x @ params["w"] + params["bias"]  # shifts all logits of a query alike
    return jnp.mean((jax.nn.softmax((x @ params["w"]) @ keys.mT) @ x - x[:, ::-1]) ** 2)


def test_noise_that_adam_blows_up_is_no_false_alarm():
    params, x = {**W, "bias": jnp.ones(16)}, X.reshape(ROWS // 4, 4, 24)
    report = zerojax.verify(zerojax.train_step(attention), placed(params), x)
    assert report.ok, report
    unseen = {c.path: c for c in report.checks if c.verdict == "too small to tell"}
    assert {"grads/bias", "params/bias"} <= unseen.keys() and len(unseen) <= 4
    assert 0 < unseen["params/bias"].scale <= unseen["params/bias"].tolerance


@pytest.mark.parametrize("options", [
    {"compute": "bfloat16"},
    {"compute": "bfloat16", "reduce": "float32", "param": "bfloat16", "master": "float32"},
], ids=["compute", "paper"])  # fmt: skip
def test_narrow_precision_widens_the_tolerance(options):
    made = mlp(False)
    precision = zerojax.Precision(**options)
    state = zerojax.shard_train_state(make_state(made, ADAM), 2, precision=precision)
    step = zerojax.train_step(made.loss)
    report = zerojax.verify(step, state, made.batch)
    assert report.ok, report
    assert report.tolerance == 5e-2
    assert "mean over the parts, in float32" in report.losses
    tight = zerojax.verify(step, state, made.batch, tolerance=1e-6)
    assert not tight.ok and tight.tolerance == 1e-6


def test_what_a_narrow_loss_means_is_judged_in_float32():
    loss = lambda params, batch: 1 + 1e-3 * masked_loss(params, batch)  # alike but for 0.1%
    state = placed(W, precision=zerojax.Precision(compute="bfloat16"))
    report = zerojax.verify(zerojax.train_step(loss), state, MASKED)
    assert [c.path for c in report.wrong] == ["loss on the whole batch"], report


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


# -- steps written by hand


def by_hand(plan, tx, loss_fn, fault="", with_key=False):
    """A ZeRO step in shard_map, with one fault at will."""
    specs = plan.treedef.unflatten([leaf.spec for leaf in plan.leaves])
    dims = jax.tree.unflatten(
        plan.treedef, [-1 if leaf.dim is None else leaf.dim for leaf in plan.leaves]
    )["params"]
    sharded = plan.sharded["params"]

    def mean(x):
        return x if fault == "dropped" else lax.psum(x, "data") / (1 if fault == "sum" else 8)

    def whole(shard, dim):
        if not sharded or dim < 0:
            return shard
        return lax.all_gather(shard, "data", axis=dim, tiled=True)

    def cut(grad, dim):
        if not sharded or dim < 0:
            return mean(grad)
        return lax.psum_scatter(grad, "data", scatter_dimension=dim, tiled=True) / 8

    def per_device(state, batch, *rng):
        if rng and fault != "unfolded":
            rng = [jax.random.fold_in(rng[0], lax.axis_index("data"))]
        params = jax.tree.map(whole, state["params"], dims)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, *rng)
        grads = jax.tree.map(cut, grads, dims)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        if fault == "twice":
            updates = jax.tree.map(lambda u: 2 * u, updates)
        new = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return new, (loss if fault == "loss" else mean(loss))

    keys = (PartitionSpec(),) if with_key else ()
    return jax.jit(jax.shard_map(
        per_device, mesh=plan.mesh, in_specs=(specs, SPEC, *keys),
        out_specs=(specs, PartitionSpec()), check_vma=False,
    ), donate_argnums=(0, 1))  # fmt: skip


def check_by_hand(fault="", tx=ADAM, stage=0, loss=None, rng=None):
    loss = loss or (lambda p, x: squares(p, x).mean())
    state = {"params": W, "opt_state": tx.init(W)}
    plan = zerojax.plan(state, stage=stage, tx=tx, min_shard_size=0)
    step = by_hand(plan, tx, loss, fault, rng is not None)
    return zerojax.verify(step, plan.place(state), X, rng, loss_fn=loss, tx=tx, plan=plan)


def dropping(params, x, rng):
    return squares(params, x * jax.random.bernoulli(rng, 0.5, x.shape)).mean()


def test_right_steps_of_ones_own_pass():
    for stage in (0, 3):
        report = check_by_hand(stage=stage)
        assert report.ok, report
        assert "no gradients; what they did" in str(report)
    assert check_by_hand(loss=dropping, rng=jax.random.key(7)).ok


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


def test_a_dropped_reduction_shows_on_later_devices():
    report = check_by_hand("dropped", tx=optax.sgd(0.1))
    assert {c.path for c in report.checks if c.copies_differ} == {"loss", "params/w"}
    assert report.checks[0].verdict == "wrong" and report.checks[0].excess > 100


def test_an_unfolded_key_is_named():
    report = check_by_hand("unfolded", loss=dropping, rng=jax.random.key(7))
    text = str(report)
    assert "loss is what one and the same key gives on every device. Fold it: jax.random." in text
    assert "gradients are what one and the same key gives" in text


def test_an_optimizer_on_local_shards_is_named():
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3))
    report = check_by_hand(tx=tx, stage=3)
    assert {check.kind for check in report.wrong} == {"opt_state", "params"}
    assert "Each device ran the optimizer on its own shards alone" in report.causes[0]
    assert "outside of shard_map" in report.causes[0]


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


def test_a_step_that_leaves_splitting_to_the_compiler_is_held_against_the_whole_batch():
    state = placed(W, stage=0)

    @jax.jit
    def step(state, batch):
        value, grads = jax.value_and_grad(masked_loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value

    report = zerojax.verify(step, state, zerojax.shard_batch(MASKED), loss_fn=masked_loss)
    assert report.ok, report
    assert "held against" in report.notes[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_fault_in_the_library_itself_is_caught(stage, monkeypatch):
    reduced = _parameter.Parameter.reduced
    monkeypatch.setattr(
        _parameter.Parameter, "reduced", lambda self, grad, wire: reduced(self, grad, wire) * 1.01
    )
    report = zerojax.verify(
        zerojax.train_step(lambda p, x: squares(p, x).mean()), placed(W, stage=stage), X
    )
    assert {"grads/w", "grad_norm"} <= {check.path for check in report.wrong}


# -- losses that mean something else on a part


def contrastive(params, batch, gather=lambda x: x, first=lambda: 0):
    mine, others = batch["x"] @ params["w"], gather(batch["y"] @ params["w"])
    labels = jnp.arange(len(mine)) + first() * len(mine)
    return optax.softmax_cross_entropy_with_integer_labels(mine @ others.T, labels).mean()


def empty_parts(params, batch):
    return masked_loss(params, {**batch, "mask": jnp.arange(len(batch["x"])) < batch["few"]})


PAIRS = {"x": X, "y": jnp.roll(X, 3, 1)}


@pytest.mark.parametrize(("loss", "batch", "message"), [
    (masked_loss, MASKED, r"Most likely a masked mean: use zerojax.mean\(values, where=mask\)"),
    (contrastive, PAIRS, r"compares the examples.*all_gather\(x, 'data', tiled=True\)"),
    (lambda p, x: squares(p, x).sum(), X, r"sum over the batch: .* is 8 times its.*Use a mean"),
    (masked_loss, {"x": X, "mask": jnp.arange(ROWS) < 13},
     r"6 of 8 parts.*not finite: a mean over no true element. Use zerojax.mean"),
], ids=["masked", "contrastive", "sum", "empty"])  # fmt: skip
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


def test_the_remedy_for_in_batch_negatives_passes():
    gather = lambda x: lax.all_gather(x, "data", tiled=True)
    loss = functools.partial(contrastive, gather=gather, first=lambda: lax.axis_index("data"))
    report = zerojax.verify(zerojax.train_step(loss), placed(W), PAIRS)
    assert report.ok, report
    assert report.losses["the step"] == pytest.approx(float(contrastive(W, PAIRS)), rel=1e-5)


class Normalised(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(nn.Dense(16)(x))
        return nn.Dense(4)(nn.relu(x))


def normalised(axis_name=None):
    model = Normalised(axis_name)
    fields = Normalised().init(jax.random.key(2), X)

    def loss(params, x, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        out, new = model.apply(variables, x, mutable=["batch_stats"])
        return (out**2).mean(), {**new, "out": out.mean()}

    return Model(fields["params"], loss, X, fields={"batch_stats": fields["batch_stats"]})


def test_batchnorm_is_named_and_its_remedy_passes():
    report = verified(normalised())
    assert [c.path for c in report.wrong] == ["loss on the whole batch"], report
    assert "Most likely BatchNorm: give it axis_name='data'" in report.causes[0]
    assert any(c.path.startswith("batch_stats/") for c in report.checks)
    assert "aux/out" in {c.path for c in report.checks}
    assert verified(normalised("data")).ok
    split = verified(normalised("data"), accumulate=4)
    assert "with accumulate=1 it is the same" in split.causes[0]


# -- what is not finite


def roots(params, x):
    return jnp.sqrt(jnp.sum((x @ params["w"]) ** 2))  # no gradient at 0


@pytest.mark.parametrize("x", [
    jnp.full_like(X, jnp.nan), jnp.zeros_like(X)
], ids=["loss", "gradients"])  # fmt: skip
def test_a_nan_on_both_sides_is_no_agreement(x):
    report = zerojax.verify(zerojax.train_step(roots), placed(W), x)
    assert not report.ok and not report.wrong
    assert {check.path for check in report.not_finite} >= {"grads/w", "params/w"}
    assert str(report).startswith("cannot tell")
    with pytest.raises(AssertionError, match=r"not finite on one device.*jax.debug_nans\(True\)"):
        report.raise_if_wrong()


def test_a_step_that_is_left_out_agrees():
    step = zerojax.train_step(roots, skip_nonfinite=True)
    report = zerojax.verify(step, placed(W), jnp.zeros_like(X))
    assert report.ok and "left out on both sides" in report.notes[0], report


# -- the report, and what cannot be verified


def test_the_report_prints_worst_first_and_turns_into_json():
    report = check_by_hand("sum")
    lines = str(report).splitlines()
    assert lines[0].startswith("wrong: 3 of 6 comparisons")  # Adam hides it from params
    assert [c.path for c in report.wrong] == ["opt_state/0/nu/w", "loss", "opt_state/0/mu/w"]
    excess = [c.excess for c in report.wrong]
    assert excess == sorted(excess, reverse=True)
    told = json.loads(json.dumps(report.to_dict()))
    assert told["ok"] is False and told["checks"][0]["path"] == report.checks[0].path
    assert told["losses"]["the step"] == pytest.approx(8 * told["losses"]["mean over the parts"])


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


def test_parts_are_replayed_one_at_a_time_unless_they_speak_to_each_other(monkeypatch):
    seen = []
    for name in ("_one_by_one", "_all_at_once"):
        run = getattr(_replay, name)
        monkeypatch.setattr(
            _replay, name, lambda *a, run=run, name=name: seen.append(name) or run(*a)
        )
    for mean in (jnp.mean, zerojax.mean):
        loss = jax.checkpoint(functools.partial(masked_loss, mean=mean))
        _replay.replay(loss, W, (MASKED,), _replay.Split({"data": 8}, 1))
    assert seen == ["_one_by_one", "_all_at_once"]


def test_replay_on_two_axes_numbers_the_parts_as_the_mesh_does():
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 4), ("a", "b"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )  # fmt: skip
    state = placed(W, mesh=mesh, axis=("a", "b"))

    def loss(params, x, rng):
        weight = 1 + lax.axis_index("b") + 4 * lax.axis_index("a") + jax.random.uniform(rng)
        return weight * squares(params, x).mean()

    report = zerojax.verify(zerojax.train_step(loss), state, X, jax.random.key(5))
    assert report.ok, report


def test_one_device_passes():
    state = zerojax.shard_train_state(make_state(mlp(False), ADAM), 3, mesh=make_mesh(1))
    assert zerojax.verify(zerojax.train_step(mlp(False).loss), state, mlp(False).batch).ok


def test_meshes_take_turns():
    """JAX remembers calls inside of a loss with the mesh that they were traced for."""
    test_replay_on_two_axes_numbers_the_parts_as_the_mesh_does()
    test_one_device_passes()
