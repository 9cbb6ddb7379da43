"""Programs that are in no package, written anew in their manner, those of smaller libraries, and
models of Hugging Face: as they are for one device or for `jax.pmap`, and the lines that change."""

from typing import Any

import numpy as np
import pytest

from tests.foreign import program as _p
from tests.foreign.program import KEY, OUT_OF_THE_STEP, ROWS, Program, integers, normal, tokens

# -- a UNet of diffusers, with the step of its scripts for `jax.pmap`

UNET = """
import jax, jax.numpy as jnp


def train_step(state, batch):
    def loss_fn(params):
        t = batch["timesteps"][:, None, None, None] / 1000
        noisy = jnp.sqrt(1 - t) * batch["latents"] + jnp.sqrt(t) * batch["noise"]
        model_pred = state.apply_fn(
            {"params": params}, noisy, batch["timesteps"], batch["text"], train=True
        ).sample
        return ((batch["noise"] - model_pred) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = jax.lax.pmean(grads, "batch")
    new_state = state.apply_gradients(grads=grads)
    return new_state, jax.lax.pmean(loss, axis_name="batch")
"""


def unet() -> Program:
    config = {
        "sample_size": 8,
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
        "cross_attention_dim": 16,
        "block_out_channels": (32,),
        "layers_per_block": 1,
        "attention_head_dim": 4,
    }
    model = _p.library("diffusers").FlaxUNet2DConditionModel(**config)
    batch = {"latents": normal(ROWS, 4, 8, 8), "noise": normal(ROWS, 4, 8, 8)}
    batch |= {"timesteps": integers(1000, ROWS), "text": normal(ROWS, 4, 16)}
    of = lambda _: (model.apply, lambda: model.init_weights(KEY))
    return _p.trained("unet", UNET, OUT_OF_THE_STEP, batch, of, compiled=_p.mapped)


# -- Hugging Face. The steps are as the library's scripts write them: for `jax.pmap`, with the sum
# of the losses and the number of labels, or with pairs of one device.

OF_LABELS = """
import jax, optax


def train_step(state, batch, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        labels = batch["labels"]
        inputs = {name: batch[name] for name in batch if name != "labels"}
        out = state.apply_fn(**inputs, params=params, dropout_rng=dropout_rng, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(out.logits, labels)
        loss = (loss * (labels > 0)).sum()
        count = (labels > 0).sum()
        return loss, count

    (loss, count), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    count = jax.lax.psum(count, "batch")
    loss = jax.lax.psum(loss, "batch") / count
    grads = jax.tree.map(lambda grad: jax.lax.psum(grad, "batch") / count, grads)
    state = state.apply_gradients(grads=grads)
    return state, loss
"""
OF_PAIRS = """
import jax, jax.numpy as jnp, optax


def train_step(state, batch, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        out = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)
        texts, images = out.text_embeds, out.image_embeds
        pairs = jnp.arange(len(texts))
        scale = jnp.exp(params["logit_scale"])
        of_texts = scale * out.text_embeds @ images.T
        of_images = scale * out.image_embeds @ texts.T
        loss = optax.softmax_cross_entropy_with_integer_labels(of_texts, pairs)
        loss += optax.softmax_cross_entropy_with_integer_labels(of_images, pairs)
        return loss.mean() / 2

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads, loss = jax.lax.pmean((grads, loss), "batch")
    state = state.apply_gradients(grads=grads)
    return state, loss
"""
_, MODEL, GRADIENTS = OUT_OF_THE_STEP
WITH_DROPOUT = (
    "def train_step(state, batch, dropout_rng):\n"
    "    dropout_rng = jax.random.fold_in(dropout_rng, state.step)\n\n",
    "def train_loss(params, batch, dropout_rng, apply_fn):\n",
)
MEAN_OF_LABELS = (
    WITH_DROPOUT,
    MODEL,
    (
        "        count = (labels > 0).sum()\n        return loss, count\n",
        '        count = jax.lax.pmean((labels > 0).sum(), "batch")\n        return loss / count\n',
    ),
    (
        "    (loss, count), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)\n...\n",
        "    return loss_fn(params)\n",
    ),
)
PAIRS_OF_ALL_DEVICES = (
    WITH_DROPOUT,
    MODEL,
    (
        "        texts, images = out.text_embeds, out.image_embeds\n"
        "        pairs = jnp.arange(len(texts))\n",
        "        pairs = jnp.arange(len(out.text_embeds))\n"
        '        pairs += jax.lax.axis_index("batch") * len(pairs)\n'
        "        texts, images = jax.lax.all_gather(\n"
        '            (out.text_embeds, out.image_embeds), "batch", tiled=True\n'
        "        )\n",
    ),
    GRADIENTS,
)


def pretrained(
    name: str, batch: Any, shape: Any, text: str = OF_LABELS, edits: Any = MEAN_OF_LABELS, **config
) -> Program:
    transformers = _p.library("transformers")
    if not hasattr(transformers, f"Flax{name}"):
        pytest.skip("`make foreign` installs transformers<5, the last with models in Flax")
    cls = getattr(transformers, f"Flax{name}")
    model = cls(cls.config_class(**config), _do_init=False)
    of = lambda _: (model.__call__, lambda: model.init_weights(KEY, shape))
    more = {"compiled": lambda step: _p.mapped(step, KEY), "rng": KEY, "axis": "batch"}
    return _p.trained(name, text, edits, batch, of, **more)


def labels(length: int) -> Any:
    """Rows of several lengths: not each device has as many labels."""
    return np.where(np.arange(length) < np.arange(ROWS)[:, None] % 5 + 2, tokens(length), 0)


ONES = np.ones((ROWS, 8), np.int32)
IDS = {"input_ids": tokens(8), "attention_mask": ONES}
TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"intermediate_size": 64}


def bert() -> Program:
    """Masked tokens."""
    config = TOWER | {"vocab_size": 64, "max_position_embeddings": 8}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    batch = IDS | {"token_type_ids": 0 * ONES, "labels": labels(8)}
    return pretrained("BertForMaskedLM", batch, (1, 8), **config)


def clip() -> Program:
    """Each text against all images of the batch: what the devices have is gathered."""
    tower = TOWER | {"projection_dim": 16}
    config = {
        "text_config": tower | {"vocab_size": 64, "max_position_embeddings": 8},
        "vision_config": tower | {"image_size": 16, "patch_size": 8},
        "projection_dim": 16,
    }
    batch, shapes = IDS | {"pixel_values": normal(ROWS, 3, 16, 16)}, ((1, 8), (1, 16, 16, 3))
    return pretrained("CLIPModel", batch, shapes, OF_PAIRS, PAIRS_OF_ALL_DEVICES, **config)


PROGRAMS = {"diffusers_unet": unet, "huggingface_bert": bert, "huggingface_clip": clip}
