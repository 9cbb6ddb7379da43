"""The examples' models: the names of real checkpoints, and transformers' logits."""

import json
import math

import jax
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from examples import models_hf
from tests.support import hf_reference
from tests.support.hf_reference import expanded

REFERENCE = json.loads(hf_reference.FILE.read_text())
PUBLISHED, SMALL = REFERENCE["published"], REFERENCE["small"]


def model_of(config):
    return models_hf.MODELS[config["model_type"]](config)


MILLIONS = {  # as their model cards say
    "openai-community/gpt2": 124,
    "google/vit-base-patch16-224": 87,
    "meta-llama/Meta-Llama-3-8B": 8030,
    "meta-llama/Llama-3.2-1B": 1236,
    "mistralai/Mistral-7B-v0.3": 7248,
    "mistralai/Mixtral-8x7B-v0.1": 46703,
    "Qwen/Qwen3-8B": 8191,
    "Qwen/Qwen3-0.6B": 596,
    "google/gemma-3-1b-pt": 1000,
    # 671,026 less 58 layers of a router and 257 experts; 15,706 less 26 layers of 66.
    "deepseek-ai/DeepSeek-V3-Base": 14457,
    "deepseek-ai/DeepSeek-V2-Lite": 858,
}


@pytest.mark.parametrize("checkpoint", MILLIONS)
def test_models_have_the_parameters_of_published_checkpoints(checkpoint):
    published = PUBLISHED[checkpoint]
    model = model_of(published["config"])
    structs = jax.tree_util.tree_leaves_with_path(models_hf.structs(model))
    count = sum(struct.size for _, struct in structs)
    files = expanded(published)
    assert count == sum(map(math.prod, files.values()))
    assert round(count / 1e6) == MILLIONS[checkpoint]
    assert {"/".join(key.key for key in path) for path, _ in structs} == {*model.names}
    shapes = {name.removeprefix("transformer."): s for name, s in published["shapes"].items()}
    for path, struct in structs:
        entry = model.names["/".join(key.key for key in path)]
        name = entry if isinstance(entry, str) else entry[0]
        stacked, shape = name.count("{}"), shapes.pop(name)
        counts = published.get("counts", {}).get(name, [published["layers"]] * stacked)
        assert list(struct.shape[:stacked]) == counts, name
        assert math.prod(struct.shape[stacked:]) == math.prod(shape), name
    assert not shapes


def write(directory, reference, shards=1, more=()):
    """A checkpoint as Hugging Face has it; its tensors spread over files."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(reference["config"]))
    shapes = expanded(reference)
    tensors = {name: hf_reference.weight(name, shape) for name, shape in shapes.items()}
    tensors |= dict(more)
    names, index = sorted(tensors), {}
    for n in range(shards):
        file = f"model-{n}.safetensors" if shards > 1 else "model.safetensors"
        part = {name: tensors[name] for name in names[n::shards]}
        index |= dict.fromkeys(part, file)
        safetensors.numpy.save_file(part, directory / file, {"format": "pt"})
    if shards > 1:
        text = json.dumps({"weight_map": index})
        (directory / "model.safetensors.index.json").write_text(text)
    return tensors


@pytest.mark.parametrize("family", SMALL)
def test_a_model_computes_what_transformers_does(family, tmp_path):
    """From files into shards at stage 3, and back into the same files."""
    reference = SMALL[family]
    tensors = write(tmp_path / "theirs", reference, shards=3)
    model = models_hf.model_of(tmp_path / "theirs")
    plan = zerojax.plan({"params": models_hf.structs(model)}, stage=3, min_shard_size=1)
    params = models_hf.load(tmp_path / "theirs", model, plan)
    assert all(leaf.dim is not None for leaf in plan.params)
    for value, leaf in zip(jax.tree.leaves(params), plan.params, strict=True):
        assert value.sharding.is_equivalent_to(leaf.rest.sharding(plan.mesh), value.ndim)
    full = zerojax.gather_params(zerojax.unpad({"params": params}, plan))
    images = hf_reference.images().transpose(0, 2, 3, 1)
    inputs = images if family == "vit" else hf_reference.tokens()
    with jax.default_matmul_precision("highest"):
        logits = model(full, inputs)
    np.testing.assert_allclose(logits[:, -2:], reference["logits"], atol=3e-5)

    models_hf.save(tmp_path / "ours", model, params, plan=plan, max_file_bytes=30_000)
    read, files = {}, sorted((tmp_path / "ours").glob("*.safetensors"))
    for file in files:
        read |= (here := safetensors.numpy.load_file(file))
        with safetensors.safe_open(file, "np") as opened:
            metadata = opened.metadata()
            assert metadata.pop("format") == "pt", "transformers 4 reads no other"
            assert metadata.keys() == {f"crc32:{name}" for name in here}
    assert len(files) > 2 and read.keys() == {n.removeprefix("transformer.") for n in tensors}
    for name, value in tensors.items():
        assert read[name.removeprefix("transformer.")].tobytes() == value.tobytes(), name
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == reference["config"]


def test_the_published_gpt2_has_no_prefix_and_has_masks(tmp_path):
    shapes = SMALL["gpt2"]["shapes"].items()
    reference = SMALL["gpt2"] | {"shapes": {n.removeprefix("transformer."): s for n, s in shapes}}
    masks = {f"h.{n}.attn.bias": np.ones((1, 1, 16, 16), np.float32) for n in range(3)}
    tensors = write(tmp_path / "theirs", reference, more=masks.items())
    model = models_hf.model_of(tmp_path / "theirs")
    params = models_hf.load(tmp_path / "theirs", model, {"params": models_hf.structs(model)})
    q, k, v = np.split(tensors["h.1.attn.c_attn.weight"], 3, axis=1)  # as transformers does
    for n, want in enumerate((q, k, v)):
        got = params["layers"]["qkv"]["kernel"][1, :, n].reshape(32, 32)
        np.testing.assert_array_equal(got, want)


def test_of_a_deepseek_with_experts_the_dense_part_is_read(tmp_path):
    """Attention of all layers, and what the first of them has in place of experts."""
    reference = SMALL["deepseek 3"]
    config = reference["config"] | {"first_k_dense_replace": 1}
    counts = {name: [1] for name in reference["shapes"] if ".mlp." in name}
    layer = "model.layers.2.mlp"
    experts = [f"{layer}.gate.weight", f"{layer}.gate.e_score_correction_bias"]
    experts += [f"{layer}.experts.0.up_proj.weight", f"{layer}.shared_experts.up_proj.weight"]
    experts += ["model.layers.3.eh_proj.weight"]  # predicts further tokens
    more = {name: np.ones((2, 2), np.float32) for name in experts}
    dense = reference | {"config": config, "counts": counts}
    tensors = write(tmp_path / "theirs", dense, more=more)
    model = models_hf.model_of(tmp_path / "theirs")
    params = models_hf.load(tmp_path / "theirs", model, {"params": models_hf.structs(model)})
    kv = tensors["model.layers.2.self_attn.kv_b_proj.weight"].reshape(4, 16, 12)
    np.testing.assert_array_equal(params["layers"]["kv"][2], kv.transpose(2, 0, 1))
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(params["layers"]["up"], up.T[None])
    with pytest.raises(ValueError, match="Layers from 1 on have experts"):
        model(params, hf_reference.tokens())


def test_a_gemma_reads_the_config_that_it_was_published_with():
    """Before transformers 5 it had neither `layer_types` nor `rope_parameters`."""
    config = dict(SMALL["gemma3"]["config"])
    layers = {"layers": {"q": np.zeros((3, 32, 4, 10))}}
    _, *wanted = model_of(config).layers(layers)
    del config["layer_types"], config["rope_parameters"], config["tie_word_embeddings"]
    config |= {"sliding_window_pattern": 2, "rope_local_base_freq": 100.0, "rope_theta": 1e4}
    model = model_of(config | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert model.tied
    for new, old in zip(wanted, model.layers(layers)[1:], strict=True):
        np.testing.assert_array_equal(new, old)


def test_another_model_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"is a bert, which is none of gpt2, llama, .*, vit"):
        models_hf.model_of(tmp_path)
    for name in ("rope_type", "type"):  # as in newer files, and in DeepSeek's
        config = SMALL["llama"]["config"] | {"rope_parameters": {name: "yarn"}}
        with pytest.raises(ValueError, match=r"'yarn' is none of default, linear, llama3"):
            model_of(config).rates(8)
