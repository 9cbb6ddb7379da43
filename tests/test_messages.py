"""What users get wrong first, and what they are told: the leaf, the value and the remedy."""

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
    with pytest.raises(ValueError, match=r"batch leaf x was donated.*Pass a batch made anew"):
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
        (STEP, (state, on_one(BATCH, 3)), r"the batch was put on device 3 alone.*mesh has 8.*shard_"),
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
    message = rf"takes {wants} beside the gradients.*zerojax.value_and_grad.*docs/loop.md"
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
    "string": (lambda: STEP(placed(), "abc"), r"the batch is a str, which JAX takes for no array"),
    "name in it": (lambda: STEP(placed(), {"id": "a"}), r"batch leaf id is a str.*leave it out"),
    "objects": (lambda: STEP(placed(), np.array(["a"])), r"the batch is a ndarray of <U1"),
    "loader": (lambda: STEP(placed(), iter([BATCH])), r"a list_iterator. Pass one batch of it: next"),
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
    "plan of 3": (lambda: zerojax.train_step(loss, plan=3), r"plan is a int.*zerojax.plan\(state"),
    "uncalled": (lambda: zerojax.train_step(loss, tx=optax.adam), r"tx is a function.*adam\(1e-3\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_one_thing_in_anothers_place(case):
    use, message = WRONG[case]
    with pytest.raises(TypeError, match=message):
        use()
