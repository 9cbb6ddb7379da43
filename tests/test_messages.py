"""What users get wrong first, and what they are told: the leaf, the value and the remedy."""

import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx

BATCH = np.ones((8, 64), np.float32)


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def noisy(params, batch, rng):
    return loss(params, batch) + jax.random.normal(rng)


def made(tx=None):
    params = {"w": jnp.ones((64, 16))}
    return TrainState.create(apply_fn=None, params=params, tx=tx or optax.adam(0.1))


def placed(tx=None, stage=3):
    return zerojax.shard_train_state(made(tx), stage)


STEP, EVAL = zerojax.train_step(loss), zerojax.eval_step(loss)


# -- arrays that are gone


def test_a_donated_state_is_refused_wherever_it_is_passed(tmp_path):
    state = placed()
    new, _ = STEP(state, BATCH)
    path = str(tmp_path / "there")
    uses = {
        "step": lambda s: STEP(s, BATCH),
        "eval": lambda s: EVAL(s, BATCH),
        "save": lambda s: zerojax.save(path, s),
        "export": lambda s: zerojax.export_safetensors(path, s),
        "verify": lambda s: zerojax.verify(STEP, s, BATCH),
        "gather": zerojax.gather_params,
        "shard": zerojax.shard_train_state,
        "place": lambda s: zerojax.plan(s).place(s),
    }
    with zerojax.Checkpoints(tmp_path / "all") as checkpoints:
        uses["checkpoints"] = lambda s: checkpoints.save(1, s, force=True)
        for name, use in uses.items():
            with pytest.raises(ValueError, match=r"donated.*state, metrics = step\(") as raised:
                use(state)
            assert "state leaf step is gone" in str(raised.value), name
    assert list(tmp_path.iterdir()) == [tmp_path / "all"], "no half file"
    STEP(new, BATCH)


def test_a_state_of_which_one_leaf_is_gone_is_refused_whole():
    state = placed()
    w = state.params["w"]
    w.delete()
    for step in (STEP, EVAL):
        with pytest.raises(ValueError, match=r"state leaf params/w is gone"):
            step(state, BATCH)
    assert not state.step.is_deleted()


def test_a_donated_batch_is_not_called_a_state():
    batch = {"x": zerojax.shard_batch(BATCH)}
    batch["x"].delete()
    step = zerojax.train_step(lambda params, batch: loss(params, batch["x"]))
    with pytest.raises(ValueError, match=r"batch leaf x was donated.*Pass a new batch"):
        step(placed(), batch)


def test_an_eval_step_is_still_what_jit_returns():
    state = placed()
    compiled = EVAL.lower(state, BATCH).compile()
    assert compiled(state, BATCH)["loss"] == EVAL(state, BATCH)["loss"] == 4096
    assert EVAL.trace(state, BATCH).jaxpr.out_avals[0].shape == ()
    assert EVAL.eval_shape(state, BATCH)["loss"].shape == ()
    assert jax.jit(lambda s: EVAL(s, BATCH)["loss"])(state) == 4096


# -- arrays put on one device by hand


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


# -- out of memory


class Exhausted:
    """In place of a compiled step: no memory left."""

    def __call__(self, *_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")


@pytest.mark.parametrize(("stage", "less"), [(2, "stage=3, more"), (3, "more devices, more")])
def test_out_of_memory_says_what_is_held_and_what_needs_less(stage, less, monkeypatch):
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


# -- optimizers that want more than gradients


@pytest.mark.parametrize(
    ("tx", "wants"),
    [
        (optax.lbfgs(), "value=, grad=, value_fn="),
        (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "value="),
        (optax.polyak_sgd(), "value="),
    ],
)
def test_optimizers_whose_update_takes_more(tx, wants):
    message = rf"takes {wants} in addition to the gradients.*zerojax.value_and_grad.*docs/loop.md"
    with pytest.raises(TypeError, match=message):
        STEP(placed(tx), BATCH)


# -- one thing in another's place


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


# -- and the rest: what is passed, and what is said; nothing compiles

PLAN = zerojax.plan(made())
PROGRAM = pathlib.Path(__file__).parent / "programs" / "step3-8xH100-jax0.12.hlo"


def train(**options):
    return lambda: zerojax.train_step(loss, **options)


def audit(**options):
    return lambda: zerojax.audit(PROGRAM.read_text(), **options)


def check(**limits):
    return lambda: zerojax.audit(PROGRAM.read_text(), gpu="H100").findings(**limits)


def forecast(batch=BATCH, **options):
    return lambda: zerojax.forecast(loss, made, batch, **{"gpus": "8xH100"} | options)


def table(params=7e9, devices=8, **options):
    return lambda: zerojax.memory_table(params, devices, **options)


def grads_of(*args):
    return lambda: zerojax.value_and_grad(loss, PLAN)(*args)


SAID = {
    "mutable, a number": (train(mutable=3), r"mutable=3 does not name fields.*batch_stats"),
    "mutable, None": (lambda: zerojax.eval_step(loss, mutable=None), r"mutable=None does not name"),
    "mutable, numbers": (train(mutable=[1]), r"mutable=\[1\] does not name fields"),
    "mutable, params": (train(mutable="params"), r"names 'params', which the optimizer updates"),
    "regather": (train(regather="no"), r"regather='no' must be True or False"),
    "donate": (train(donate=None), r"donate=None must be True or False"),
    "skip": (train(skip_nonfinite=3), r"skip_nonfinite=3 must be True or False"),
    "eval's plan": (lambda: zerojax.eval_step(loss, plan="p"), r"takes a plan, got 'p'. Make"),
    "grads of None": (lambda: zerojax.value_and_grad(None, PLAN), r"the loss is a NoneType. Pass"),
    "grads, string": (grads_of(PLAN.abstract().params, "x!"), r"batch leaf 0 is a str"),
    "grads, swapped": (lambda: zerojax.value_and_grad(PLAN, loss), r"takes a plan, got <function"),
    "gathered string": (lambda: zerojax.gather_params("a"), r"the state is a str, which JAX does"),
    "gathered plan": (lambda: zerojax.gather_params(PLAN), r"the state is a Plan, which JAX does"),
    "gathered shapes": (
        lambda: zerojax.gather_params(PLAN.abstract()), r"leaf step is a ShapeDtypeStruct, which"
    ),
    "batch, string": (lambda: zerojax.shard_batch({"n": "a"}), r"batch leaf n is a str.*leave it"),
    "batch, strings": (lambda: zerojax.shard_batch(np.array(["a"] * 8)), r"a ndarray of <U1, whi"),
    "batch, objects": (lambda: zerojax.shard_batch(np.array([None] * 8)), r"ndarray of object"),
    "batch, shapes": (
        lambda: zerojax.shard_batch(jax.ShapeDtypeStruct((8, 3), "float32")), r"a ShapeDtypeStruct"
    ),
    "slice of 8.0": (lambda: zerojax.process_slice(8.0), r"8.0 rows.*Use a multiple of 8"),
    "slice of '8'": (lambda: zerojax.process_slice("8"), r"'8' rows.*Use a multiple of 8"),
    "slice of None": (lambda: zerojax.process_slice(None), r"None rows.*Use a multiple of 8"),
    "audit's gpu": (audit(gpu=3), r"gpu=3 names no GPU. Name one of T4"),
    "audit, accumulate": (audit(accumulate=0), r"accumulate=0 must be a positive integer"),
    "audit's plan": (audit(plan=3), r"takes a plan, got 3"),
    "audit of bytes": (lambda: zerojax.audit(b"HloModule"), r"something compiled.*got a bytes"),
    "audit of lowered": (
        lambda: zerojax.audit(STEP.lower(placed(), BATCH)), r"Pass lowered.compile\(\)"
    ),
    "limit, string": (check(max_peak_bytes="1GB"), r"max_peak_bytes='1GB' must be a number of"),
    "limit, negative": (check(max_peak_bytes=-1), r"max_peak_bytes=-1 must be a number of bytes"),
    "limit, percents": (check(min_overlap=90), r"min_overlap=90 must be.*between 0 and 1, a share"),
    "forecast, string": (forecast("a"), r"the batch is a str, which JAX does not accept"),
    "forecast, number": (forecast(3), r"the batch has no rows. Pass the global batch"),
    "forecast, tokens": (forecast(tokens="x"), r"tokens='x' must be positive"),
    "forecast, part of": (forecast(tokens=1.5), r"tokens=1.5 must be positive"),
    "forecast, rates": (forecast(rates=3), r"rates=3 are no rates. Pass zerojax.Rates"),
    "forecast, host": (forecast(per_host="8"), r"hosts of '8'. Pass a multiple, or per_host="),
    "table, words": (table("7b"), r"params=\['7', 'b'\] must be positive"),
    "table, nothing": (table(None), r"params=\[None\] must be positive"),
    "table, half": (table(devices=8.5), r"devices=\[8.5\] must be whole numbers"),
    "table, no stage": (table(stages=[]), r"stages=\[\] names none of \(0, 1, 2, 3\)"),
    "table, bytes": (table(param_bytes="2"), r"param_bytes='2' must not be negative"),
    "watchdog, word": (lambda: zerojax.Watchdog("600"), r"'600'\): give a positive number of sec"),
    "watchdog, None": (lambda: zerojax.Watchdog(None), r"None\): give a positive number"),
    "watchdog, ever": (lambda: zerojax.Watchdog(float("inf")), r"inf\): give a positive number"),
    "mean of None": (lambda: zerojax.mean(None), r"takes an array, got a NoneType. Pass one array"),
    "mean of dict": (lambda: zerojax.mean({"a": BATCH}), r"takes an array, got a dict. Pass one"),
    "shards, no plan": (lambda: zerojax.shards({}, 3), r"takes a plan, got 3. Make one"),
    "shards, swapped": (lambda: zerojax.shards(PLAN, {}), r"takes a plan, got a dict. Make one"),
    "specs of a state": (lambda: zerojax.param_specs(made()), r"takes a plan, got a TrainState"),
    "masters, uncalled": (
        lambda: zerojax.master_weights(optax.adam, "float32"), r"tx= is adam.*adam\(1e-3\)"
    ),
    "masters of int8": (
        lambda: zerojax.master_weights(optax.adam(1e-3), "int8"), r"not a float dtype. Use one such"
    ),
    "verify, swapped": (lambda: zerojax.verify(STEP, BATCH, placed()), r"in the other order. Call"),
    "verify, string": (lambda: zerojax.verify(STEP, placed(), "x"), r"the batch is a str, which"),
    "flops of None": (lambda: zerojax.step_flops(None, made(), BATCH), r"got a NoneType: step"),
    "flops, swapped": (lambda: zerojax.step_flops(made(), STEP, BATCH), r"got a TrainState: step_"),
    "shapes on 3": (lambda: zerojax.aot.batch(BATCH, 3), r"takes a plan, got 3"),
    "shapes of a word": (lambda: zerojax.aot.batch("a", PLAN), r"the batch is a str, which JAX"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_is_said_of(case):
    use, message = SAID[case]
    with pytest.raises((TypeError, ValueError), match=message):
        use()


def test_numpy_numbers_make_a_memory_table():
    found = zerojax.memory_table(np.float32(1e9), np.int64(8))
    assert found.to_dict() == zerojax.memory_table(1e9, 8).to_dict()
