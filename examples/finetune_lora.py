"""Fine-tunes a pretrained GPT on Python code through LoRA adapters; its own weights stay frozen.

    python examples/finetune_lora.py                    # trains a small base first, if there is none
    python examples/train_gpt.py --export runs/mine && \\
        python examples/finetune_lora.py --base runs/mine --rank 16

The base's weights go from safetensors files straight into shards. No gradient is made for them,
and no optimizer state held: an optimizer that updates the adapters alone is all that says so.
"""

import argparse
import inspect
import os

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters where there is no GPU

import ast
import collections
import json

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import train_gpt
from flax.training.train_state import TrainState

import zerojax

parser = argparse.ArgumentParser(  # the options of train_gpt.py, and two more
    description=__doc__.splitlines()[0], parents=[train_gpt.parser], add_help=False
)
parser.set_defaults(steps=150, lr=1e-2, eval_every=50, export=None)
parser.add_argument("--base", default="runs/base_gpt", help="safetensors of train_gpt.py --export")
parser.add_argument("--rank", type=int, default=8, help="of the adapters")


def lora_dense(rank):
    """`nn.Dense` with an adapter beside its kernel: x W + x A B, where B starts at zero."""

    class LoraDense(nn.Dense):
        @nn.compact
        def __call__(self, x):
            down = nn.Dense(rank, use_bias=False, name="lora_a")
            up = nn.Dense(self.features, use_bias=False, name="lora_b", kernel_init=nn.initializers.zeros)
            return super().__call__(x) + up(down(x))

    return LoraDense
