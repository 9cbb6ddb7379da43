"""MaxText's own train step, compiled on a machine without GPUs.

    python3.12 -m venv .venv/maxtext
    .venv/maxtext/bin/pip install --no-deps maxtext==0.2.5 \
        jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1
    .venv/maxtext/bin/pip install -e . jax==0.12.0.1 flax==0.12.12 optax==0.2.8 \
        nvidia-cuda-nvcc nvidia-nvvm absl-py aqtp drjax grain jinja2 omegaconf packaging \
        pathwaysutils pillow pydantic qwix sentencepiece sympy tensorboardX tiktoken tokamax \
        transformers
    .venv/maxtext/bin/python benchmarks/rivals_maxtext.py --json

MaxText's: configuration, model (`gpt3`), scan, remat policy, sharding rules, optimizer, train step,
donation; everything that its `train_compile` does. Ours: the devices, which it takes from a machine
with GPUs, and the compiler's options. Unlike its defaults: the model's size, attention without a
kernel library (there is none when compiling without devices), no cache in the home directory.
Matmuls have biases.
"""

import figures  # sets how jax starts

# isort: split
from unittest import mock

import jax
from maxtext.trainers.pre_train import train_compile
from maxtext.utils import maxtext_utils

MODEL = figures.MODEL
POLICIES = {"full": "full", "dots": "minimal"}  # "full" is its default
SETTINGS = {
    "decoder_block": "gpt3",
    "base_emb_dim": MODEL.hidden,
    "base_num_query_heads": MODEL.heads,
    "base_num_kv_heads": MODEL.heads,
    "head_dim": MODEL.hidden // MODEL.heads,
    "base_mlp_dim": 4 * MODEL.hidden,
    "base_num_decoder_layers": MODEL.layers,
    "mlp_activations": "['gelu']",
    "vocab_size": MODEL.vocab,
    "trainable_position_size": MODEL.tokens,
    "max_target_length": MODEL.tokens,
    "fused_qkv": "true",
    "logits_via_embedding": "true",
    "enable_dropout": "false",
    "attention": "dot_product",
    "opt_type": "adamw",
    "dtype": "bfloat16",
    "weight_dtype": "float32",
    "per_device_batch_size": figures.ROWS_PER_GPU,
    "hardware": "gpu",
    "compile_topology": "a3",  # hosts of 8 H100s, all of them on its default axis, `fsdp`
    "compile_topology_num_slices": 8,
    "num_slices": 1,
    "jax_cache_dir": "",
    "log_config": "false",
}


def compiled(mesh, remat, options):
    return train_step(mesh, options, remat_policy=POLICIES[remat])


def train_step(mesh, options, **others):
    """Compiles MaxText's step with these settings in place of those above."""

    def topology_mesh(config):
        without = config.remove_size_one_mesh_axis_from_type
        jax.config.update("jax_remove_size_one_mesh_axis_from_type", without)
        devices = maxtext_utils.create_device_mesh(config, list(mesh.devices.flat))
        auto = (jax.sharding.AxisType.Auto,) * devices.ndim
        return jax.sharding.Mesh(devices, config.mesh_axes, axis_types=auto)

    programs = []
    jit_and_compile = train_compile.jit_and_compile

    def compile_and_keep(*args):
        programs.append(jit_and_compile(*args))
        return programs[-1]

    settings = [f"{name}={value}" for name, value in {**SETTINGS, **others}.items()]
    with (
        mock.patch.object(train_compile, "get_topology_mesh", topology_mesh),
        mock.patch.object(train_compile, "jit_and_compile", compile_and_keep),
        # MaxText's syntax for options has no empty ones.
        mock.patch.object(train_compile.max_utils, "parse_libtpu_flags_to_dict", lambda _: options),
    ):
        train_compile.main(["train_compile", *settings])
    return programs[0]


if __name__ == "__main__":
    figures.main("MaxText", compiled, POLICIES, ("maxtext", "flax", "optax"))
