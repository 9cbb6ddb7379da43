"""What Hugging Face's checkpoints are named, and what its models compute: hf_reference.json.

    python -m tests.support.hf_reference    # with torch and transformers: writes the file anew

It has the name and shape of each tensor of some checkpoints, from the configs that they are
published with, with {} where layers and experts count, and the logits of small models. The weights
of these are a formula, so that no file has to have them. Of DeepSeek it has the dense part.
"""

import json
import pathlib
import re
import tempfile
import zlib

import numpy as np
import safetensors.numpy

FILE = pathlib.Path(__file__).with_suffix(".json")
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# In their config.json; what is not here is transformers' default.
PUBLISHED = {
    "openai-community/gpt2": {"model_type": "gpt2"},
    "meta-llama/Meta-Llama-3-8B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "mistralai/Mistral-7B-v0.3": {"model_type": "mistral", "vocab_size": 32768},
    "mistralai/Mixtral-8x7B-v0.1": {"model_type": "mixtral"},
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12288,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "google/gemma-3-1b-pt": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "sliding_window": 512,
    },
    "deepseek-ai/DeepSeek-V3-Base": {"model_type": "deepseek_v3"},
    "deepseek-ai/DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 1,
    },
    "google/vit-base-patch16-224": {
        "model_type": "vit", "id2label": {str(n): str(n) for n in range(1000)}
    },
}  # fmt: skip
TEXT = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
SMALL_LLAMA = TEXT | {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SMALL_DEEPSEEK = SMALL_LLAMA | {
    "num_key_value_heads": 4, "first_k_dense_replace": 3, "kv_lora_rank": 12, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6, "v_head_dim": 10, "rms_norm_eps": 1e-6, "rope_parameters": PLAIN_ROPE,
}  # fmt: skip
SMALL = {
    "gpt2": TEXT | {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4,
                    "n_positions": 16},
    "llama": SMALL_LLAMA | {"rope_parameters": PLAIN_ROPE},
    "llama 3.2": SMALL_LLAMA | {
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 16},
    },
    "mistral": SMALL_LLAMA | {"model_type": "mistral", "sliding_window": 5, "head_dim": 10},
    "mixtral": SMALL_LLAMA | {"model_type": "mixtral", "num_local_experts": 5,
                              "num_experts_per_tok": 2},
    "qwen3": SMALL_LLAMA | {"model_type": "qwen3", "head_dim": 10},
    "gemma3": SMALL_LLAMA | {
        "model_type": "gemma3_text", "head_dim": 10, "sliding_window": 5, "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    },
    "deepseek 2": SMALL_DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek 3": SMALL_DEEPSEEK | {"model_type": "deepseek_v3", "q_lora_rank": 16},
    "vit": {"model_type": "vit", "num_hidden_layers": 3, "hidden_size": 32,
            "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16, "patch_size": 4,
            "id2label": {str(n): str(n) for n in range(7)}},
}  # fmt: skip

# Of a DeepSeek, experts and how tokens are sent to them.
EXPERTS = re.compile(r"mlp\.(experts|shared_experts|gate)\.")
READ = {
    "first_k_dense_replace", "kv_lora_rank", "layer_types", "num_experts_per_tok",
    "num_local_experts", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "query_pre_attn_scalar", "sliding_window", "v_head_dim",
    "head_dim", "hidden_size", "id2label", "image_size", "intermediate_size",
    "layer_norm_eps", "layer_norm_epsilon", "model_type", "n_embd", "n_head", "n_inner", "n_layer",
    "n_positions", "num_attention_heads", "num_channels", "num_hidden_layers",
    "num_key_value_heads", "patch_size", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "vocab_size",
}  # fmt: skip


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the weight of a small model: every number of every tensor is another one."""
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    is_scale = len(shape) == 1 and name.endswith("weight")  # a norm's
    return (is_scale + 0.2 * draw.normal(size=shape)).astype(np.float32)


def tokens() -> np.ndarray:
    return np.arange(32).reshape(2, 16) * 7 % 64


def images() -> np.ndarray:
    """Returns (rows, channels, y, x), as torch has them."""
    return np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)


def expanded(reference: dict) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of each tensor."""
    layers, counts = reference["layers"], reference.get("counts", {})
    return {
        name.format(*index): tuple(shape)
        for name, shape in reference["shapes"].items()
        for index in np.ndindex(*counts.get(name, [layers] * name.count("{}")))
    }


def main() -> None:
    import torch
    import transformers

    found: dict = {"transformers": transformers.__version__, "torch": torch.__version__}
    found["published"], found["small"] = {}, {}
    for name, config in PUBLISHED.items():
        with torch.device("meta"):
            model = model_of(config)
        found["published"][name] = folded(saved_shapes(model)) | {"config": config_of(model)}
    for name, config in SMALL.items():
        shapes = saved_shapes(model_of(config))
        with tempfile.TemporaryDirectory() as directory:
            model_of(config).config.save_pretrained(directory)
            weights = {name: weight(name, shape) for name, shape in shapes.items()}
            file = f"{directory}/model.safetensors"
            safetensors.numpy.save_file(weights, file, {"format": "pt"})
            model, told = type(model_of(config)).from_pretrained(
                directory, output_loading_info=True
            )
        assert not any(told.values()), told
        with torch.no_grad():
            logits = model(torch.from_numpy(images() if name == "vit" else tokens())).logits
        rounded = np.round(logits[:, -2:].numpy().astype(float), 5).tolist()  # of the last tokens
        found["small"][name] = folded(shapes) | {"config": config_of(model), "logits": rounded}
    FILE.write_text(json.dumps(found) + "\n")


def model_of(config: dict):
    import transformers

    classes = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
    classes |= {"mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}
    classes |= {"qwen3": "Qwen3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
    classes |= {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
    classes |= {"vit": "ViTForImageClassification"}
    full = transformers.AutoConfig.for_model(**config)
    return getattr(transformers, classes[config["model_type"]])(full).eval()


def config_of(model) -> dict:
    """Returns what a model's config.json has, less what the examples' models do not read."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    return {key: value for key, value in config.items() if key in READ}


def saved_shapes(model) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that `save_pretrained` would write."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = revert_weight_conversion(model, model.state_dict())
    tied = getattr(model.config, "tie_word_embeddings", False)
    left_out = {"lm_head.weight"} if tied else set()
    is_dense = lambda name: "deepseek" not in model.config.model_type or not EXPERTS.search(name)
    kept = {name for name in shapes if name not in left_out and is_dense(name)}
    return {name: tuple(value.shape) for name, value in shapes.items() if name in kept}


def folded(shapes: dict[str, tuple[int, ...]]) -> dict:
    """Returns the shapes with {} for the layer, and for the expert; raises if layers differ. The
    `counts` are those of names that not all layers have, or several times."""
    numbers, found = re.compile(r"(?<=\.)\d+(?=\.)"), {}
    counts: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        key, index = numbers.sub("{}", name), [int(n) + 1 for n in numbers.findall(name)]
        assert found.setdefault(key, list(shape)) == list(shape)
        counts[key] = [*map(max, counts.get(key, index), index)]
    layers = max(count[0] for count in counts.values() if count)
    others = {key: count for key, count in counts.items() if count and count != [layers]}
    reference = {"layers": layers, "shapes": found} | ({"counts": others} if others else {})
    assert set(expanded(reference)) == set(shapes)
    return reference


if __name__ == "__main__":
    main()
