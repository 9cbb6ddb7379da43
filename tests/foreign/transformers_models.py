"""Models of Hugging Face in Flax. Their steps are as the library's scripts write them: for
`jax.pmap`, with the sum of the losses and the number of labels, or with pairs of one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax.training.train_state import TrainState

from tests.foreign.program import (
    KEY,
    ROWS,
    TX,
    Edit,
    Port,
    Program,
    library,
    mapped,
    normal,
    ported,
    tokens,
)

OF_LABELS = """
import jax, optax


def train_step(state, batch, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def compute_loss(params):
        labels = batch["labels"]
        inputs = {name: batch[name] for name in batch if name != "labels"}
        out = state.apply_fn(**inputs, params=params, dropout_rng=dropout_rng, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(out.logits, labels)
        loss = (loss * (labels > 0)).sum()
        count = (labels > 0).sum()
        return loss, count

    (loss, count), grads = jax.value_and_grad(compute_loss, has_aux=True)(state.params)
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

    def compute_loss(params):
        out = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)
        texts, images = out.text_embeds, out.image_embeds
        pairs = jnp.arange(len(texts))
        scale = jnp.exp(params["logit_scale"])
        of_texts = scale * out.text_embeds @ images.T
        of_images = scale * out.image_embeds @ texts.T
        loss = optax.softmax_cross_entropy_with_integer_labels(of_texts, pairs)
        loss += optax.softmax_cross_entropy_with_integer_labels(of_images, pairs)
        return loss.mean() / 2

    loss, grads = jax.value_and_grad(compute_loss)(state.params)
    grads, loss = jax.lax.pmean((grads, loss), "batch")
    state = state.apply_gradients(grads=grads)
    return state, loss
"""
OUT_OF_THE_STEP: tuple[Edit, ...] = (
    (
        "def train_step(state, batch, dropout_rng):\n"
        "    dropout_rng = jax.random.fold_in(dropout_rng, state.step)\n\n",
        "def train_loss(params, batch, dropout_rng, apply_fn):\n",
    ),
    (" state.apply_fn(", " apply_fn("),
)
MEAN_OF_LABELS = (
    *OUT_OF_THE_STEP,
    (
        "        count = (labels > 0).sum()\n        return loss, count\n",
        '        count = jax.lax.pmean((labels > 0).sum(), "batch")\n        return loss / count\n',
    ),
    (
        "    (loss, count), grads = jax.value_and_grad(compute_loss, has_aux=True)(state.params)\n"
        "...\n    return state, loss\n",
        "    return compute_loss(params)\n",
    ),
)
PAIRS_OF_ALL_DEVICES = (
    *OUT_OF_THE_STEP,
    (
        "        texts, images = out.text_embeds, out.image_embeds\n"
        "        pairs = jnp.arange(len(texts))\n",
        "        pairs = jnp.arange(len(out.text_embeds))\n"
        '        pairs += jax.lax.axis_index("batch") * len(pairs)\n'
        "        texts, images = jax.lax.all_gather(\n"
        '            (out.text_embeds, out.image_embeds), "batch", tiled=True\n'
        "        )\n",
    ),
    (
        "    loss, grads = jax.value_and_grad(compute_loss)(state.params)\n"
        "...\n    return state, loss\n",
        "    return compute_loss(params)\n",
    ),
)


def labels(length: int) -> Any:
    """Rows of several lengths: not each device has as many labels."""
    return np.where(np.arange(length) < np.arange(ROWS)[:, None] % 5 + 2, tokens(length), 0)


def pretrained(
    name: str, batch: Any, shape: Any, text: str = OF_LABELS, edits: Any = MEAN_OF_LABELS, **config
) -> Program:
    transformers = library("transformers")
    if not hasattr(transformers, f"Flax{name}"):
        pytest.skip("`make foreign` installs transformers<5, the last with models in Flax")
    cls = getattr(transformers, f"Flax{name}")
    model = cls(cls.config_class(**config), _do_init=False)
    theirs, ours, lines = ported(name, text, edits)
    init = jax.jit(lambda: model.init_weights(KEY, shape))
    make = lambda: TrainState.create(apply_fn=model.__call__, params=init(), tx=TX)
    loss = functools.partial(ours.train_loss, apply_fn=model.__call__)
    port = Port(mapped(theirs.train_step, KEY), lines)
    return Program(make, loss, batch, rng=KEY, axis="batch", port=port)


def bert() -> Program:
    """Masked tokens."""
    batch = {
        "input_ids": tokens(8),
        "attention_mask": np.ones((ROWS, 8), np.int32),
        "token_type_ids": np.zeros((ROWS, 8), np.int32),
        "labels": labels(8),
    }
    return pretrained(
        "BertForMaskedLM", batch, (1, 8), vocab_size=64, hidden_size=32, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=64, max_position_embeddings=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def of_sequences() -> Any:
    ones = np.ones((ROWS, 8), np.int32)
    return {
        "input_ids": tokens(8),
        "attention_mask": ones,
        "decoder_input_ids": tokens(8),
        "decoder_attention_mask": ones,
        "labels": labels(8),
    }


def bart() -> Program:
    return pretrained(
        "BartForConditionalGeneration", of_sequences(), (1, 8), vocab_size=64, d_model=32,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=16, dropout=0.0,
    )  # fmt: skip


def whisper() -> Program:
    """Sound by convolutions, and positions that are not to be trained."""
    batch = {
        "input_features": normal(ROWS, 8, 16),
        "decoder_input_ids": tokens(8),
        "labels": labels(8),
    }
    return pretrained(
        "WhisperForConditionalGeneration", batch, (1, 8, 16), vocab_size=64, num_mel_bins=8,
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0,
        max_source_positions=8, max_target_positions=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip


def clip() -> Program:
    """Each text against all images of the batch: what the devices have is gathered."""
    tower = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "projection_dim": 16,
    }  # fmt: skip
    batch = {
        "input_ids": tokens(8),
        "pixel_values": normal(ROWS, 3, 16, 16),
        "attention_mask": np.ones((ROWS, 8), np.int32),
    }
    return pretrained(
        "CLIPModel", batch, ((1, 8), (1, 16, 16, 3)), OF_PAIRS, PAIRS_OF_ALL_DEVICES,
        text_config=tower | {"vocab_size": 64, "max_position_embeddings": 8},
        vision_config=tower | {"image_size": 16, "patch_size": 8}, projection_dim=16,
    )  # fmt: skip


PROGRAMS: dict[str, Callable[[], Program]] = {
    "huggingface_bert": bert,
    "huggingface_bart": bart,
    "huggingface_whisper": whisper,
    "huggingface_clip": clip,
}
