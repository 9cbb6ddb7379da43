"""What Hugging Face's checkpoints are named, and what its models compute: hf_reference.json.

    python -m tests.hf_reference    # with torch and transformers: writes the file anew

It has the name and shape of each tensor of four checkpoints, from the configs that they are
published with, with {} where layers count, and the logits of small models. The weights of these
are a formula, so that no file has to have them.
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
SMALL = {
    "gpt2": TEXT | {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4,
                    "n_positions": 16},
    "llama": SMALL_LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "llama 3.2": SMALL_LLAMA | {
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 16},
    },
    "vit": {"model_type": "vit", "num_hidden_layers": 3, "hidden_size": 32,
            "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16, "patch_size": 4,
            "id2label": {str(n): str(n) for n in range(7)}},
}  # fmt: skip

READ = {
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


def expanded(shapes: dict[str, list[int]], layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of each tensor."""
    return {
        name.format(layer): tuple(shape)
        for name, shape in shapes.items()
        for layer in (range(layers) if "{}" in name else [0])
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
    return {name: tuple(value.shape) for name, value in shapes.items() if name not in left_out}


def folded(shapes: dict[str, tuple[int, ...]]) -> dict:
    """Returns the shapes with {} for the layer; raises if layers differ."""
    numbers = [int(n) for name in shapes for n in re.findall(r"\.(\d+)\.", name)]
    layers, found = max(numbers) + 1, {}
    for name, shape in shapes.items():
        key = re.sub(r"\.\d+\.", ".{}.", name)
        assert found.setdefault(key, list(shape)) == list(shape)
    assert set(expanded(found, layers)) == set(shapes)
    return {"layers": layers, "shapes": found}


if __name__ == "__main__":
    main()
