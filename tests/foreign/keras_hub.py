"""Models of KerasHub, as they are, with the losses that it trains them by."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.foreign.program import integers, library, normal

WIDTH = {"num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64, "vocabulary_size": 64}
ROWS = 20  # 8 devices do not divide the second batch of 16 and 4


def _compiled(task: Any, metrics: str) -> Any:
    keras = library("keras")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(1e-2, epsilon=1e-3, global_clipnorm=1.0)
    task.compile(optimizer, loss, **{metrics: ["accuracy"]})
    return task


def _language(task: str, backbone: str, **sizes: Any) -> Callable[[], Any]:
    def make() -> Any:
        hub = library("keras_hub").models
        body = getattr(hub, backbone)(**WIDTH | sizes)
        return _compiled(getattr(hub, task)(body, preprocessor=None), "weighted_metrics")

    return make


def vit() -> Any:
    hub = library("keras_hub").models
    body = hub.ViTBackbone((16, 16, 3), 4, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64)
    return _compiled(hub.ViTImageClassifier(body, 4, preprocessor=None), "metrics")


MODELS = {
    "gpt2": _language(
        "GPT2CausalLM", "GPT2Backbone", num_heads=2, max_sequence_length=16, dropout=0.0
    ),
    "gemma": _language(
        "GemmaCausalLM", "GemmaBackbone", num_query_heads=4, num_key_value_heads=1, head_dim=8
    ),
    "vit": vit,
}


def batch(name: str) -> tuple[Any, Any, Any]:
    if name == "vit":
        return normal(ROWS, 16, 16, 3), integers(4, ROWS), None
    ids = integers(64, ROWS, 12)
    weights = np.ones(ids.shape, np.float32)
    weights[3:9, 5:] = 0
    words = {"token_ids": ids, "padding_mask": np.int32(weights > 0)}
    return words, np.roll(ids, -1, axis=1), weights
