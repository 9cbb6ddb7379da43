"""Stacks of layers: recognized by shape, by name or by metadata, and never sharded along layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import zerojax
from tests.shapes import params_plan, shape, specs
from zerojax._state import stacks as _stacks


def test_layer_dimension_of_a_stack_is_never_sharded():
    stack = {"w": shape(8, 16, 16), "b": shape(8, 16), "gain": shape(8)}
    plan = params_plan({"blocks": stack, "w": shape(24, 16)}, min_shard_size=1)
    assert specs(plan) == {
        "params/blocks/b": P(None, "data"), "params/blocks/gain": P(),
        "params/blocks/w": P(None, "data"), "params/w": P("data"),
    }  # fmt: skip
    assert "layers" in {leaf.path: leaf.reason for leaf in plan.leaves}["params/blocks/gain"]


def test_neither_layer_dimension_of_nested_loops_is_sharded():
    stack = {"w": shape(4, 8, 16, 24), "b": shape(4, 8, 24)}
    plan = params_plan({"groups": stack, "blocks": {"w": shape(6, 8, 24), "v": shape(6, 8, 16)}})
    assert [leaf.dim for leaf in plan.params] == [1, 1, 2, 2]
    odd = {"groups": {"w": shape(4, 8, 15, 7), "b": shape(4, 8, 7)}}
    assert [leaf.dim for leaf in params_plan(odd).params] == [2, 2]  # padded
    assert [leaf.dim for leaf in params_plan(odd, pad=False).params] == [1, 1]  # nothing else


def test_plain_layer_is_not_mistaken_for_a_stack():
    square = {"kernel": shape(64, 64), "bias": shape(64)}
    assert specs(params_plan(square, min_shard_size=1)) == {
        "params/bias": P("data"), "params/kernel": P("data"),
    }  # fmt: skip


def test_stacked_pattern_decides():
    assert specs(params_plan({"w": shape(8, 16)}, stacked="w$"))["params/w"] == P(None, "data")


def test_flax_scan_metadata_tells_the_layer_dimension():
    box = nn.Partitioned(shape(8, 16, 16), names=("layers", None, None))
    assert specs(params_plan({"w": box}))["params/w/value"] == P(None, "data")


def test_modules_of_a_haiku_stack_are_one_stack():
    """Eight layers of norms alone would be taken for a matrix, and cut along the layers."""
    shapes = {
        "stack/norm": {"scale": (8, 256), "offset": (8, 256)},
        "stack/linear": {"w": (8, 256, 256)},
        "head": {"w": (256, 256)},
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    plan = zerojax.plan({"params": params, "opt_state": ()})
    assert {leaf.path: leaf.dim for leaf in plan.params} == {
        "params/head/w": 0, "params/stack/linear/w": 1, "params/stack/norm/offset": 1,
        "params/stack/norm/scale": 1,
    }  # fmt: skip


def test_layers_beside_each_other_are_counted_by_their_paths():
    own = {"h/{}/att/{}/w": (8, 8), "h/{}/att/{}/b": (8,)}
    paths = {name.format(i, j): dims for name, dims in own.items()
             for i in range(12) for j in range(3)}  # fmt: skip
    assert _stacks.in_a_python_loop(paths) == 12
    assert _stacks.in_a_python_loop({f"block_{i}/w": (8, 8 + i % 2) for i in range(6)}) == 3
    assert _stacks.in_a_python_loop({"blocks/w": (24, 8, 8), "h/1/w": (8, 8), "b": (3,)}) == 1
    assert _stacks.in_a_python_loop({"w": (24, 8, 8)}) == 0
