"""Adapters beside the examples' Llamas: what they compute, their names, and how they leave."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax.training.train_state import TrainState

import zerojax
from examples import lora_hf, models_hf
from tests.test_models_hf import SMALL, model_of

pytestmark = pytest.mark.ci

CONFIG = {"model_type": "llama", "vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2}
CONFIG |= {"intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIG |= {"rms_norm_eps": 1e-5, "head_dim": 36}  # 8 devices pad the adapters of q, k and v
TOKENS = np.arange(12).reshape(2, 6)
RANK = 3


def drawn(structs):
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda s: draw.normal(size=s.shape).astype("f") / 6, structs)


@pytest.fixture
def trained(tmp_path):
    """A base in files, and a state with it in codes and with adapters that change something."""
    model = models_hf.Llama(CONFIG)
    models_hf.save(tmp_path / "base", model, drawn(models_hf.structs(model)))
    lora = lora_hf.Lora(models_hf.model_of(tmp_path / "base"), rank=RANK)

    def make_state():
        params = lora.begin(jax.random.key(0))
        adapters = jax.tree.map(lambda leaf: leaf + 0.1, params["lora"])
        params = params | {"lora": adapters}
        tx = optax.selective_transform(optax.adam(1e-3), freeze_mask=lora_hf.is_base(params))
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    state = zerojax.shard_train_state(make_state, stage=3, min_shard_size=1)
    params = models_hf.load(tmp_path / "base", lora, state, keep="lora")
    return lora, state.replace(params=params)


def same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_the_base_rests_in_the_codes_of_the_files(trained):
    """And is never there in float32: an 8B's would not fit where its codes do."""
    lora, state = trained
    matrices = zerojax.quantize(drawn(models_hf.structs(lora.model)))
    got = zerojax.unpad(state).params["base"]
    assert jax.tree.structure(got) == jax.tree.structure(matrices)
    assert {leaf.dtype for leaf in jax.tree.leaves(got["layers"]["q"])} == {np.dtype("uint8")}
    same(got, matrices)
    begun = str(jax.make_jaxpr(lora.begin)(jax.random.key(0)))
    assert "u8[2,32,52]" in begun and "f32[2,32,96]" not in begun


def test_a_merged_model_computes_what_base_and_adapters_do(trained):
    lora, state = trained
    params = zerojax.reshard(state)
    logits = jax.jit(lora)(params, TOKENS)
    merged = lora.merged(state, "float32")
    np.testing.assert_allclose(jax.jit(lora.model)(merged, TOKENS), logits, atol=2e-5)
    base = lora.model(zerojax.manual.dequantize(params["base"]), TOKENS)
    assert np.abs(base - logits).max() > 0.1


def test_a_model_in_a_loop_decodes_a_layer_at_a_time(trained):
    lora, state = trained
    jaxpr = str(jax.make_jaxpr(lora)(zerojax.reshard(state), TOKENS))
    assert "f32[32,96]" in jaxpr and "f32[2,32,96]" not in jaxpr


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma3"])
def test_other_families_have_adapters(family):
    lora = lora_hf.Lora(model_of(SMALL[family]["config"]), rank=RANK)
    params = drawn(models_hf.structs(lora))
    base, merged = params["base"], dict(params["base"]["layers"])
    for name, adapter in params["lora"].items():
        merged[name] = merged[name] + (adapter["a"] @ adapter["b"]).reshape(merged[name].shape)
    wanted = lora.model({**base, "layers": merged}, TOKENS)
    np.testing.assert_allclose(lora(params, TOKENS), wanted, atol=1e-4)
    assert np.abs(lora.model(base, TOKENS) - wanted).max() > 0.1


# As PEFT writes them: its guide to checkpoints, and get_peft_model_state_dict in save_and_load.py.
PEFT = {"self_attn.q_proj": (32, 72), "self_attn.k_proj": (32, 36), "self_attn.v_proj": (32, 36)}
PEFT |= {"self_attn.o_proj": (72, 32), "mlp.gate_proj": (32, 96), "mlp.up_proj": (32, 96)}
PEFT |= {"mlp.down_proj": (96, 32)}


def test_adapters_leave_as_peft_has_them_and_come_back(trained, tmp_path):
    lora, state = trained
    lora_hf.save_peft(tmp_path / "peft", lora, state, base="runs/llama")
    files = {path.name for path in (tmp_path / "peft").iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json"}
    read = safetensors.numpy.load_file(tmp_path / "peft" / "adapter_model.safetensors")
    module = "base_model.model.model.layers.{}.{}.lora_{}.weight"
    wanted = {}
    for name, (into, out) in PEFT.items():
        for n in range(2):
            wanted[module.format(n, name, "A")] = (RANK, into)
            wanted[module.format(n, name, "B")] = (out, RANK)
    assert {name: value.shape for name, value in read.items()} == wanted
    adapters = zerojax.unpad(state).params["lora"]
    down = read[module.format(1, "mlp.down_proj", "A")]
    np.testing.assert_array_equal(down, adapters["down"]["a"][1].T)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == "runs/llama"
    assert config["r"] == config["lora_alpha"] == RANK
    assert set(config["target_modules"]) == {name.rpartition(".")[2] for name in PEFT}

    without = jax.tree.map(jnp.zeros_like, state.params["lora"])
    fresh = state.replace(params=state.params | {"lora": without})
    path = tmp_path / "peft" / "adapter_model.safetensors"
    back = zerojax.checkpoint.import_safetensors(path, fresh, names=lora.peft_names, keep="base")
    same(back, state.params)


def test_a_checkpoint_of_adapters_goes_on_with_the_base_that_is_there(trained, tmp_path):
    state = trained[1]
    with zerojax.Checkpoints(tmp_path / "ck") as checkpoints:
        checkpoints.save(1, lora_hf.only_adapters(state), force=True)
    (tree,) = (tmp_path / "ck" / "1").rglob("_METADATA")
    saved = json.loads(tree.read_text())["tree_metadata"]
    params = {name for name in saved if name.startswith("('params'")}
    assert len(params) == 14 and all("'lora'" in name for name in params)
    without = jax.tree.map(jnp.zeros_like, state.params["lora"])
    fresh = state.replace(params=state.params | {"lora": without}, step=0)
    back, saved = zerojax.Checkpoints(tmp_path / "ck").resume(fresh, keep="params/base")
    assert saved.step == 1
    same(back.params, state.params)
    same(back.opt_state, state.opt_state)


def test_experts_have_no_adapters_and_decode_codes():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    mixtral, peft = models_hf.Mixtral(CONFIG | experts), ("q_proj",)
    for model, targets in ((mixtral, lora_hf.MATRICES), (models_hf.Llama(CONFIG), peft)):
        with pytest.raises(ValueError, match="can have no adapter: targets= takes some of"):
            lora_hf.Lora(model, RANK, targets).dims()
    lora = lora_hf.Lora(mixtral, RANK, lora_hf.MATRICES[:4])
    params = drawn(models_hf.structs(lora))
    codes = params | {"base": zerojax.quantize(params["base"], "int8")}
    ups = jax.tree.leaves(codes["base"]["layers"]["up"])
    assert {leaf.dtype for leaf in ups} == {np.dtype("uint8")}
    weights = {**codes, "base": zerojax.manual.dequantize(codes["base"])}
    wanted = jax.jit(lora)(weights, TOKENS)
    np.testing.assert_allclose(jax.jit(lora)(codes, TOKENS), wanted, atol=2e-5)
