"""States that are gone, and optimizers that take more than gradients."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import zerojax
from tests.linear import BATCH, EVAL, STEP, loss, placed

W = jnp.arange(-2.0, 2.0)


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


def test_a_state_with_one_deleted_leaf_is_refused():
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


def test_what_a_loss_is_not_given_is_told_how_to_give():
    asked = {
        "stats": lambda params, batch, *, stats: 0.0,
        "ema": lambda params, batch, dropout_key, ema: 0.0,
    }
    for field, wants in asked.items():
        message = rf"missing .*'{field}'.*jax.random.key\(n\).*by name: mutable=\('{field}',\)"
        with pytest.raises(TypeError, match=message):
            zerojax.train_step(wants)(placed(), BATCH)


def test_parameters_that_are_one_array():
    w = jnp.ones((64, 16))
    state = TrainState.create(apply_fn=None, params=w, tx=optax.sgd(0.1))
    step = zerojax.train_step(lambda w, batch: jnp.mean((batch @ w) ** 2))
    with pytest.raises(TypeError, match=r"parameters are one array.*into a dict, params={'w': w}"):
        step(zerojax.shard_train_state(state), BATCH)


def no_trees():
    """What a restore could not give back, with the remedy, by what it is."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    state = r"Save zerojax.nnx.state\(model, optimizer\).*by zerojax.nnx.update\(model, opt"
    yield model, rf"is a Flax nnx object, Linear,.*{state}"
    yield (model, optimizer), rf"has a Flax nnx object, Linear,.*{state}"
    yield {"params": {}, "optimizer": optimizer}, rf"nnx object, Optimizer,.*{state}"
    yield linen.Dense(3), r"the Flax module Dense, not a state.*what its init returns"
    yield optax.sgd(0.1), r"init is a function, not an array.*no optimizers.*what they return"
    yield {"w": W, "tx": optax.sgd(0.1)}, r"tx/init is a function.*no optimizers.*as their init"
    yield optax.sgd, r"is a function.*(Pass zerojax.plan\(make_state|pass what they return)"
    for number in (3, 0.5, True, np.float32(3)):
        yield number, r"is (3|0.5|True|np.float32.*), and not a tree of arrays.*as metadata="
    for empty in (None, [], {}, {"a": ()}, placed().tx):
        yield empty, r"has no leaves, so .*Pass what has the arrays: a \w+ without any was passed"
    yield {"w": np.zeros(2, "datetime64[D]")}, r"w is a ndarray of datetime64\[D\], not an array"
    yield {"w": np.zeros(2, "i4,f4")}, r"w is a ndarray of .*, not an array. Make it a static"
    yield {"w": np.zeros(2, jax.dtypes.float0)}, r"w is a ndarray of .*, not an array. Make it"


def test_checkpoints_take_trees_of_arrays_and_nothing_else(tmp_path):
    zerojax.save(tmp_path / "there", {"w": W})
    with zerojax.Checkpoints(tmp_path / "loop") as checkpoints:
        for tree, message in no_trees():
            for use in (
                lambda tree: zerojax.save(tmp_path / "new", tree),
                lambda tree: checkpoints.save(1, tree),
                lambda tree: zerojax.restore(tmp_path / "there", like=tree),
                checkpoints.resume,
            ):
                with pytest.raises((TypeError, ValueError), match=message):
                    use(tree)
        assert checkpoints.steps() == []
    with pytest.raises(TypeError, match=r"w is a shape without values. Pass a state that is m"):
        zerojax.save(tmp_path / "new", jax.eval_shape(lambda: {"w": W}))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("integers", [2**40, np.full(2, 2**40), np.uint64(2**63)])
def test_integers_that_jax_cuts_off_are_not_saved_as_others(tmp_path, integers):
    message = r"n has integers that JAX cuts off.*jax_enable_x64. Set that, or .*metadata="
    with pytest.raises(ValueError, match=message):
        zerojax.save(tmp_path / "c", {"n": integers})
    zerojax.save(tmp_path / "c", {"n": np.full(2, 2**31 - 1)})
    assert list(zerojax.restore(tmp_path / "c", {"n": np.zeros(2, int)})["n"]) == [2**31 - 1] * 2


def test_what_is_callable_and_has_arrays_comes_back(tmp_path):
    """As Equinox's modules are, and `Partial`, whose constructor Orbax cannot call."""
    calls = jax.tree_util.Partial(operator.mul, W, nested=jax.tree_util.Partial(abs, W + 1))
    zerojax.save(tmp_path / "c", {"calls": calls, "key": jax.random.key(0)})
    like = jax.tree.map(jnp.zeros_like, {"calls": calls, "key": jax.random.key(1)})
    back = zerojax.restore(tmp_path / "c", like)["calls"]
    assert back.func is operator.mul and (back.args[0] == W).all()
    back = back.keywords["nested"]()
    assert (back == abs(W + 1)).all()
    zerojax.save(tmp_path / "bare", calls.keywords["nested"])
    assert (zerojax.restore(tmp_path / "bare", like["calls"].keywords["nested"])() == back).all()
