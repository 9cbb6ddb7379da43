"""`zerojax.tools.replay`: which device is named, and that a healthy run is the run without it."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
import zerojax.nnx
from tests.support.schedules import scheduled
from zerojax.tools import ReplayError

BROKEN = 3  # a device
ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype("f")
HOST = {"offload": zerojax.Offload(params=True, min_bytes=0), "stacked": "w"}


class Fault:
    """Passes arrays on; on one device, flips a bit of those whose number is in `flips`."""

    def __init__(self, every=False):
        self.passed, self.flips, self.every = 0, set(), every

    def _change(self, device, x):
        x, flips = np.array(x), self.every
        if device == BROKEN:  # only its thread counts
            flips = flips or self.passed in self.flips
            self.passed += 1
        if flips:
            x.view(np.uint32)[0, 0] ^= np.random.randint(1 << 20) if self.every else 1 << 20
        return x

    def __call__(self, x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(self._change, like, jax.lax.axis_index("data"), x)

    def in_forward(self, x):
        change = jax.custom_vjp(self)
        change.defvjp(lambda x: (self(x), None), lambda _, grad: (grad,))
        return change(x)

    def in_backward(self, x):
        change = jax.custom_vjp(lambda x: x)
        change.defvjp(lambda x: (x, None), lambda _, grad: (self(grad),))
        return change(x)


def layers(params, x, change=lambda x: x):
    body = jax.checkpoint(lambda x, w: (jnp.tanh(change(x) @ w), None))
    return zerojax.mean(jax.lax.scan(body, x, params["w"])[0] ** 2)


def searching(params, x, change):
    """Has a loop whose turns send something, too."""
    turn = lambda carry: (carry[0] + 1, jax.lax.psum(change(carry[1]), "data") / 8)
    _, found = jax.lax.while_loop(lambda carry: carry[0] < 2, turn, (0, x))
    return layers(params, x, change) * (1 + jnp.mean(found**2))


def make_state():
    w = jax.random.normal(jax.random.key(0), (3, 8, 8))
    return TrainState.create(apply_fn=None, params={"w": w}, tx=optax.adam(1e-2))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("how", ["", "compiled", "with a while loop"])
@pytest.mark.parametrize(
    ("where", "what"), [("in_forward", "psum"), ("in_backward", "reduce_scatter of params/w")]
)
def test_the_device_is_named_and_nothing_is_lost(where, what, how):
    fault, loss = Fault(), searching if how == "with a while loop" else layers
    change = getattr(fault, where)
    state = zerojax.shard_train_state(make_state, stage=3)
    step = zerojax.train_step(lambda params, x: loss(params, x, change))
    step = zerojax.tools.replay(step, every=2)
    if how == "compiled":
        step = step.compile(state, ROWS)
    passed = []
    for _ in range(2):
        state, metrics = step(state, ROWS)
        before = bits((state, metrics))
        passed.append(fault.passed)
    both = passed[0] - (passed[1] - passed[0])  # runs that check; the second step is not checked
    assert both >= 6 and both % 2 == 0, passed
    fault.flips = {passed[1] + both // 2 + 1}  # in the second of them, before the next step
    says = rf"device {BROKEN} \(process 0 on .* differs first in what it sends to the {what}\."
    with pytest.raises(ReplayError, match=says) as raised:
        step(state, ROWS)
    assert raised.value.devices == (jax.devices()[BROKEN],)
    assert "params/w" in raised.value.leaves
    assert "A third run gives what the first gave." in str(raised.value)
    assert bits((state, metrics)) == before
    new, metrics = step(state, ROWS)  # which is not checked
    assert int(new.step) == 3 and set(metrics) == {"loss", "grad_norm"}


TWO = jax.make_mesh((4, 2), ("data", "other"))


def same(step):
    return step


def every_second(step):
    return zerojax.tools.replay(step, every=2)


def run(wrapped, placed, options, calls=3):
    """The state after some calls, and metrics; each call gives the old state away."""
    state = zerojax.shard_train_state(make_state, **placed)
    step = wrapped(zerojax.train_step(layers, **scheduled(options)))
    for _ in range(calls):
        old = jax.tree.leaves(state.params)
        state, metrics = step(state, ROWS)
        assert all(leaf.is_deleted() for leaf in old)
    return bits((state, metrics))


@pytest.mark.parametrize(
    ("placed", "options"),
    [
        ({"stage": 2}, {"accumulate": 2}),
        ({"stage": 3, **HOST}, {"update": "backward"}),
        ({"stage": 3, "mesh": TWO, "axis": TWO.axis_names}, {}),
        ({"stage": 3, "mesh": TWO, "axis": "data", "experts": {"other": "w"}}, {}),
    ],
    ids=["accumulate", "offload in backward", "explicit axes", "experts"],
)
def test_a_healthy_run_gives_the_same_bits(placed, options):
    assert run(every_second, placed, options) == run(same, placed, options)


def test_a_step_from_a_file_checks_and_audits_are_of_the_step(tmp_path):
    step = zerojax.train_step(layers)
    checks, state = zerojax.tools.replay(step, every=1), zerojax.shard_train_state(make_state)
    checks.compile(state, ROWS).save(tmp_path / "step.bin")
    loaded = checks.load(tmp_path / "step.bin", state, ROWS)
    audits = (zerojax.audit(each, state, ROWS) for each in (step, checks))
    assert len({str(audit) for audit in audits}) == 1
    expected = step(jax.tree.map(jnp.copy, state), ROWS)
    assert bits(loaded(state, ROWS)) == bits(expected) and loaded.replays.calls == 1
    assert repr(loaded) == "<zerojax compiled step for 8 x cpu>"


def test_a_call_that_is_refused_is_no_call():
    state = zerojax.shard_train_state(make_state, stage=3)
    step = zerojax.tools.replay(zerojax.train_step(layers), every=2)
    with pytest.raises(ValueError, match="7"):
        step(state, ROWS[:7])
    with mock.patch.object(step.replays, "check") as check:
        for _ in range(3):
            state, _ = step(state, ROWS)
    assert check.call_count == 2, "the first and the third"


def test_nnx():
    def trained(wrapped):
        layers = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        model = nnx.Sequential(*layers)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        zerojax.nnx.shard(model, optimizer, stage=3)
        loss = lambda model, x: jnp.mean((model(x) - 1) ** 2)
        step = wrapped(zerojax.nnx.train_step(loss))
        losses = [step(model, optimizer, ROWS)["loss"] for _ in range(3)]
        return bits((losses, nnx.state(model, nnx.Param), nnx.state(model, nnx.RngCount)))

    assert trained(every_second) == trained(same)


def test_a_copy_that_differs_is_named():
    """Of a tuple, whose step takes `tx`; both runs agree, as they start from the same copies."""
    tx, params = optax.sgd(1e-2), {"w": jnp.ones((3, 8, 8))}
    plan = zerojax.plan((params, tx.init(params)), stage=0)
    params, opt_state = plan.place((params, tx.init(params)))
    parts = [shard.data for shard in params["w"].addressable_shards]
    parts[BROKEN] = parts[BROKEN].at[0, 0, 0].add(1e-3)
    place = NamedSharding(plan.mesh, PartitionSpec())
    params = {"w": jax.make_array_from_single_device_arrays((3, 8, 8), place, parts)}
    step = zerojax.train_step(layers, plan=plan, tx=tx, donate=False)
    step = zerojax.tools.replay(step, every=1)
    with pytest.raises(ReplayError, match="in its copy of 0/w, in both runs") as raised:
        step((params, opt_state), ROWS)
    assert raised.value.devices == (jax.devices()[BROKEN],)


def test_a_program_that_is_not_deterministic():
    fault = Fault(every=True)
    step = zerojax.train_step(lambda params, x: layers(params, fault.in_forward(x)))
    step = zerojax.tools.replay(step, every=1)
    state = zerojax.shard_train_state(make_state, stage=3)
    with pytest.raises(ReplayError, match="xla_gpu_exclude_nondeterministic_ops=True"):
        step(state, ROWS)


def test_refusals():
    step = zerojax.train_step(layers)
    with pytest.raises(ValueError, match="every=0 must be a positive integer: the first call"):
        zerojax.tools.replay(step, every=0)
    state = zerojax.shard_train_state(make_state, stage=3)
    for other in (step.compile(state, ROWS), zerojax.eval_step(layers)):
        with pytest.raises(TypeError, match="compile the result"):
            zerojax.tools.replay(other, every=1)
    twice = zerojax.tools.replay(step, every=1)
    with pytest.raises(TypeError, match=r"already\. Pass the step that it was made from"):
        zerojax.tools.replay(twice, every=1)
    assert zerojax.verify(twice, state, ROWS).ok and twice.replays.calls == 0
    with pytest.raises(ValueError, match="Call it outside"):
        jax.jit(zerojax.tools.replay(step, every=1))(state, ROWS)


@pytest.mark.gpu_code
def test_the_checksums_move_nothing():
    """The program that checks sends on GPUs what the step itself sends."""
    plan = zerojax.plan(make_state, stage=3, mesh=zerojax.aot.mesh("8xH100"))
    args = plan.abstract(), zerojax.aot.batch(ROWS, plan)
    step = zerojax.tools.replay(zerojax.train_step(layers), every=1)
    pair = step, step.replays.checking
    programs = (each.lower(*args).compile().as_text() or "" for each in pair)
    kinds = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
    plain, checks = ({kind: text.count(f" {kind}") for kind in kinds} for text in programs)
    assert plain == checks
