"""States told from parameters, and trees that are neither."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.models import mlp
from tests.reference import assert_equal_bits, make_state
from tests.shapes import params_plan, shape


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array


W, B = np.arange(1024.0, dtype=np.float32).reshape(64, 16), np.ones(16, np.float32)
TREES = {
    "list": [W, B],
    "list of pairs": [(W, B), (W + 1, B)],
    "list and no state": [W, ()],
    "tuple": (W, B),
    "tuple of one": (W,),
    "named tuple": Layer(W, B),
    "list under params": {"params": [W, B]},
    "optimizer's state": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init({"w": W}),
}


@pytest.mark.parametrize("name", TREES)
def test_parameters_in_lists_and_tuples_are_all_of_them(tmp_path, name):
    params = jax.tree.map(jnp.asarray, TREES[name])
    wanted = TREES[name]["params"] if isinstance(TREES[name], dict) else TREES[name]
    assert_equal_bits(zerojax.gather_params(params), wanted)
    zerojax.export_safetensors(tmp_path / "w", params)
    read = zerojax.import_safetensors(tmp_path / "w", like=params)
    assert jax.tree.structure(read) == jax.tree.structure(wanted)
    assert_equal_bits(read, wanted)


OPTAX = [optax.sgd(0.1), optax.adam(0.1), optax.named_chain(("a", optax.adam(0.1)))]


@pytest.mark.parametrize("tx", OPTAX, ids=["sgd", "adam", "named_chain"])
def test_pairs_with_a_state_of_optax_are_states(tx):
    params = [jnp.asarray(W), jnp.asarray(B)]
    for state in [(params, tx.init(params)), (params, tx.init(params), jnp.zeros(()))]:
        assert_equal_bits(zerojax.gather_params(zerojax.shard_train_state(state)), params)
    assert_equal_bits(zerojax.gather_params((params, ())), params)


@pytest.mark.parametrize("second", [{"m": W}, (W, B), [W], None, Layer(W, B)])
def test_pairs_that_could_be_either_are_refused(tmp_path, second):
    pair = ({"w": W}, second)
    remedy = r"may be \(params, opt_state\), or parameters.*state\[0\], or.*list\(params\)"
    with pytest.raises(ValueError, match=remedy):
        zerojax.gather_params(pair)
    with pytest.raises(ValueError, match=remedy):
        zerojax.export_safetensors(tmp_path / "w", pair)
    assert not (tmp_path / "w").exists()
    assert len(zerojax.gather_params(list(pair))) == 2
    plan = zerojax.plan(pair)  # where a state is expected there is no doubt
    zerojax.export_safetensors(tmp_path / "w", pair[0])
    assert_equal_bits(zerojax.import_safetensors(tmp_path / "w", like=plan), pair[0])


def test_several_states_in_one_are_refused():
    gan = tuple(make_state(mlp(False), optax.adam(1e-2)) for _ in range(2))
    remedy = r"element 0 of this tuple is a whole state, a State.*by itself: .*shard_train"
    for refused in (zerojax.plan, zerojax.shard_train_state, zerojax.gather_params):
        with pytest.raises(ValueError, match=remedy):
            refused(gan)
    with pytest.raises(ValueError, match=r"this list is a whole state"):
        zerojax.plan(list(gan))
    as_dict = {"params": {"w": W}, "opt_state": ()}
    with pytest.raises(ValueError, match=r"element 0 of this tuple is a whole state, a dict"):
        zerojax.plan((as_dict, as_dict))


def test_a_list_is_no_state():
    with pytest.raises(ValueError, match=r"no parameters in a state of type list.*a tuple"):
        zerojax.plan([{"w": W}, ()])
    beside = {"state": TrainState.create(apply_fn=None, params={"w": W}, tx=optax.sgd(1)), "n": 0}
    with pytest.raises(ValueError, match=r"entry 'state' of this dict is a whole state. Pass it"):
        zerojax.plan(beside)


@pytest.mark.parametrize("key", ["a/b", "a.b"])
def test_leaves_of_one_name_are_refused(tmp_path, key):
    params = {"a": {"b": W}, key: W + 1}
    with pytest.raises(ValueError, match=r"'a'\]\['b'\] and .*\['a.b'\] are both.*Rename one"):
        zerojax.save(tmp_path / "c", params)
    checkpoints = zerojax.Checkpoints(tmp_path / "all")
    with checkpoints, pytest.raises(ValueError, match=r"'b'\] and .*are both.*Rename one"):
        checkpoints.save(1, params)
    with pytest.raises(ValueError, match=r"both.*Rename one"):
        zerojax.export_safetensors(tmp_path / "w", params)
    assert not (tmp_path / "c").exists() and not (tmp_path / "w").exists()
    if key == "a/b":
        with pytest.raises(ValueError, match=r"both named params/a/b. Rename one"):
            zerojax.plan({"params": params})


def test_class_whose_fields_jax_cannot_name():
    class State:
        def __init__(self, params, opt_state):
            self.params, self.opt_state = params, opt_state

    jax.tree_util.register_pytree_node(
        State, lambda s: ((s.params, s.opt_state), None), lambda _, parts: State(*parts)
    )
    with pytest.raises(ValueError, match=r"fields of State. Register it with.*register_dataclass"):
        zerojax.plan(State({"w": jnp.ones((16, 16))}, ()))


def test_state_without_parameters():
    with pytest.raises(ValueError, match=r"no parameters.*Pass a flax TrainState"):
        zerojax.plan({"weights": shape(16, 16)})
    for empty in (None, {}, {"params": {}}, {"params": {"empty": ()}}):
        with pytest.raises(ValueError, match=r"no parameters.*Pass a flax TrainState"):
            zerojax.shard_train_state(empty)
    with pytest.raises(TypeError, match=r"params/name is the string 'x'.*static field"):
        params_plan({"name": "x"})
    with pytest.raises(TypeError, match=r"params/f is a builtin.*static field"):
        params_plan({"f": len})
