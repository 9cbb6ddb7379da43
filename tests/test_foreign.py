"""Programs of other libraries at stage 3, and of some at stage 0: one device's numbers, the
collectives of the plan, and how many lines of the authors' program have changed.

`make foreign` installs the libraries and runs all. The test extra has two of them: one runs always,
and the other in CI."""

import functools
import re

import jax
import pytest
from jax.sharding import AxisType

import zerojax
import zerojax.nnx
from tests.foreign import HEAVY, LIGHT, PACKAGES, PORTED, TURNS, program
from tests.foreign.flax_sources import digits
from tests.support.reference import assert_close, tree_bytes

STEPS, DEVICES = 2, 8
QUICK = {"xla_backend_optimization_level": 0}  # compile sooner; values are checked, not speed
SCALARS = 4  # the loss and the like

# How these libraries use JAX and each other is theirs to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@functools.cache
def one_device(name):
    """The state and losses of a plain loop, or of the authors' own step."""
    one = program(name)
    step = one.port.step if one.port else plain_step(one)
    state, losses = one.make(), []
    for _ in range(STEPS):
        state, loss = step(state, one.batch)
        losses.append(float(loss))
    return state, losses


def plain_step(one):

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(state, batch):
        model_of = getattr(state, "model_of", lambda params: params)
        fields = {name: getattr(state, name) for name in one.mutable}

        def loss(params):
            result = one.loss(model_of(params), batch, **fields)
            return result if one.mutable else (result, {})

        (value, fields), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, **fields), value

    return step


def marks(name, stage):
    if stage == 0 or name not in LIGHT:
        return pytest.mark.slow
    return pytest.mark.ci


STAGES = [(name, stage) for name in LIGHT | HEAVY for stage in (0, 3)]
STAGES += [(name, 3) for name in PACKAGES | PORTED]
# Of the text of each: lines that were added, and lines that were left out.
CHANGED = {
    "flax_lm1b": (4, 18),
    "flax_imagenet": (5, 40),
    "flax_seq2seq": (4, 11),
    "flax_ppo": (3, 1),
    "huggingface_bert": (5, 11),
    "huggingface_clip": (8, 9),
    "diffusers_unet": (3, 6),
}


@pytest.mark.parametrize(
    ("name", "stage"), [pytest.param(*each, marks=marks(*each)) for each in STAGES]
)
def test_program(name, stage):
    one = program(name)
    wanted, losses = one_device(name)
    if one.port:
        assert one.port.lines == CHANGED[name]
    mesh = jax.make_mesh((DEVICES,), (one.axis,), axis_types=(AxisType.Auto,))
    state = zerojax.shard_train_state(one.make(), stage, mesh=mesh)
    step = zerojax.train_step(
        one.loss, mutable=one.mutable, schedule=zerojax.Schedule(compiler_options=QUICK)
    )
    args = (one.batch,) if one.rng is None else (one.batch, one.rng)
    report = zerojax.audit(step, state, *args)
    if stage == 3 and one.unmet:
        findings = report.findings()
        assert findings and all(re.search(one.unmet, finding) for finding in findings)
    else:
        report.check()
    if name in LIGHT | HEAVY:  # the audit knows what others send, and which weights rest unused
        fields = [getattr(state, field) for field in one.mutable]
        check_traffic(report, state.tx.plan, tree_bytes(fields))
    zerojax.verify(step, state, *args).check()
    for loss in losses:
        state, metrics = step(state, *args)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    check_placement(state)
    state = zerojax.unpad(state)
    assert_close(state.params, wanted.params, 1e-4)
    for field in one.mutable:
        assert_close(getattr(state, field), getattr(wanted, field), 1e-4)


def check_traffic(report, plan, averaged):
    """In bytes of whole arrays, padded: nothing that is sharded is summed whole."""
    moved = lambda kind, ways: report.totals.get(kind, 0) / (ways * (DEVICES - 1) / DEVICES)
    cut = [leaf for leaf in plan.params if leaf.dim is not None]
    sharded = sum(DEVICES * leaf.bytes_per_device(plan.mesh) for leaf in cut)
    whole = sum(leaf.nbytes for leaf in plan.params if leaf.dim is None)
    assert moved("reduce-scatter", 1) == sharded
    scalars = 4 * (SCALARS + len(cut))  # with the part of each in the norm
    assert 0 <= moved("all-reduce", 2) - whole <= averaged + scalars
    if plan.stage == 0:
        assert sharded == moved("all-gather", 1) == 0
    else:  # used in backward alone or in forward alone, a weight is gathered once
        assert sharded > whole and sharded <= moved("all-gather", 1) <= 2 * sharded


def check_placement(state):
    plan = state.tx.plan
    for value, leaf in zip(jax.tree.leaves(state), plan.leaves, strict=True):
        held = value.addressable_shards[0].data.nbytes
        assert held == leaf.bytes_per_device(plan.mesh), leaf.path


@pytest.mark.slow
def test_networks_that_take_turns():
    """In loops of one's own, with a step for each loss."""
    one = TURNS()
    wanted = {name: make() for name, make in one.make.items()}
    states = {name: zerojax.shard_train_state(make, 3) for name, make in one.make.items()}
    steps = {}
    for turn in dict.fromkeys(one.turns):
        check_turn(*turn, states, one.batch)
        steps[turn] = jax.jit(jax.value_and_grad(turn[1])), compiled(own_step(*turn))
    for _ in range(STEPS):
        for name, loss in one.turns:
            plain, step = steps[name, loss]
            value, _ = plain(wanted[name].params, one.batch, wanted)
            wanted[name] = one.theirs(name, wanted, one.batch)
            states[name], metrics = step(states.pop(name), one.batch, states)
            assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
        wanted, states = one.after(wanted), one.after(states)
    for name, state in states.items():
        check_placement(state)
        state = zerojax.unpad(state)
        assert_close((state.params, state.extra), (wanted[name].params, wanted[name].extra), 1e-4)


compiled = functools.partial(jax.jit, donate_argnums=0, compiler_options=QUICK)


def own_step(name, loss):
    """As a user writes it: a loss closes over the networks that it reads, without their padding."""

    def step(state, batch, others):
        states = {key: zerojax.unpad(each) for key, each in {**others, name: state}.items()}
        of_params = lambda params, batch: loss(params, batch, states)
        plan = state.tx.plan
        value, grads = zerojax.value_and_grad(of_params, plan)(state.params, batch)
        return plan.constrain(state.apply_gradients(grads=grads)), {"loss": value}

    return step


def check_turn(name, loss, states, batch):
    others = {key: state for key, state in states.items() if key != name}
    step = own_step(name, loss)
    bound = compiled(lambda state, batch: step(state, batch, others))
    zerojax.audit(bound, states[name], batch).check()
    whole = {key: zerojax.unpad(state) for key, state in states.items()}
    like = zerojax.train_step(lambda params, batch: loss(params, batch, whole))
    zerojax.verify(bound, states[name], batch, like=like).check()


@pytest.mark.slow
def test_a_tutorial_of_nnx():
    one = digits()
    assert one.lines == (4, 11)
    pure = one.step.pure(*one.args)
    zerojax.audit(*pure).check()
    zerojax.verify(*pure).check()
    losses = [float(one.step(*one.args)["loss"]) for _ in range(STEPS)]
    assert losses == pytest.approx(one.losses, rel=1e-4)
