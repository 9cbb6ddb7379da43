"""A GPT whose layers are in a Python loop, with weights of their own, as in most tutorials."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from zerojax.tools._forecast import presets as _presets


@dataclasses.dataclass(frozen=True)
class Looped(_presets.Gpt):
    """Applies the layers of a preset one by one."""

    def dims(self):
        dims = super().dims()
        layer = {name: shape[1:] for name, shape in dims["blocks"].items()}
        return dims | {"blocks": {f"layer_{i:02}": layer for i in range(self.layers)}}

    def loss(self, params, tokens, remat="full"):
        params = jax.tree.map(lambda leaf: leaf.astype(self.compute), params)
        x = self.embedded(params, tokens)
        for weights in params["blocks"].values():
            x, _ = self._rematted(remat)(x, weights)
        logits = self.logits(params, x)[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


PRESETS = {"7.5b loop": Looped(36, 4096, 32), "small loop": Looped(50, 128, 4)}
