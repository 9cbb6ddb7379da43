"""Weights in codes outside of a step: what a user's own call says, and how they leave."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
import zerojax.nnx

DRAW = np.random.default_rng(0)
SHAPES = {"blocks": {"up": (4, 24, 64), "down": (4, 64, 32)}, "head": (63, 64), "lora": (24, 4)}
NAMES = {
    "blocks/up": ("h.{}.up.weight", "out in -> in out"),
    "blocks/down": "h.{}.down",
}


def make_state(kind="nf4"):
    normal = lambda shape: jnp.asarray(DRAW.normal(size=shape), jnp.float32)
    params = jax.tree.map(normal, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    frozen = jax.tree.map(lambda _: True, params) | {"lora": False}
    tx = optax.selective_transform(optax.adam(1e-3), freeze_mask=frozen)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    return state if kind is None else zerojax.quantize(state, kind)


def test_a_model_called_on_codes_says_how_to_decode_them():
    params = make_state().params
    x, packed = jnp.ones((2, 63)), params["head"]
    calls = [
        lambda: x @ packed,
        lambda: jnp.dot(x, packed),
        lambda: jax.jit(lambda x: x @ packed)(x),
        lambda: packed[0],
        lambda: packed * 2,
        lambda: np.asarray(packed),
        lambda: jnp.asarray(packed, jnp.bfloat16),
    ]
    said = r"float32\[63, 64\] is stored in nf4.*zerojax\.manual\.dequantize\(params\)"
    for call in calls:
        with pytest.raises(TypeError, match=said):
            call()
    model = nnx.LoRALinear(64, 128, lora_rank=4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    zerojax.nnx.quantize(model, optimizer)
    with pytest.raises(TypeError, match=r"zerojax\.nnx\.merge\(s, zerojax\.manual\.dequantize\("):
        model(jnp.ones((8, 64)))


def test_a_restore_of_codes_as_weights_says_so(tmp_path):
    """And the other way round."""
    codes, weights = make_state(), make_state(None)
    zerojax.save(tmp_path / "codes", zerojax.shard_train_state(codes, stage=3))
    zerojax.save(tmp_path / "weights", zerojax.shard_train_state(weights, stage=3))
    said = re.compile("are quantized on one side only.*zerojax.quantize.*dequantize")
    for path, like in (("codes", weights), ("weights", codes)):
        with pytest.raises(ValueError, match=said) as raised:
            zerojax.restore(tmp_path / path, like=zerojax.plan(like, stage=1))
        assert "another model" not in str(raised.value)


MESSAGES = [
    (lambda: zerojax.Precision(moments="int4"), r"moments='int4'\).*'bfloat16', or 'int8'"),
    (lambda: zerojax.Precision(param="bfloat16", master="Split"), r"master='Split'\).*'split'"),
    (lambda: zerojax.stream(PLACED(), dtype="bf16"), r"dtype='bf16' is not a dtype of floats"),
    (lambda: zerojax.reshard(PLACED(), dtype="bf16"), r"dtype='bf16' is not a dtype of floats"),
    (lambda: zerojax.stream(lambda: 0), r"^the state is a function, and zerojax.stream takes"),
]
PLACED = lambda: zerojax.shard_train_state({"params": {"w": jnp.ones((64, 16))}}, stage=3)


@pytest.mark.parametrize(("call", "said"), MESSAGES)
def test_a_mistake_is_named(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()
