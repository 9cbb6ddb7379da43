"""GPT-2, Llama and ViT in plain JAX, and the names of their weights in Hugging Face's files.

A checkpoint's `config.json` defines the model; its layers are one scan over stacked weights. The
tables of names are for `zerojax.checkpoint`'s `import_safetensors` and `export_safetensors`. Copy
what you need; finetune_hf.py trains with it.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import zerojax

# ---- our parameters, their tensors, and the change of layout from theirs to ours

DENSE = "out in -> in out"  # torch's Linear
TO_HEADS = "(heads dim) in -> in heads dim"
FROM_HEADS = "out (heads dim) -> heads dim out"
PER_HEAD = "(heads dim) -> heads dim"

GPT2_NAMES = {  # its Conv1D has kernels as JAX does, and those of q, k and v side by side
    "embed": "wte.weight",
    "positions": "wpe.weight",
    "norm/scale": "ln_f.weight",
    "norm/bias": "ln_f.bias",
    "layers/norm1/scale": "h.{}.ln_1.weight",
    "layers/norm1/bias": "h.{}.ln_1.bias",
    "layers/qkv/kernel": ("h.{}.attn.c_attn.weight", "in (qkv heads dim) -> in qkv heads dim"),
    "layers/qkv/bias": ("h.{}.attn.c_attn.bias", "(qkv heads dim) -> qkv heads dim"),
    "layers/proj/kernel": ("h.{}.attn.c_proj.weight", "(heads dim) out -> heads dim out"),
    "layers/proj/bias": "h.{}.attn.c_proj.bias",
    "layers/norm2/scale": "h.{}.ln_2.weight",
    "layers/norm2/bias": "h.{}.ln_2.bias",
    "layers/up/kernel": "h.{}.mlp.c_fc.weight",
    "layers/up/bias": "h.{}.mlp.c_fc.bias",
    "layers/down/kernel": "h.{}.mlp.c_proj.weight",
    "layers/down/bias": "h.{}.mlp.c_proj.bias",
}

LLAMA_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": ("lm_head.weight", DENSE),
    "layers/norm1": "model.layers.{}.input_layernorm.weight",
    "layers/q": ("model.layers.{}.self_attn.q_proj.weight", TO_HEADS),
    "layers/k": ("model.layers.{}.self_attn.k_proj.weight", TO_HEADS),
    "layers/v": ("model.layers.{}.self_attn.v_proj.weight", TO_HEADS),
    "layers/proj": ("model.layers.{}.self_attn.o_proj.weight", FROM_HEADS),
    "layers/norm2": "model.layers.{}.post_attention_layernorm.weight",
    "layers/gate": ("model.layers.{}.mlp.gate_proj.weight", DENSE),
    "layers/up": ("model.layers.{}.mlp.up_proj.weight", DENSE),
    "layers/down": ("model.layers.{}.mlp.down_proj.weight", DENSE),
}

VIT, VIT_LAYER = "vit.embeddings", "vit.encoder.layer.{}"
VIT_NAMES = {
    "patches/kernel": (f"{VIT}.patch_embeddings.projection.weight", "out c y x -> y x c out"),
    "patches/bias": f"{VIT}.patch_embeddings.projection.bias",
    "class": (f"{VIT}.cls_token", "1 1 out -> out"),
    "positions": (f"{VIT}.position_embeddings", "1 place out -> place out"),
    "norm/scale": "vit.layernorm.weight",
    "norm/bias": "vit.layernorm.bias",
    "head/kernel": ("classifier.weight", DENSE),
    "head/bias": "classifier.bias",
    "layers/norm1/scale": f"{VIT_LAYER}.layernorm_before.weight",
    "layers/norm1/bias": f"{VIT_LAYER}.layernorm_before.bias",
    "layers/q/kernel": (f"{VIT_LAYER}.attention.attention.query.weight", TO_HEADS),
    "layers/q/bias": (f"{VIT_LAYER}.attention.attention.query.bias", PER_HEAD),
    "layers/k/kernel": (f"{VIT_LAYER}.attention.attention.key.weight", TO_HEADS),
    "layers/k/bias": (f"{VIT_LAYER}.attention.attention.key.bias", PER_HEAD),
    "layers/v/kernel": (f"{VIT_LAYER}.attention.attention.value.weight", TO_HEADS),
    "layers/v/bias": (f"{VIT_LAYER}.attention.attention.value.bias", PER_HEAD),
    "layers/proj/kernel": (f"{VIT_LAYER}.attention.output.dense.weight", FROM_HEADS),
    "layers/proj/bias": f"{VIT_LAYER}.attention.output.dense.bias",
    "layers/norm2/scale": f"{VIT_LAYER}.layernorm_after.weight",
    "layers/norm2/bias": f"{VIT_LAYER}.layernorm_after.bias",
    "layers/up/kernel": (f"{VIT_LAYER}.intermediate.dense.weight", DENSE),
    "layers/up/bias": f"{VIT_LAYER}.intermediate.dense.bias",
    "layers/down/kernel": (f"{VIT_LAYER}.output.dense.weight", DENSE),
    "layers/down/bias": f"{VIT_LAYER}.output.dense.bias",
}

# ---- the models


@dataclasses.dataclass(frozen=True, eq=False)
class GPT2:
    config: dict

    names = GPT2_NAMES
    ignore = r"\.attn\.(masked_)?bias$|^lm_head"  # masks, and the embedding's second name

    def dims(self):
        c = self.config
        n, d, heads = c["n_layer"], c["n_embd"], c["n_head"]
        inner = c.get("n_inner") or 4 * d
        norm = lambda *stack: {"scale": (*stack, d), "bias": (*stack, d)}
        layers = {
            "norm1": norm(n),
            "qkv": {"kernel": (n, d, 3, heads, d // heads), "bias": (n, 3, heads, d // heads)},
            "proj": {"kernel": (n, heads, d // heads, d), "bias": (n, d)},
            "norm2": norm(n),
            "up": {"kernel": (n, d, inner), "bias": (n, inner)},
            "down": {"kernel": (n, inner, d), "bias": (n, d)},
        }
        embeddings = {"embed": (c["vocab_size"], d), "positions": (c["n_positions"], d)}
        return {**embeddings, "norm": norm(), "layers": layers}

    def __call__(self, params, tokens):
        x = params["embed"][tokens] + params["positions"][: tokens.shape[1]]
        x, _ = jax.lax.scan(jax.checkpoint(self.layer), x, params["layers"])
        return self.norm(x, params["norm"]) @ params["embed"].T

    def layer(self, x, p):
        qkv = jnp.einsum("rti,iqhd->qrthd", self.norm(x, p["norm1"]), p["qkv"]["kernel"])
        qkv += p["qkv"]["bias"][:, None, None]
        attended = jax.nn.dot_product_attention(*qkv, is_causal=True)
        x += jnp.einsum("rthd,hdo->rto", attended, p["proj"]["kernel"]) + p["proj"]["bias"]
        hidden = jax.nn.gelu(dense(self.norm(x, p["norm2"]), p["up"]))
        return x + dense(hidden, p["down"]), None

    def norm(self, x, p):
        return layer_norm(x, p, self.config["layer_norm_epsilon"])


@dataclasses.dataclass(frozen=True, eq=False)
class Llama:
    """The files lay out heads for its rotation, which pairs the two halves of a head."""

    config: dict

    ignore = r"rotary_emb"

    @property
    def tied(self):
        return self.config.get("tie_word_embeddings", False)

    @property
    def names(self):
        return {
            ours: theirs
            for ours, theirs in LLAMA_NAMES.items()
            if not (ours == "head" and self.tied)
        }

    def dims(self):
        c = self.config
        n, d, heads = c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"]
        kv = c.get("num_key_value_heads") or heads
        dim, inner = c.get("head_dim") or d // heads, c["intermediate_size"]
        layers = {"norm1": (n, d), "norm2": (n, d), "q": (n, d, heads, dim)}
        layers |= {"k": (n, d, kv, dim), "v": (n, d, kv, dim), "proj": (n, heads, dim, d)}
        layers |= {"gate": (n, d, inner), "up": (n, d, inner), "down": (n, inner, d)}
        head = {} if self.tied else {"head": (d, c["vocab_size"])}
        return {"embed": (c["vocab_size"], d), **head, "norm": (d,), "layers": layers}

    def __call__(self, params, tokens):
        x, _ = jax.lax.scan(jax.checkpoint(self.layer), params["embed"][tokens], params["layers"])
        head = params["embed"].T if self.tied else params["head"]
        return self.norm(x, params["norm"]) @ head

    def layer(self, x, p):
        h = self.norm(x, p["norm1"])
        q, k, v = (jnp.einsum("rti,ihd->rthd", h, p[name]) for name in "qkv")
        q, k = self.rotated(q), self.rotated(k)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += jnp.einsum("rthd,hdo->rto", attended, p["proj"])
        h = self.norm(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def norm(self, x, scale):
        wide = x.astype(jnp.float32)
        mean_square = jnp.square(wide).mean(-1, keepdims=True)
        scaled = wide * jax.lax.rsqrt(mean_square + self.config["rms_norm_eps"]) * scale
        return scaled.astype(x.dtype)

    def rotated(self, x):
        angles = jnp.arange(x.shape[1])[:, None, None] * self.rates(x.shape[3])
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def rates(self, dim):
        """Radians a token for each pair; from Llama 3.1 on, the slow pairs are slower still."""
        c = self.config  # transformers writes rope_parameters since version 5
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or c.get("rope_theta", 10000.0)
        rates = (theta ** -(np.arange(0, dim, 2) / dim)).astype(np.float32)
        kind = rope.get("rope_type", "default")
        if kind == "default":
            return rates
        if kind != "llama3":
            raise ValueError(f"rope_type {kind!r} is neither default nor llama3. Add it here.")
        turns = rope["original_max_position_embeddings"] * rates / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return rates * (kept + (1 - kept) / rope["factor"])


@dataclasses.dataclass(frozen=True, eq=False)
class ViT:
    config: dict

    names = VIT_NAMES
    ignore = r"pooler"

    def dims(self):
        c = self.config
        n, d, heads = c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"]
        inner, side, classes = c["intermediate_size"], c["patch_size"], len(c["id2label"])
        norm = lambda *stack: {"scale": (*stack, d), "bias": (*stack, d)}
        to_heads = {"kernel": (n, d, heads, d // heads), "bias": (n, heads, d // heads)}
        layers = {
            **{name: to_heads for name in "qkv"},
            "norm1": norm(n),
            "proj": {"kernel": (n, heads, d // heads, d), "bias": (n, d)},
            "norm2": norm(n),
            "up": {"kernel": (n, d, inner), "bias": (n, inner)},
            "down": {"kernel": (n, inner, d), "bias": (n, d)},
        }
        return {
            "patches": {"kernel": (side, side, c["num_channels"], d), "bias": (d,)},
            "class": (d,),
            "positions": ((c["image_size"] // side) ** 2 + 1, d),
            "norm": norm(),
            "head": {"kernel": (d, classes), "bias": (classes,)},
            "layers": layers,
        }

    def __call__(self, params, images):
        """Returns logits for (rows, y, x, channels)."""
        kernel, side = params["patches"]["kernel"], self.config["patch_size"]
        rows, y, x, channels = images.shape
        patches = images.reshape(rows, y // side, side, x // side, side, channels)
        x = jnp.einsum("raybxc,yxco->rabo", patches, kernel).reshape(rows, -1, kernel.shape[-1])
        first = jnp.broadcast_to(params["class"], (rows, 1, kernel.shape[-1]))
        x = jnp.concatenate([first, x + params["patches"]["bias"]], axis=1) + params["positions"]
        x, _ = jax.lax.scan(jax.checkpoint(self.layer), x, params["layers"])
        return dense(self.norm(x[:, 0], params["norm"]), params["head"])

    def layer(self, x, p):
        h = self.norm(x, p["norm1"])
        q, k, v = (
            jnp.einsum("rti,ihd->rthd", h, p[name]["kernel"]) + p[name]["bias"] for name in "qkv"
        )
        attended = jax.nn.dot_product_attention(q, k, v)
        x += jnp.einsum("rthd,hdo->rto", attended, p["proj"]["kernel"]) + p["proj"]["bias"]
        hidden = jax.nn.gelu(dense(self.norm(x, p["norm2"]), p["up"]), approximate=False)
        return x + dense(hidden, p["down"]), None

    def norm(self, x, p):
        return layer_norm(x, p, self.config["layer_norm_eps"])


def dense(x, p):
    return x @ p["kernel"] + p["bias"]


def layer_norm(x, p, epsilon):
    wide = x.astype(jnp.float32)
    wide -= wide.mean(-1, keepdims=True)
    scaled = wide * jax.lax.rsqrt(wide.var(-1, keepdims=True) + epsilon) * p["scale"] + p["bias"]
    return scaled.astype(x.dtype)


# ---- checkpoints

MODELS = {"gpt2": GPT2, "llama": Llama, "vit": ViT}


def model_of(directory):
    """Returns the model that a checkpoint's config.json describes."""
    config = json.loads((pathlib.Path(directory) / "config.json").read_text())
    kind = config["model_type"]
    if kind not in MODELS:
        raise ValueError(f"{directory} is a {kind}, which is none of {', '.join(MODELS)}.")
    return MODELS[kind](config)


def structs(model, dtype=jnp.float32):
    """Returns the shapes of a model's parameters."""
    is_dims = lambda node: isinstance(node, tuple)
    return jax.tree.map(lambda d: jax.ShapeDtypeStruct(d, dtype), model.dims(), is_leaf=is_dims)


def load(directory, model, like, **options):
    """Reads a checkpoint straight into the shards of `like`, a plan or a state."""
    return zerojax.checkpoint.import_safetensors(
        directory,
        like,
        names=model.names,
        rename=lambda name: name.removeprefix("transformer."),  # GPT-2's, with its head or without
        ignore=model.ignore,
        cast=True,  # Llama's are bfloat16
        **options,
    )


def save(directory, model, params, **options):
    """Writes a checkpoint that transformers reads, without its tokenizer."""
    zerojax.checkpoint.export_safetensors(directory, params, names=model.names, **options)
    if jax.process_index() == 0:
        (pathlib.Path(directory) / "config.json").write_text(json.dumps(model.config, indent=2))
    multihost_utils.sync_global_devices("config.json")  # which the other processes may read next
