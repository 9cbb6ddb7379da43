"""Fine-tunes a Llama from Hugging Face's files on a task: all weights, or adapters (QLoRA).

    hf download meta-llama/Llama-3.2-1B --local-dir runs/llama  # you accept its license before
    python examples/finetune_llama.py --base runs/llama --lr 2e-5 --export runs/mine
    python examples/finetune_llama.py --base runs/mine --rank 8 --lr 2e-4 --export runs/merged
    python examples/finetune_llama.py    # without a download: a small Llama of random numbers

Two GPUs each hold half of the weights, and read only their half from the files. T4s have no
bfloat16, and small gradients vanish in float16: with a field `dynamic_scale` in the state, the step
scales the loss and skips updates that overflow.

With `--rank`, the weights stay frozen, quantized to 4 bits, and adapters beside their matrices
train: lora_hf.py says what that takes. Checkpoints hold only the adapters, their optimizer state,
the scale and the step: 0.23 GiB for an 8B instead of 4.3.

transformers' `AutoModelForCausalLM.from_pretrained` reads what `--export` writes, once you copy
the tokenizer's files beside it. With `--rank`, that is the merged model, and PEFT's files are in a
folder beside it: `PeftModel.from_pretrained(model, "runs/merged_adapters")`. Merged, the GPUs need
memory for all weights in bfloat16: 13.0 GiB for an 8B on each of two T4s, which have 13.6.

The task is to write letters backwards: replace `rows_of` by your token ids. From random numbers,
more than 90% of the letters are right in the end, and with adapters after 40 more steps.
"""

import argparse
import pathlib
from contextlib import nullcontext

import jax

jax.config.update("jax_num_cpu_devices", 8)  # only matters without a GPU

import jax.numpy as jnp
import lora_hf
import models_hf
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import zerojax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--base", default="runs/small_llama", help="a downloaded directory")
parser.add_argument("--rank", type=int, default=0, help="of adapters; 0 trains all weights")
parser.add_argument("--codes", default="nf4", choices=("nf4", "int4", "int8"), help="of the base")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
parser.add_argument("--steps", type=int, default=250)
parser.add_argument("--batch", type=int, default=64, help="rows per step, over all devices")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--checkpoints", help="a directory to save to and resume from")
parser.add_argument("--save-every", type=int, default=20, help="steps")
parser.add_argument("--export", help="a new directory for the trained weights")

LETTERS, STOP = 6, 31


class State(TrainState):
    dynamic_scale: DynamicScale


def make_base(directory):
    """Writes a small Llama of random numbers as transformers would."""
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    small = models_hf.Llama({**config, "rms_norm_eps": 1e-5, "tie_word_embeddings": True})
    rng = np.random.default_rng(0)
    draw = lambda path, leaf: 0.1 * rng.normal(size=leaf.shape) + ("norm" in str(path))
    params = jax.tree_util.tree_map_with_path(draw, models_hf.structs(small))
    models_hf.save(directory, small, jax.tree.map(np.float32, params))


def rows_of(seed, count):
    """Returns prompts and their answers as Hugging Face's collators do.

    A label is -100 where a token does not count. Rows that are padded on the right need no
    attention mask, because no token sees those after it.
    """
    letters = np.random.default_rng(seed).integers(0, 26, (count, LETTERS))
    ids = np.concatenate([letters, np.full((count, 1), STOP), letters[:, ::-1]], axis=1)
    return {"input_ids": ids, "labels": np.where(np.arange(ids.shape[1]) > LETTERS, ids, -100)}


def loss_of(model):
    def loss_fn(params, batch):
        logits = model(params, batch["input_ids"])[:, :-1].astype(jnp.float32)
        labels = batch["labels"][:, 1:]
        counts = labels != -100  # no token: the loss puts another label in its place
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.where(counts, labels, 0)
        )
        # Each row has as many answers; `zerojax.mean` counts the losses' over all devices.
        right = ((logits.argmax(-1) == labels) & counts).sum() / (LETTERS * len(labels))
        return zerojax.mean(losses, where=counts), {"right": right}

    return loss_fn


def write(model, params, rows):
    """Returns rows of ids with answers that the model writes."""
    tokens, call = rows["input_ids"].copy(), jax.jit(model)
    tokens[:, LETTERS + 1 :] = 0
    for n in range(LETTERS, 2 * LETTERS):
        tokens[:, n + 1] = call(params, tokens)[:, n].argmax(-1)
    return tokens


def main():
    args = parser.parse_args()
    zerojax.initialize()
    base = pathlib.Path(args.base)
    if not base.exists():
        zerojax.run.log(f"There is no {base}: making a small Llama of random numbers.")
        make_base(base)
    model = models_hf.model_of(base)  # by its config.json
    lora = lora_hf.Lora(model, args.rank) if args.rank else None

    def make_state():
        schedule = optax.warmup_cosine_decay_schedule(0, args.lr, 30, max(args.steps, 31))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        if lora:
            params = lora.begin(jax.random.key(0), args.codes)
            tx = optax.selective_transform(tx, freeze_mask=lora_hf.is_base(params))
        else:
            params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), models_hf.structs(model))
        # Of a Python number, JAX would compile the step once more for the array that replaces it.
        scale = DynamicScale(scale=jnp.float32(2**16))
        return State.create(apply_fn=None, params=params, tx=tx, dynamic_scale=scale)

    state = zerojax.shard_train_state(make_state, stage=args.stage)
    frozen = {"keep": "lora"} if lora else {}  # the files have no adapters
    state = state.replace(params=models_hf.load(base, lora or model, state, **frozen))

    gpu = jax.devices()[0]
    is_old = gpu.platform == "gpu" and float(gpu.compute_capability) < 8
    narrow = zerojax.Precision(compute="float16" if is_old else "bfloat16")
    loss_fn = loss_of(lora or model)
    step = zerojax.train_step(loss_fn, precision=narrow, accumulate=args.accumulate)
    state = train(args, state, step, lora)

    params = zerojax.reshard(state, dtype=narrow.compute)  # whole on each device: no gathers
    tokens = write(lora or model, params, rows_of(1000, 1))[0]
    spelled = lambda row: "".join(chr(ord("a") + token) for token in row)
    zerojax.run.log(f"{spelled(tokens[:LETTERS])} backwards is {spelled(tokens[LETTERS + 1 :])}")
    if args.export:
        del params
        export = pathlib.Path(args.export)
        models_hf.save(export, model, lora.merged(state) if lora else state, dtype="bfloat16")
        if lora:
            adapters = export.with_name(export.name + "_adapters")
            lora_hf.save_peft(adapters, lora, state, base=base)


def train(args, state, step, lora):
    folder, every = args.checkpoints, args.save_every
    mine = zerojax.run.process_slice(args.batch)
    with zerojax.Checkpoints(folder, every=every) if folder else nullcontext() as checkpoints:
        start = 0
        if checkpoints:
            keep = {"keep": "params/base"} if lora else {}  # loaded already
            state, saved = checkpoints.resume(state, **keep)
            start = saved.step or 0
        for n in range(start, args.steps):
            rows = jax.tree.map(lambda leaf: leaf[mine], rows_of(n, args.batch))
            state, metrics = step(state, zerojax.shard_batch(rows))
            if checkpoints:
                checkpoints.save(n + 1, lora_hf.only_adapters(state) if lora else state)
            if n + 1 == args.steps or n % 50 == 49:
                right = metrics["aux"]["right"]
                zerojax.run.log(f"step {n + 1}: loss {metrics['loss']:.3f}, {right:.1%} right")
    return state


if __name__ == "__main__":
    main()
