"""GPT-2, Llama, Mistral, Mixtral, Qwen 3, Gemma 3, the dense part of DeepSeek and ViT in plain JAX,
and the names of their weights in Hugging Face's files.

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

QK_NORMS = {
    "layers/q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "layers/k_norm": "model.layers.{}.self_attn.k_norm.weight",
}
EXPERT = "model.layers.{}.block_sparse_moe.experts.{}"
MIXTRAL_NAMES = LLAMA_NAMES | {
    "layers/router": ("model.layers.{}.block_sparse_moe.gate.weight", DENSE),
    "layers/gate": (f"{EXPERT}.w1.weight", DENSE),
    "layers/up": (f"{EXPERT}.w3.weight", DENSE),
    "layers/down": (f"{EXPERT}.w2.weight", DENSE),
}
GEMMA_NAMES = {
    **LLAMA_NAMES,
    **QK_NORMS,
    "layers/attended_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers/norm2": "model.layers.{}.pre_feedforward_layernorm.weight",
    "layers/fed_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}
# Queries, keys and values come from short vectors. A small DeepSeek has no such one for queries.
LATENT = "model.layers.{}.self_attn"
DEEPSEEK_NAMES = {
    **{k: v for k, v in LLAMA_NAMES.items() if k not in ("layers/k", "layers/v")},
    "layers/kv_a": (f"{LATENT}.kv_a_proj_with_mqa.weight", DENSE),
    "layers/kv_norm": f"{LATENT}.kv_a_layernorm.weight",
    "layers/kv": (f"{LATENT}.kv_b_proj.weight", TO_HEADS),
}
SHORT_QUERIES = {
    "layers/q_a": (f"{LATENT}.q_a_proj.weight", DENSE),
    "layers/q_norm": f"{LATENT}.q_a_layernorm.weight",
    "layers/q": (f"{LATENT}.q_b_proj.weight", TO_HEADS),
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

    table, ignore = LLAMA_NAMES, r"rotary_emb"
    ties, added, activation = False, 0, staticmethod(jax.nn.silu)
    window = None  # how many tokens a token sees, itself included; None: all before it

    @property
    def tied(self):
        return self.config.get("tie_word_embeddings", self.ties)

    @property
    def names(self):
        left_out = ("head",) if self.tied else ()
        return {ours: theirs for ours, theirs in self.table.items() if ours not in left_out}

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
        layers = self.layers(params)
        x, _ = jax.lax.scan(jax.checkpoint(self.layer), self.embedded(params, tokens), layers)
        head = params["embed"].T if self.tied else params["head"]
        return self.norm(x, params["norm"]) @ head

    def embedded(self, params, tokens):
        return params["embed"][tokens]

    def layers(self, params):
        """Returns what the loop over layers scans."""
        return params["layers"]

    def layer(self, x, p):
        x += self.attended(self.norm(x, p["norm1"]), p)
        return x + self.fed(self.norm(x, p["norm2"]), p), None

    def attended(self, h, p):
        q, k, v = self.heads(h, p)
        window = self.window and (self.window - 1, 0)
        q, k = self.rotated(q), self.rotated(k)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)
        return self.times(out, p, "proj")

    def times(self, x, p, name):
        """Multiplies by a matrix of a layer, which may be quantized or have an adapter."""
        y = jnp.tensordot(x, zerojax.manual.dequantize(p[name]), x.ndim - 2)
        if name in (adapters := p.get("lora", {})):
            flat, adapter = x.reshape(*x.shape[:2], -1), adapters[name]
            y += (flat @ adapter["a"] @ adapter["b"]).reshape(y.shape)
        return y

    def heads(self, h, p):
        q, k, v = (self.times(h, p, name) for name in "qkv")
        if "q_norm" in p:
            q, k = self.norm(q, p["q_norm"]), self.norm(k, p["k_norm"])
        return q, k, v

    def fed(self, h, p):
        gate, up = self.times(h, p, "gate"), self.times(h, p, "up")
        return self.times(self.activation(gate) * up, p, "down")

    def norm(self, x, scale):
        wide = x.astype(jnp.float32)
        mean_square = jnp.square(wide).mean(-1, keepdims=True)
        scaled = wide * jax.lax.rsqrt(mean_square + self.config["rms_norm_eps"])
        return (scaled * (self.added + scale)).astype(x.dtype)

    def rotated(self, x, rates=None):
        rates = self.rates(x.shape[3]) if rates is None else rates
        angles = jnp.arange(x.shape[1])[:, None, None] * rates
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def rates(self, dim, rope=None):
        """Radians a token for each pair; from Llama 3.1 on, the slow pairs are slower still."""
        c = self.config  # transformers writes rope_parameters since version 5
        rope = rope or c.get("rope_parameters") or c.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or c.get("rope_theta", 10000.0)
        rates = (theta ** -(np.arange(0, dim, 2) / dim)).astype(np.float32)
        kind = rope.get("rope_type") or rope.get("type", "default")  # older files have `type`
        if kind in ("default", "linear"):
            return rates / rope.get("factor", 1.0) if kind == "linear" else rates
        if kind != "llama3":
            raise ValueError(f"rope_type {kind!r} is none of default, linear, llama3. Add it here.")
        turns = rope["original_max_position_embeddings"] * rates / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return rates * (kept + (1 - kept) / rope["factor"])


class Mistral(Llama):
    @property
    def window(self):
        return self.config.get("sliding_window")


class Qwen3(Llama):
    table = LLAMA_NAMES | QK_NORMS

    def dims(self):
        dims = super().dims()
        n, _, _, dim = dims["layers"]["q"]
        dims["layers"] |= {"q_norm": (n, dim), "k_norm": (n, dim)}
        return dims


class Mixtral(Mistral):
    """Sends each token to the best of its experts. No loss balances them."""

    table = MIXTRAL_NAMES

    def dims(self):
        dims, experts = super().dims(), self.config["num_local_experts"]
        n, d, inner = dims["layers"]["up"]
        up, down = (n, experts, d, inner), (n, experts, inner, d)
        dims["layers"] |= {"router": (n, d, experts), "gate": up, "up": up, "down": down}
        return dims

    def fed(self, h, p):
        flat, top = h.reshape(-1, h.shape[-1]), self.config["num_experts_per_tok"]
        shares = jax.nn.softmax(
            self.times(h, p, "router").reshape(len(flat), -1).astype(jnp.float32)
        )
        shares, experts = jax.lax.top_k(shares, top)
        shares = (shares / shares.sum(-1, keepdims=True)).reshape(-1)
        order = jnp.argsort(experts.reshape(-1))  # the tokens of an expert side by side
        counts = jnp.bincount(experts.reshape(-1), length=self.config["num_local_experts"])
        weights = zerojax.manual.dequantize({name: p[name] for name in ("gate", "up", "down")})
        by_expert = lambda x, name: jax.lax.ragged_dot(x, weights[name], counts.astype(jnp.int32))
        x = flat[order // top]
        x = by_expert(jax.nn.silu(by_expert(x, "gate")) * by_expert(x, "up"), "down")
        x *= shares[order][:, None].astype(x.dtype)
        return jnp.zeros_like(flat).at[order // top].add(x).reshape(h.shape)


class Gemma3(Qwen3):
    """The text models. Most layers see only near tokens, and rotate faster."""

    table, ties, added = GEMMA_NAMES, True, 1
    activation = staticmethod(jax.nn.gelu)

    def dims(self):
        dims = super().dims()
        dims["layers"] |= dict.fromkeys(("attended_norm", "fed_norm"), dims["layers"]["norm1"])
        return dims

    def embedded(self, params, tokens):
        x = params["embed"][tokens]
        return x * jnp.asarray(self.config["hidden_size"] ** 0.5, x.dtype)

    def layers(self, params):
        c, n = self.config, len(params["layers"]["q"])
        every = c.get("sliding_window_pattern", 6)  # before transformers wrote layer_types
        near = [kind == "sliding_attention" for kind in c.get("layer_types") or ()]
        near = np.array(near or [at % every > 0 for at in range(1, n + 1)])
        local = {"rope_theta": c.get("rope_local_base_freq", 10000.0)}
        ropes = c.get("rope_parameters") or {"sliding_attention": local}
        dim = params["layers"]["q"].shape[-1]
        kinds = ("full_attention", "sliding_attention")
        rates = np.stack([self.rates(dim, ropes.get(kind)) for kind in kinds])
        window = np.where(near, c["sliding_window"], 2**30)
        return params["layers"], rates[near.astype(int)], window

    def layer(self, x, scanned):
        p, rates, window = scanned
        h = self.near(self.norm(x, p["norm1"]), p, rates, window)
        x += self.norm(h, p["attended_norm"])
        h = self.fed(self.norm(x, p["norm2"]), p)
        return x + self.norm(h, p["fed_norm"]), None

    def near(self, h, p, rates, window):
        q, k, v = self.heads(h, p)
        q, k = self.rotated(q, rates), self.rotated(k, rates)
        back = jnp.arange(h.shape[1])[:, None] - jnp.arange(h.shape[1])
        mask = ((back >= 0) & (back < window))[None, None]
        scale = self.config["query_pre_attn_scalar"] ** -0.5
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)
        return self.times(out, p, "proj")


class DeepSeek(Llama):
    """The dense part of DeepSeek 2 and 3: all attention, and the layers before those with experts.
    It computes if no layer has experts. The rotation pairs neighbours."""

    @property
    def ignore(self):
        further = self.config["num_hidden_layers"]  # a layer of V3 that predicts further tokens
        return rf"rotary_emb|mlp\.(experts|shared_experts|gate)\.|layers\.{further}\."

    @property
    def table(self):
        return DEEPSEEK_NAMES | (SHORT_QUERIES if self.config.get("q_lora_rank") else {})

    def dims(self):
        dims, c = super().dims(), self.config
        dense = min(c["first_k_dense_replace"], c["num_hidden_layers"])
        layers = {k: v for k, v in dims["layers"].items() if k not in ("k", "v")}
        layers |= {k: (dense, *layers[k][1:]) for k in ("gate", "up", "down")}
        n, d, heads, _ = layers["q"]
        rope, rest, value = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
        short, q_short = c["kv_lora_rank"], c.get("q_lora_rank") or d
        if "layers/q_a" in self.table:
            layers |= {"q_a": (n, d, q_short), "q_norm": (n, q_short)}
        layers |= {"q": (n, q_short, heads, rest + rope), "kv": (n, short, heads, rest + value)}
        layers |= {"kv_a": (n, d, short + rope), "kv_norm": (n, short)}
        return {**dims, "layers": layers | {"proj": (n, heads, value, d)}}

    def layers(self, params):
        layers = params["layers"]
        if len(layers["up"]) < len(layers["q"]):
            raise ValueError(
                f"Layers from {len(layers['up'])} on have experts, which this model does not have: "
                "its weights are those of all attention and of the dense layers. Write the experts "
                "in a subclass that overrides `layers`."
            )
        return layers

    def attended(self, h, p):
        short, value = p["kv_norm"].shape[-1], p["proj"].shape[1]
        rest = p["kv"].shape[-1] - value
        q = self.norm(h @ p["q_a"], p["q_norm"]) if "q_a" in p else h
        q = jnp.einsum("rti,ihd->rthd", q, p["q"])
        kv_a = h @ p["kv_a"]
        kv = jnp.einsum("rti,ihd->rthd", self.norm(kv_a[..., :short], p["kv_norm"]), p["kv"])
        neighbours = lambda x: jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        q_turned = self.rotated(neighbours(q[..., rest:]))
        k_turned = self.rotated(neighbours(kv_a[:, :, None, short:]))  # one for all heads
        k_turned = jnp.broadcast_to(k_turned, q_turned.shape)
        q = jnp.concatenate([q[..., :rest], q_turned], axis=-1)
        k = jnp.concatenate([kv[..., :rest], k_turned], axis=-1)
        v = jnp.pad(kv[..., rest:], [(0, 0)] * 3 + [(0, q.shape[-1] - value)])  # as long as keys
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)[..., :value]
        return jnp.einsum("rthd,hdo->rto", out, p["proj"])


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

MODELS = {"gpt2": GPT2, "llama": Llama, "mistral": Mistral, "mixtral": Mixtral, "qwen3": Qwen3}
MODELS |= {"gemma3_text": Gemma3, "deepseek_v2": DeepSeek, "deepseek_v3": DeepSeek, "vit": ViT}


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
