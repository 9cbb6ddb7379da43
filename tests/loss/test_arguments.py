"""Arguments of a step: swapped, left out, on one device, or too large."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.nnx
from tests import linear
from tests.conftest import make_mesh
from tests.linear import BATCH, EVAL, STEP, loss, made, noisy, placed
from tests.models import mlp
from tests.placed import place
from tests.reference import make_state


def on_one(value, index=0):
    return jax.device_put(value, jax.devices()[index])


def test_arrays_put_on_one_device_are_named():
    state = placed()
    replaced = state.replace(params={"w": on_one(jnp.ones((64, 16)), 2)})
    keyed = zerojax.train_step(noisy)
    cases = [
        (
            STEP,
            (state, on_one(BATCH, 3)),
            r"the batch was put on device 3 alone.*mesh has 8.*shard_",
        ),
        (EVAL, (state, on_one(BATCH)), r"the batch was put on device 0 alone.*zerojax.shard_batch"),
        (STEP, (replaced, BATCH), r"leaf params/w was put on device 2 alone.*plan.place\(state\)"),
        (keyed, (state, BATCH, on_one(jax.random.key(0))), r"the rng was put on.*jax.random.key"),
    ]
    for step, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            step(*arguments)
    assert not state.params["w"].is_deleted()


def test_arrays_on_the_default_device_are_moved():
    """JAX moves what was never put anywhere; so may a step."""
    state = placed()
    replaced = state.replace(params={"w": jnp.full((64, 16), 2.0)})
    new, metrics = STEP(replaced, jnp.asarray(BATCH))
    assert metrics["loss"] == 4 * 4096
    assert new.params["w"].sharding == placed().params["w"].sharding


class Exhausted:
    """In place of a compiled step: no memory left."""

    def __call__(self, *_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")


@pytest.mark.parametrize(("stage", "less"), [(2, "stage=3, more"), (3, "more devices, more")])
def test_out_of_memory_says_what_fills_it_and_what_needs_less(stage, less, monkeypatch):
    state, step = placed(stage=stage), zerojax.train_step(loss)
    monkeypatch.setattr(step, "for_args", lambda *_: Exhausted())
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        step(state, BATCH)
    (note,) = raised.value.__notes__
    params = "4.0 KiB" if stage == 2 else "512 B"
    assert f"parameters {params}, optimizer state 1.0 KiB, other 4 B, gradients 512 B" in note
    largest = r"params/w 4.0 KiB" if stage == 2 else r"params/w 512 B, opt_state/0/mu/w 512 B"
    assert re.search(rf"the largest leaves are {largest}", note)
    assert less in note and "accumulate=" in note and "jax.checkpoint" in note
    for look in ("print(plan)", "zerojax.audit(step, state, batch)", "zerojax.forecast("):
        assert look in note


def model():
    return nnx.Linear(64, 16, rngs=nnx.Rngs(0))


def nnx_pair():
    made = model()
    return made, nnx.Optimizer(made, optax.adam(0.1), wrt=nnx.Param)


WRONG = {
    "other order": (lambda: STEP(BATCH, placed()), r"in the other order. Call step\(state, batch"),
    "no batch": (lambda: STEP(placed()), r"called as step\(state, batch\).*argument: 'batch'"),
    "nothing": (lambda: EVAL(), r"called as step\(state, batch\).*argument: 'state'"),
    "four": (lambda: STEP(placed(), BATCH, BATCH, BATCH), r"called as step\(state.*too many"),
    "other name": (lambda: STEP(placed(), BATCH, key=1), r"called as step\(state.*'key'"),
    "string": (lambda: STEP(placed(), "abc"), r"the batch is a str, which JAX does not accept"),
    "name in it": (lambda: STEP(placed(), {"id": "a"}), r"batch leaf id is a str.*leave it out"),
    "objects": (lambda: STEP(placed(), np.array(["a"])), r"the batch is a ndarray of <U1"),
    "loader": (lambda: STEP(placed(), iter([BATCH])), r"a list_iterator. Pass one batch of it"),
    "None": (lambda: STEP(None, BATCH), r"the state is None. Call step\(state, batch\)"),
    "array": (lambda: STEP(BATCH, BATCH), r"the state is an array of shape \(8, 64\). Call step"),
    "step's pair": (lambda: STEP((placed(), {}), BATCH), r"Take it apart: state, metrics = step"),
    "lower": (lambda: STEP.lower(BATCH, placed()), r"in the other order"),
    "nnx model": (lambda: STEP(model(), BATCH), r"a Flax nnx model, not a state.*nnx.shard"),
    "nnx pair": (lambda: STEP(nnx_pair(), BATCH), r"a Flax nnx model, not a state.*nnx.shard"),
    "nnx, three": (lambda: STEP(*nnx_pair(), BATCH), r"a Flax nnx model, not a state"),
    "nnx to eval": (lambda: EVAL(model(), BATCH), r"a Flax nnx model, not a state.*nnx.train_step"),
    "linen": (lambda: STEP(nn.Dense(16), BATCH), r"the Flax module Dense, not a state.*init"),
    "linen placed": (lambda: zerojax.shard_train_state(nn.Dense(16)), r"module Dense.*TrainState"),
    "nnx as loss": (lambda: zerojax.train_step(model()), r"the loss is a Linear. Pass a function"),
    "linen as loss": (lambda: zerojax.eval_step(nn.Dense(1)), r"the loss is a Dense. Pass a funct"),
    "nnx, itself": (lambda: zerojax.nnx.train_step(model()), r"the loss is a Linear.*model, batch"),
    "no loss": (lambda: zerojax.train_step(None), r"the loss is a NoneType. Pass a function"),
    "state as loss": (lambda: zerojax.train_step(made()), r"the loss is a TrainState. Pass"),
    "plan of 3": (lambda: zerojax.train_step(loss, plan=3), r"takes a plan, got 3.*plan\(state"),
    "uncalled": (lambda: zerojax.train_step(loss, tx=optax.adam), r"tx= is adam, not an.*call it"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_one_thing_in_anothers_place(case):
    use, message = WRONG[case]
    with pytest.raises(TypeError, match=message):
        use()


def test_state_not_placed():
    made = mlp(False)
    step = zerojax.train_step(made.loss)
    with pytest.raises(ValueError, match=r"not placed.*First: state = zerojax.shard_train"):
        step(make_state(made, optax.adam(1e-3)), made.batch)
    cannot = r"a {} cannot carry its plan.*Pass it: .*plan=plan, tx=tx\), with plan = zerojax.plan"
    pair = zerojax.plan((made.params, ())).place((made.params, ()))
    for state in (pair, {"params": pair[0], "opt_state": ()}):
        with pytest.raises(ValueError, match=cannot.format(type(state).__name__)):
            step(state, made.batch)


def test_state_placed_for_another_stage_or_mesh():
    made = mlp(False)
    state = place(made, 1)
    with pytest.raises(ValueError, match=r"for stage 3.*for stage 1. Place it again.*stage=3"):
        zerojax.train_step(made.loss, stage=3)(state, made.batch)
    other = zerojax.plan(make_state(made, optax.adam(1e-3)), stage=1, mesh=make_mesh(2))
    with pytest.raises(ValueError, match=r"stage 1 on 8 devices.*stage 1 on 2.*plan.place"):
        zerojax.train_step(made.loss, plan=other)(state, made.batch)


@pytest.mark.parametrize("takes_key", [True, False])
def test_a_key_too_few_or_too_many(takes_key):
    state, _, batch = linear.start()
    plain = lambda params, batch: jnp.mean(batch @ params["w"])
    noisy = lambda params, batch, rng: plain(params, batch)
    step = zerojax.train_step(noisy if takes_key else plain)
    key = () if takes_key else (jax.random.key(0),)
    given = "params, batch" if takes_key else "params, batch, rng"
    remedy = r"Give .* key after.*jax.random.key\(n\)" if takes_key else "leave it out, step"
    with pytest.raises(TypeError, match=rf"the loss with \({given}\): .*{remedy}") as raised:
        step(state, batch, *key)
    assert "mutable=" not in str(raised.value)


def test_a_loss_that_looks_like_another_is_called_all_the_same():
    state, _, batch = linear.start()

    def configured(config, params, batch):
        return config * jnp.mean(batch @ params["w"])

    @functools.wraps(configured)
    def loss(params, batch):
        return configured(2.0, params, batch)

    assert zerojax.train_step(jax.jit(loss))(state, batch)[1]["loss"] == 128
