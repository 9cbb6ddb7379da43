"""LoRA adapters beside the matrices of a Llama of models_hf.py (or a Mistral, Qwen 3, Gemma 3).

Parameters are `{"base": the model's, "lora": adapters}`, so that `keep="base"` means one of them.
The adapter of a matrix adds x A B. A is (layers, in, rank); B is (layers, rank, out), and begins as
zeros. The base may be quantized (QLoRA): finetune_llama.py trains it. Copy what you need.

- `targets=("q", "v")` names some of a layer's seven matrices. A Mixtral's experts have no adapters:
  pass `("q", "k", "v", "proj")`.
- `begin(key, where="layers/(q|k|v|proj|gate|up|down)")` leaves embedding and head in float32. A
  matrix stays in float32 if no block of 32 divides its last dimension.
- The model decodes a layer at a time. An 8B that writes takes 5.2 GiB beside the state; with
  `zerojax.manual.dequantize(params)` before it, 17.
- `import_safetensors(file, state, names=lora.peft_names, keep="base")` reads PEFT's adapters:
  multiply each `b` by the scale that their config has.

An 8B with adapters of rank 8 and a base in nf4 takes 2.1 GiB on each of two T4s, which have 13.6; a
row of 512 tokens for each has a peak of 4.2 GiB (1.1 s a step, as modelled), of 2048 4.8 (3.8 s):

    zerojax forecast examples/lora_hf.py:llama_8b --gpus 2xT4 --stages 3 --compute float16
"""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax

try:
    from examples import models_hf
except ImportError:  # beside your program
    import models_hf

MATRICES = ("q", "k", "v", "proj", "gate", "up", "down")


@dataclasses.dataclass(frozen=True, eq=False)
class Lora:
    model: models_hf.Llama
    rank: int = 8
    targets: tuple[str, ...] = MATRICES

    @property
    def names(self):
        """Those of the base: `models_hf.load(directory, lora, state, keep="lora")`."""
        return {f"base/{ours}": theirs for ours, theirs in self.model.names.items()}

    @property
    def ignore(self):
        return self.model.ignore

    @property
    def peft_names(self):
        """Those of the adapters in PEFT's files."""
        names = {}
        for target in self.targets:
            module = self.model.names[f"layers/{target}"][0].removesuffix(".weight")
            for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
                tensor = f"base_model.model.{module}.{theirs}.weight"
                names[f"lora/{target}/{ours}"] = (tensor, models_hf.DENSE)
        return names

    def dims(self):
        base, lora = self.model.dims(), {}
        experts = {"gate", "up", "down"} if "router" in base["layers"] else set()
        if wrong := [name for name in self.targets if name not in {*MATRICES} - experts]:
            raise ValueError(
                f"{wrong[0]!r} can have no adapter: targets= takes some of {MATRICES}, and of a "
                f"model with experts only {MATRICES[:4]}."
            )
        for name in self.targets:
            n, *sizes = base["layers"][name]
            inputs = 2 if name == "proj" else 1  # it takes heads
            into, out = math.prod(sizes[:inputs]), math.prod(sizes[inputs:])
            lora[name] = {"a": (n, into, self.rank), "b": (n, self.rank, out)}
        return {"base": base, "lora": lora}

    def begin(self, key, codes="nf4", where=None):
        """Returns adapters that change nothing yet, beside a base of zeros for files to fill.

        The zeros are made quantized: in float32, those of 8B would take 32 GB.
        """
        shapes = models_hf.structs(self)
        base = zerojax.quantize(shapes["base"], codes, where=where)
        params = {"base": base, "lora": shapes["lora"]}
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        for adapter in params["lora"].values():
            key, a = jax.random.fold_in(key, 1), adapter["a"]
            adapter["a"] = jax.random.normal(key, a.shape) / a.shape[1] ** 0.5
        return params

    def __call__(self, params, tokens):
        """Takes a quantized base, too: each layer decodes its weights when it runs."""
        base, layers = dict(params["base"]), dict(params["base"]["layers"])
        base = zerojax.manual.dequantize(base | {"layers": {}})
        return self.model({**base, "layers": {**layers, "lora": params["lora"]}}, tokens)

    def merged(self, state, dtype="bfloat16"):
        """Returns weights with which the model alone computes what base and adapters do."""

        @jax.jit
        def weights(state, adapters):
            base = zerojax.manual.dequantize(zerojax.unpad(state).params["base"])
            layers = dict(base["layers"])
            for name, adapter in adapters.items():
                layers[name] += (adapter["a"] @ adapter["b"]).reshape(layers[name].shape)
            return jax.tree.map(lambda leaf: leaf.astype(dtype), {**base, "layers": layers})

        return weights(state, zerojax.reshard(only_adapters(state))["lora"])


def is_base(params):
    """Returns a tree like `params`: True for what stays frozen."""
    return {part: jax.tree.map(lambda _, p=part: p == "base", params[part]) for part in params}


def only_adapters(state):
    """Returns the state without the base, for checkpoints and files."""
    return state.replace(params={"lora": state.params["lora"]})


def save_peft(directory, lora, state, base):
    """Writes what PEFT's `PeftModel.from_pretrained(model, directory)` reads; its scale is 1."""
    directory, names = pathlib.Path(directory), lora.peft_names
    zerojax.checkpoint.export_safetensors(directory, only_adapters(state), names=names)
    modules = sorted({tensor.split(".")[-3] for tensor, _ in names.values()})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base)}
    config |= {"r": lora.rank, "lora_alpha": lora.rank, "target_modules": modules, "bias": "none"}
    if jax.process_index() == 0:
        (written,) = directory.glob("*.safetensors")
        written.rename(directory / "adapter_model.safetensors")
        (directory / "model.safetensors.index.json").unlink()
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def llama_8b(rows=2, tokens=512, rank=8, codes="nf4"):
    """Llama 3.1 8B, for `zerojax forecast examples/lora_hf.py:llama_8b --gpus 2xT4`."""
    config = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32}
    config |= {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    lora = Lora(models_hf.Llama({**config, "rms_norm_eps": 1e-5}), rank)

    def make_state():
        params = lora.begin(jax.random.key(0), codes)
        tx = optax.selective_transform(optax.adamw(2e-4), freeze_mask=is_base(params))
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def loss_fn(params, ids):
        logits = lora(params, ids[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    return loss_fn, make_state, jax.ShapeDtypeStruct((rows, tokens + 1), jnp.int32)
