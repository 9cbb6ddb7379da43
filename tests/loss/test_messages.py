"""What is said where a step, its loss or its batch is not what it should be. Nothing compiles."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support.linear import BATCH, EVAL, STEP, loss, made, noisy, placed
from tests.support.models import convnet
from tests.support.reference import make_state
from tests.support.schedules import train_step, value_and_grad
from zerojax import pad_batch, shard_batch
from zerojax.run import process_slice

NOISY, KEY, LEVELS = zerojax.train_step(noisy), jax.random.key(0), ("node", "gpu")


class WithField(TrainState):
    c: Any = None


def call(function, *args, **options):
    return lambda: function(*args, **options)


def train(loss=loss, batch=BATCH, state=placed, **options):
    """Calls a step of this loss."""
    return lambda: train_step(loss, **options)(state(), batch)


def returns(of_batch):
    return train(lambda params, batch: of_batch(batch))


def named(params, batch, *_):
    return loss(params, batch["x"])


def grads(batch, *rest, devices=8, **options):
    def use():
        plan = zerojax.plan(made(), mesh=make_mesh(devices))
        value_and_grad(named, plan, **options)(made().params, batch, *rest)

    return use


def rows(**lengths):
    """Leaves with so many rows each."""
    return {name: np.ones((n, 64), np.float32) for name, n in lengths.items()}


def on_one(value, index=0):
    return jax.device_put(value, jax.devices()[index])


def weights_elsewhere():
    return placed().replace(params={"w": on_one(jnp.ones((64, 16)), 2)})


def nnx_model():
    return nnx.Linear(64, 16, rngs=nnx.Rngs(0))


def with_a_key_for_streams():
    model = nnx_model()
    pair = zerojax.nnx.shard(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
    step = zerojax.nnx.train_step(lambda model, x, rngs: model(x + rngs.noise()).mean())
    step(*pair, BATCH, KEY)


def at_a_traced_rate(rate):
    return zerojax.shard_train_state(lambda: made(optax.sgd(optax.linear_schedule(rate, 0.0, 9))))


def masked(params, batch):
    return zerojax.mean(batch @ params["w"], where=batch[:, 0] > 0)


def pair():
    return zerojax.plan((made().params, ())).place((made().params, ()))


def on_seven():
    return zerojax.shard_train_state(made(), mesh=make_mesh(7))


def of_other_plan():
    plan = zerojax.plan(made(), stage=1, mesh=make_mesh(2))
    zerojax.train_step(loss, plan=plan)(placed(), BATCH)


def field(new, c=None, name="c"):
    """Calls a step whose loss makes `new(c)` of the field `c`."""

    def state():
        fields = {"n": jnp.int32(0), "key": KEY} if c is None else c
        tx = optax.sgd(0.1)
        made_with = WithField.create(apply_fn=None, params=made().params, tx=tx, c=fields)
        return zerojax.shard_train_state(made_with)

    of = lambda params, batch, **fields: (loss(params, batch), {"c": new(fields["c"])})
    return train(of, state=state, mutable=name)


def normalized(**placing):
    """Calls a step of a network that was written for a `pmap` over an axis 'batch'."""

    def use():
        model = convnet(False, axis_name="batch")
        state = zerojax.shard_train_state(make_state(model, optax.adam(1e-3)), **placing)
        zerojax.train_step(model.loss, mutable="batch_stats")(state, model.batch)

    return use


IN_ANOTHERS_PLACE = [
    (lambda: STEP(BATCH, placed()), r"in the other order. Call step\(state, batch"),
    (lambda: STEP(placed()), r"called as step\(state, batch\).*argument: 'batch'"),
    (lambda: EVAL(), r"called as step\(state, batch\).*argument: 'state'"),
    (lambda: STEP(placed(), BATCH, BATCH, BATCH), r"called as step\(state.*too many"),
    (lambda: STEP(placed(), BATCH, key=1), r"called as step\(state.*'key'"),
    (lambda: STEP(placed(), {"id": "a"}), r"batch leaf id is a str.*leave it out"),
    (lambda: STEP(placed(), np.array(["a"])), r"the batch is a ndarray of <U1"),
    (lambda: STEP(placed(), iter([BATCH])), r"a list_iterator. Pass one batch of it"),
    (lambda: STEP(None, BATCH), r"the state is None. Call step\(state, batch\)"),
    (lambda: STEP(BATCH, BATCH), r"the state is an array of shape \(8, 64\). Call step"),
    (lambda: STEP((placed(), {}), BATCH), r"Take it apart: state, metrics = step"),
    (lambda: STEP(nnx_model(), BATCH), r"nnx model, not a state.*nnx.shard.*nnx.train_step"),
    (lambda: STEP(nn.Dense(16), BATCH), r"the Flax module Dense, not a state.*init"),
    (lambda: zerojax.train_step(nnx_model()), r"the loss is a Linear. Pass a function"),
    (lambda: zerojax.nnx.train_step(nnx_model()), r"the loss is a Linear.*model, batch"),
    (lambda: zerojax.train_step(made()), r"the loss is a TrainState. Pass"),
    (train(noisy), r"the loss with \(params, batch\): .*Pass .* key after.*random.key\(n\)"),
    (lambda: STEP(placed(), BATCH, KEY), r"\(params, batch, rng\): .*leave it out, step"),
    (lambda: shard_batch(BATCH, made()), r"TrainState, which carries no plan.*shard_train_state"),
    (
        lambda: pad_batch(BATCH, like=nnx_model()),
        r"Linear, which carries.*optimizer from zerojax.n",
    ),
    (
        lambda: process_slice(16, like=8),
        r"like= has the type int, which carries no plan\. Pass the plan, a s",
    ),
    (lambda: NOISY(placed(), BATCH, 0), r"no random key. Pass a step jax.random.key\(0\) after"),
    (
        lambda: jax.jit(at_a_traced_rate)(0.1),
        r"reads a value that jax.jit traces: float32\[\]. Make and shard the state outside of jax.*"
        r"is a schedule, or optax.inject_hyperparams",
    ),
    (lambda: zerojax.mean(BATCH, where=BATCH), r"float32.*takes no weights. Pass weights > 0"),
    (lambda: pad_batch(["a"]), r"batch leaf 0 is a str.*leave it out of the batch"),
]
RETURNED = [
    (returns(lambda b: b), r"must be a scalar, got shape \(1, 64\). Reduce it"),
    (returns(lambda b: b.sum().astype(int)), r"float dtype, got int32. Convert it"),
    (returns(lambda b: "no"), r"scalar array, got str. Return a scalar"),
    (returns(lambda b: (b.sum(), "no")), r"aux is a str, not a numeric array.*Leave it out"),
    (returns(lambda b: (b.sum(), {"k": KEY})), r"aux\['k'\].*key.*Leave it out"),
    (returns(lambda b: (b.sum(), 1.0, 2.0)), r"a tuple of 3. Return a scalar, or \(loss, aux\)"),
    (grads(rows(x=8), has_aux=True), r"must return \(loss, aux\).*leave has_aux out"),
    (field(lambda c: {"n": c["n"]}), r"without c/key, which is in the state. Return.*as None"),
    (field(lambda c: {**c, "m": 1}), r"with c/m, which is not in the state. Return every leaf"),
    (field(lambda c: {**c, "n": 0.5 * c["n"]}), r"c/n, .*float32\[\], .* int32\[\].*to round"),
    (field(lambda c: {**c, "n": jnp.zeros(2, int)}), r"c/n, .*int32\[2\], and .*int32\[\]"),
    (field(lambda c: {**c, "key": jnp.uint32([1, 2])}), r"c/key, .* as uint32\[2\], and .*key"),
    (field(None, name="tx"), r"names 'tx', .* has an optimizer,.*only arrays: 'c'\."),
    (field(None, name="replace"), r"names 'replace', .* has a method,.*only arrays: 'c'\."),
    (field(None, c=(), name="tx"), r"This state has none .*: add one to its class"),
]
WRONG = [
    (lambda: STEP(placed(), on_one(BATCH, 3)), r"batch is only on device 3.*mesh has 8.*shard_"),
    (train(state=weights_elsewhere), r"leaf params/w is only on device 2.*plan.place\(state\)"),
    (lambda: NOISY(placed(), BATCH, on_one(KEY)), r"the rng is only on device 0.*random.key"),
    (train(state=made), r"not placed.*First: state = zerojax.shard_train"),
    (train(state=pair), r"a tuple cannot carry its plan.*plan=plan, tx=tx\), with plan = zerojax"),
    (train(state=lambda: {"params": pair()[0], "opt_state": ()}), r"a dict cannot carry its plan"),
    (
        train(masked, np.ones((32, 64), np.float32)),
        r"mask of shape \(4,\) .* values of shape \(4, 16\), .*one device's .*pass mask\[:, None\]",
    ),
    (of_other_plan, r"stage 3 on 8 devices.*stage 1 on 2.*plan.place"),
]
# All that the message says of a batch of 60 rows.
SIXTY = (
    r"batch leaf x has 60 examples.*8 devices. Use 56 or 64 examples, or pad: "
    r"batch, mask = zerojax.pad_batch\(batch{}\), with zerojax.mean\(values, where=mask\) in"
)
UNEVEN = r"batch leaf x has 64 and batch leaf y has 8. Give every leaf one row"
BATCHES = [
    (train(named, rows(x=60)), SIXTY.format(", like=state")),
    (grads(rows(x=60)), SIXTY.format(", like=plan")),
    (lambda: shard_batch(rows(x=60)), SIXTY.format("")),
    (
        train(named, rows(x=64), accumulate=3),
        r"8 devices x 3 .* 48 or 72.*, accumulate=3, like=state\)",
    ),
    (train(named, rows(x=60), state=on_seven), r"60.*7 devices.*pad_batch\(batch, like=state\)"),
    (lambda: shard_batch(np.ones((0, 2))), r"the batch has 0 examples.*Use 8 examples"),
    (train(named, rows(x=64, y=8)), UNEVEN),
    (
        grads(rows(x=64), np.zeros(7)),
        r"argument 3 of the loss has 7.*Close over anything.*statistics",
    ),
    (lambda: NOISY(placed(), BATCH, jax.random.split(KEY, 4)), r"8 and argument 3 .* loss has 4"),
    (grads(rows(x=2), np.uint32([3, 5]), devices=2), r"3 of the loss is uint32\[2\] .*random.key"),
    (lambda: process_slice(30), r"30 rows.*over 8.*a multiple of 8: .*pad_batch\(batch, to="),
]
MIXED = {"x": np.ones((6, 32), np.float32), "y": np.arange(32)}
SPECS = [
    (
        {"x": P("model")},
        r"P\('model',?\) for batch leaf x of shape \(6, 32\).*split over 'data'. Use "
        r"P\('data'\).*P\(None, 'data'\).*P\(\) for what is replicated",
    ),
    ({"y": P(None, "data")}, r"batch leaf y of shape \(32,\).*Use P\('data'\)"),
    ({"y": "data"}, r"'data' for batch leaf y.*Use P\('data'\)"),
    ({"x": None}, r"batch leaf x has 6 and batch leaf y has 32|y has 32.*x has 6"),
    ({"z": P()}, r"batch_specs= does not fit the batch.*Give one PartitionSpec for all of it"),
]
for specs, says in SPECS:
    specs = {"x": P(None, "data"), "y": P("data"), **specs}
    BATCHES += [(train(named, MIXED, batch_specs=specs), says)]
    BATCHES += [(call(shard_batch, MIXED, batch_specs=specs), says)]
PADDED = [
    (
        call(pad_batch, np.ones(20), to=16),
        r"to=16 must be.*divides over 8 devices, and at least the 20 examples that the batch has. "
        r"Use to=24 or a larger multiple of 8",
    ),
    (call(pad_batch, rows(x=5), to=12), r"to=12.*5 examples that batch leaf x has. Use to=8"),
    (call(pad_batch, np.ones(5), to=16, accumulate=4), r"8 devices x 4 .*Use to=32 or.*of 32"),
    (call(pad_batch, np.ones(5), to=8.0), r"to=8.0 must be an integer"),
    (call(pad_batch, np.ones((0, 2))), r"the batch has 0 examples in this process.*Pass to="),
    (call(pad_batch, rows(x=5, y=6)), r"batch leaf x has 5 and batch leaf y has 6. Give"),
    (call(pad_batch, {"n": 3}), r"no leaf with examples to pad.*at least one array.*batch_specs="),
    (call(pad_batch, rows(x=5), batch_specs=P("model")), r"batch leaf x.*Use P\('data'\)"),
]
NAMES = [
    (normalized(), r"axis 'batch', and its batch is split over 'data'. .*axis_name='data' in Ba"),
    (
        normalized(axis=LEVELS, mesh=zerojax.mesh(node=2, gpu=4)),
        r"over \('node', 'gpu'\). Name that",
    ),
    (train(lambda *_: nowhere), r"^name 'nowhere' is not defined"),  # noqa: F821
]
SAID = {
    TypeError: [*IN_ANOTHERS_PLACE, *RETURNED],
    ValueError: [*WRONG, *BATCHES, *PADDED],
    NameError: NAMES,
    AttributeError: [(with_a_key_for_streams, r"pass the step a nnx.Rngs after the batch, not a")],
}


@pytest.mark.parametrize(
    ("error", "use", "says"), [(error, *row) for error, rows in SAID.items() for row in rows]
)
def test_what_is_said_of(error, use, says):
    with pytest.raises(error, match=says):
        use()


@pytest.mark.parametrize(("stage", "less"), [(2, "stage=3, more"), (3, "more devices, more")])
def test_out_of_memory_says_what_fills_it_and_what_needs_less(stage, less):
    def exhausted(params, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        zerojax.train_step(exhausted)(placed(stage=stage), BATCH)
    (note,) = [note for note in raised.value.__notes__ if note.startswith("Out of memory")]
    params = "4.0 KiB" if stage == 2 else "512 B"
    assert f"parameters {params}, optimizer state 1.0 KiB, other 4 B, gradients 512 B" in note
    largest = "params/w 4.0 KiB" if stage == 2 else "params/w 512 B, opt_state/0/mu/w 512 B"
    looks = ("print(plan)", "zerojax.audit(step, state, batch)", "zerojax.forecast(")
    for said in (f"the largest leaves are {largest}", less, "accumulate=", *looks):
        assert said in note


@pytest.mark.parametrize("narrow", ["compute", "param"])
def test_a_carry_that_changes_its_dtype_is_told_of_precision(narrow):
    """In float32 it would run; the carry begins in the dtype that the loss writes."""
    precision = zerojax.Precision(**{narrow: "bfloat16"})
    state = zerojax.shard_train_state(made(), precision=precision)

    def trace(begin, state):
        def of(params, batch):
            turn = lambda n, x: jnp.tanh(x.astype(params["w"].dtype))
            return jnp.mean(jax.lax.fori_loop(0, 2, turn, begin(batch, params)))

        return zerojax.train_step(of).trace(state, BATCH)

    message = r"(?s)equal types.*parameters in bfloat16 .*jnp.zeros\(shape, x.dtype\), or cast what"
    with pytest.raises(TypeError, match=message):
        trace(lambda x, _: jnp.ones(x.shape), state)
    trace(lambda x, params: jnp.ones(x.shape, params["w"].dtype), state)
    with pytest.raises(TypeError, match=r"equal types(?s:(?!parameters in).)*$"):
        trace(lambda x, _: jnp.ones(x.shape, jnp.int32), placed())


def test_a_step_does_as_jax_does_where_that_is_right():
    """It moves what was never put anywhere, and calls a loss that looks like another."""

    def configured(config, params, batch):
        return config * loss(params, batch)

    @functools.wraps(configured)
    def disguised(params, batch):
        return configured(2.0, params, batch)

    state = placed().replace(params={"w": jnp.full((64, 16), 2.0)})
    new, metrics = zerojax.train_step(jax.jit(disguised))(state, jnp.asarray(BATCH))
    assert metrics["loss"] == 2 * 4 * 4096
    assert new.params["w"].sharding == placed().params["w"].sharding
