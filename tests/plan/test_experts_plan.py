"""Where experts rest: apart over their mesh axis at every stage, by ZeRO's rule over the others."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support.reference import assert_equal_bits, train_state

KEPT = {"expert": "experts"}
Shape = tuple[int, ...]


def shapes(tree: Any) -> Any:
    is_shape = lambda x: isinstance(x, tuple)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=is_shape)


def rests(tree: Any, stage: int = 3, mesh: Any = None, **options: Any) -> dict[str, P]:
    """Where parameters of these shapes rest, by their paths."""
    mesh = zerojax.mesh(**(mesh or {"data": 4, "expert": 2}))
    options = {"experts": KEPT, "min_shard_size": 1} | options
    plan = zerojax.plan({"params": shapes(tree)}, stage, mesh=mesh, **options)
    return {leaf.path.removeprefix("params/"): leaf.spec for leaf in plan.params}


ONE = {"router": (16, 8), "experts": {"w": (8, 16, 32), "b": (8, 32)}}


@pytest.mark.parametrize("stage", range(4))
def test_experts_are_apart_at_every_stage(stage):
    tx = optax.adam(0.1)
    params = shapes(ONE)
    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    mesh = zerojax.mesh(node=2, gpu=2, expert=2)
    plan = zerojax.plan(
        state, stage, mesh=mesh, axis=("node", "gpu"), experts=KEPT, min_shard_size=1, tx=tx
    )
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    w, mu = leaves["params/experts/w"], leaves["opt_state/0/mu/experts/w"]
    assert w.rest.spec == (P("expert", ("gpu", "node")) if stage == 3 else P("expert"))
    assert mu.rest.spec == (P("expert", ("gpu", "node")) if stage else P("expert"))
    assert leaves["params/router"].rest.spec == (P(("expert", "gpu", "node")) if stage > 2 else P())
    others = 4 if stage == 3 else 1
    assert w.bytes_per_device(plan.mesh) == 4 * 8 * 16 * 32 // 2 // others
    assert (w.experts, mu.experts, leaves["params/router"].experts) == (0, 0, None)


SCANNED = {
    "attention": {"q": (3, 16, 16)},
    "experts": {"up": (3, 8, 16, 32), "down": (3, 8, 32, 16), "bias": (3, 8, 32)},
}
LAYER = {"router": (16, 8), "experts": {"w1": (8, 16, 32), "w2": (8, 32, 16), "b1": (8, 32)}}


@pytest.mark.parametrize("mesh", [{"data": 4, "expert": 2}, {"data": 2, "expert": 4}])
@pytest.mark.parametrize(
    ("tree", "path", "spec"),
    [
        ({"layers": SCANNED}, "layers/experts/up", P(None, "expert", "data")),
        ({"layers": SCANNED}, "layers/experts/bias", P(None, "expert", "data")),
        ({"layer_0": LAYER, "layer_1": LAYER}, "layer_0/experts/w1", P("expert", "data")),
        ({"layer_0": LAYER, "layer_1": LAYER}, "layer_1/experts/b1", P("expert", "data")),
        # All of a layer's weights are as long as there are experts.
        ({"layer": {"experts": (8, 8, 16), "norm": (8, 8)}}, "layer/experts", P("expert", "data")),
        # Only experts are there: weights of four dimensions are of layers.
        ({"experts": SCANNED["experts"]}, "experts/down", P(None, "expert", "data")),
        ({"experts": LAYER["experts"]}, "experts/w2", P("expert", "data")),
        # Loops within loops.
        (
            {"a": (2, 3, 16, 16), "experts": (2, 3, 8, 16, 32)},
            "experts",
            P(None, None, "expert", "data"),
        ),
    ],
)
def test_what_counts_layers_and_what_experts(tree, path, spec, mesh):
    assert rests(tree, mesh=mesh)[path] == spec


def test_stacked_and_overrides_say_it():
    """They decide where shapes mislead: eight layers of a weight for each of four experts."""
    tree = {"experts": (8, 4, 16)}
    assert rests(tree)["experts"] == P("expert", "data")
    assert rests(tree, stacked="experts")["experts"] == P(None, "expert", "data")
    put = {"experts": P(None, "expert", "data")}
    assert rests(tree, overrides=put)["experts"] == P(None, "expert", "data")
    assert rests(tree, overrides={"experts": P("data")})["experts"] == P("data")
    assert rests(tree, stage=1, overrides=put)["experts"] == P(None, "expert")


def test_the_axis_of_experts_may_be_the_only_one():
    assert rests(ONE, mesh={"expert": 8}) == {
        "experts/b": P("expert"),
        "experts/w": P("expert"),
        "router": P("expert"),
    }


@pytest.mark.parametrize("stage", range(4))
def test_experts_that_the_axis_does_not_divide_are_padded(stage):
    params = {"experts": jnp.arange(7.0 * 11 * 5).reshape(7, 11, 5), "router": jnp.ones((11, 7))}
    state = train_state(params, optax.adam(0.1))
    mesh = zerojax.mesh(data=4, expert=2)
    placed = zerojax.shard_train_state(state, stage, mesh=mesh, experts=KEPT, min_shard_size=1)
    rest, mu = placed.params["experts"], placed.opt_state[0].mu["experts"]
    assert rest.shape == ((8, 12, 5) if stage == 3 else (8, 11, 5))
    assert mu.shape == ((8, 12, 5) if stage else (8, 11, 5))
    part = (4, 3, 5) if stage == 3 else (4, 11, 5)
    assert {shard.data.shape for shard in rest.addressable_shards} == {part}
    assert_equal_bits(zerojax.unpad(placed).params, params)
    assert_equal_bits(zerojax.gather_params(placed), jax.device_get(params))
    assert not np.any(np.asarray(rest)[7:])


def with_options(tree: Any = ONE, mesh: Any = None, **options: Any) -> Any:
    return lambda: rests(tree, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (with_options(experts="experts"), "must map one axis of the mesh to one pattern of paths"),
        (with_options(experts={}), "Pass experts={'expert': 'experts'} and mesh="),
        (with_options(experts={"a": "b", "c": "d"}), "one axis of the mesh to one pattern"),
        (with_options(experts={"expert": ["w1", "w2"]}), "one axis of the mesh to one pattern"),
        (with_options(experts={"expert": "mlp"}), "'mlp', which matches no parameter. Paths are"),
        (with_options(experts={"expert": "a||b"}), "empty alternative: it matches every path"),
        (
            with_options(experts={"ep": "experts"}),
            "'ep' of experts= is no axis of the mesh, whose axes are ('data', 'expert'). Name one "
            "of them, or pass a mesh that has it: mesh=zerojax.mesh(data=-1, ep=2), to a command "
            "--mesh data=-1,ep=2.",
        ),
        (
            with_options(experts={"experts/": "expert"}),
            "The axis comes before the pattern: experts={'expert': 'experts/'}.",
        ),
        (with_options(axis=("data", "expert")), "Leave it out of axis=: the batch is split over"),
        (with_options(sequence="expert"), "Pass a mesh with an axis for each: mesh=zerojax.mesh("),
        (
            with_options(mesh={"expert": 8}, tree={"experts": (4, 16)}),
            "splits the 4 experts of params/experts (4, 16) over 'expert', which has 8 devices. "
            "Pass a mesh where that axis has fewer",
        ),
        (
            with_options(tree={"experts": (1, 16)}, overrides={"experts": P("expert")}),
            "splits the 1 experts of params/experts (1, 16) over 'expert', which has 2 devices",
        ),
        (
            with_options(tree={"experts": {"w": (8, 16), "scale": ()}}),
            "params/experts/scale (), which has no dimension that counts experts",
        ),
        (
            with_options(tree={"experts": (4,)}, stacked="experts"),
            "Pass a pattern that leaves it out, or say which parameters are stacks",
        ),
        (
            with_options(tree={"experts": (7, 16)}, pad=False),
            "2 devices, which do not divide them. Leave out pad=False, or pass a mesh whose",
        ),
    ],
)
def test_each_error_has_its_remedy(wrong, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        wrong()


def test_state_that_follows_no_parameter_is_of_no_expert():
    """Placeholders of Adafactor, where no optimizer says what its state is of."""
    params = shapes(ONE)
    opt_state = {"row": {"experts": {"w": (8, 16), "b": (1,)}}, "mu": {"experts": {"w": (8, 32)}}}
    state = {"params": params, "opt_state": shapes(opt_state)}
    mesh = zerojax.mesh(data=4, expert=2)
    plan = zerojax.plan(state, mesh=mesh, experts=KEPT, min_shard_size=2)
    specs = {leaf.path: leaf.spec for leaf in plan.leaves if leaf.kind == "opt_state"}
    both = P(("expert", "data"))
    assert specs == {
        "opt_state/mu/experts/w": both,
        "opt_state/row/experts/b": P(),
        "opt_state/row/experts/w": both,
    }


def test_patterns_may_match_different_numbers_of_experts():
    tree = {"a": {"experts": (8, 16)}, "b": {"experts": (6, 16)}}
    assert set(rests(tree).values()) == {P("expert", "data")}
