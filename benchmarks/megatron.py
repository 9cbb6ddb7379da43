"""A GPT with the state of the ZeRO paper, with or without model parallelism of its own.

Parameters and gradients have 16 bits, and the optimizer has fp32 copies and two moments: 2 + 2 + 12
bytes. A `tensor` axis splits heads, inner features and the vocabulary, as in Megatron.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from zerojax.tools._forecast import presets as _presets

SCALE = 1024  # of the loss: small gradients vanish in float16
LAST = P(None, None, "tensor")
SPECS = {"embed": P("tensor", None), "qkv": LAST, "proj": LAST, "up": LAST, "down": LAST}


@dataclasses.dataclass(frozen=True)
class Megatron(_presets.Gpt):
    def make_state(self):
        params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes())
        tx = optax.chain(optax.scale(1 / SCALE), optax.adamw(1e-4))
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def dims(self):
        """As in the GPT, but weights split by rows rest transposed, as in PyTorch.

        ZeRO shards the other dimension. If that is the last one, XLA transposes a whole stack to
        all-gather it.
        """
        dims = super().dims()
        rows = {"down": (self.layers, self.hidden, 4 * self.hidden)}
        return dims | {"blocks": dims["blocks"] | rows}

    def layer(self, x, p):
        """As in the GPT, but with q, k and v of a head side by side: a device has whole heads."""
        rows, tokens, dim = x.shape
        qkv = (_presets._norm(x, p["norm1"]) @ p["qkv"]).reshape(rows, tokens, self.heads, 3, -1)
        attended = jax.nn.dot_product_attention(*jnp.unstack(qkv, axis=3), is_causal=True)
        x = x + attended.reshape(rows, tokens, dim) @ p["proj"].T
        return x + jax.nn.gelu(_presets._norm(x, p["norm2"]) @ p["up"]) @ p["down"].T, None

    def loss(self, params, tokens, remat="full"):
        """As in the GPT, but compares to find labels: each device has only a part of the logits."""
        params = jax.tree.map(lambda leaf: leaf.astype(self.compute), params)
        layer = self._rematted(remat)
        x, _ = jax.lax.scan(layer, self.embedded(params, tokens), params["blocks"])
        logits = self.logits(params, x)[:, :-1].astype(jnp.float32)
        is_label = tokens[:, 1:, None] == jnp.arange(self.vocab)
        right = jnp.where(is_label, logits, 0).sum(-1)
        return SCALE * (jax.nn.logsumexp(logits, -1) - right).mean()

    def flops(self, rows):
        """Returns the FLOPs of a step's matmuls, including recomputed ones.

        Backward does not recompute a layer's last matmul, because it does not read the result.
        """
        forward = 24 * self.hidden**2 + 4 * self.tokens * self.hidden
        layer = 4 * forward - 8 * self.hidden**2
        return rows * self.tokens * (self.layers * layer + 6 * self.hidden * self.vocab)


def planned(model, mesh, stage):
    """Plans a state of 2 + 2 + 12 bytes, beside a `tensor` axis if the mesh has one."""
    state = jax.eval_shape(model.make_state)
    if "tensor" in mesh.axis_names:
        state = state.replace(params=jax.tree_util.tree_map_with_path(_split(mesh), state.params))
    half = jnp.dtype(model.compute)
    precision = zerojax.Precision(compute=half, param=half, master="float32")
    return zerojax.plan(state, stage=stage, mesh=mesh, axis="data", precision=precision)


def _split(mesh):
    def split(path, leaf):
        where = NamedSharding(mesh, SPECS.get(path[-1].key, P()))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return split
