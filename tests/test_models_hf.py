"""The examples' GPT-2, Llama and ViT: the names of real checkpoints, and transformers' logits."""

import json
import math

import jax
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from examples import models_hf
from tests import hf_reference
from tests.hf_reference import expanded

REFERENCE = json.loads(hf_reference.FILE.read_text())
PUBLISHED, SMALL = REFERENCE["published"], REFERENCE["small"]


def model_of(config):
    return models_hf.MODELS[config["model_type"]](config)


MILLIONS = {  # as their model cards say
    "openai-community/gpt2": 124,
    "google/vit-base-patch16-224": 87,
    "meta-llama/Meta-Llama-3-8B": 8030,
    "meta-llama/Llama-3.2-1B": 1236,
}


@pytest.mark.parametrize("checkpoint", MILLIONS)
def test_models_have_the_parameters_of_published_checkpoints(checkpoint):
    published = PUBLISHED[checkpoint]
    structs = jax.tree.leaves(models_hf.structs(model_of(published["config"])))
    count = sum(struct.size for struct in structs)
    files = expanded(published["shapes"], published["layers"])
    assert count == sum(map(math.prod, files.values()))
    assert round(count / 1e6) == MILLIONS[checkpoint]


def write(directory, reference, shards=1, more=()):
    """A checkpoint as Hugging Face has it; its tensors spread over files."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(reference["config"]))
    shapes = expanded(reference["shapes"], reference["layers"])
    tensors = {name: hf_reference.weight(name, shape) for name, shape in shapes.items()} | dict(
        more
    )
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
    full = zerojax.full_params(zerojax.unpad({"params": params}, plan))
    inputs = (
        hf_reference.images().transpose(0, 2, 3, 1) if family == "vit" else hf_reference.tokens()
    )
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


def test_another_model_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"is a bert, which is none of gpt2, llama, vit"):
        models_hf.model_of(tmp_path)
    config = SMALL["llama"]["config"] | {"rope_parameters": {"rope_type": "yarn"}}
    with pytest.raises(ValueError, match=r"rope_type 'yarn' is neither default nor llama3"):
        model_of(config).rates(8)
