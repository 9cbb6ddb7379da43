"""The examples of Flax, as their authors wrote them: the text of `train.py` in the source of the
Flax that is installed, with the few lines that had to change."""

import functools
import sys
from types import SimpleNamespace
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.train_state import TrainState

from tests.foreign.program import (
    KEY,
    ROWS,
    SOURCES,
    TX,
    Edit,
    Port,
    Program,
    absent,
    importable,
    library,
    mapped,
    module,
    normal,
    ported,
    random,
    tokens,
)

# They read data, write logs and play games.
UNUSED = absent(
    "clu", "tensorflow", "tensorflow_datasets", "input_pipeline", "bleu", "decode",
    "temperature_sampler", "env_utils", "test_episodes", "flax.metrics",
)  # fmt: skip


def text_of(path: str) -> str:
    file = SOURCES / f"flax-{flax.__version__}" / path
    if not file.exists():
        pytest.skip("`make foreign` downloads the source of the Flax that is installed")
    return file.read_text()


def example(name: str, modules: str, *edits: Edit, **others: Any) -> Any:
    """The modules of an example, and the last of them once more with `edits`."""
    library("ml_collections"), library("orbax.checkpoint"), library("flax.training.checkpoints")
    text = lambda module: text_of(f"examples/{name}/{module}.py")
    *used, last = modules.split()
    with importable(UNUSED | dict.fromkeys(used) | others):
        for each in used:
            sys.modules[each] = module(f"{name}.{each}", text(each))
        used = {each: sys.modules[each] for each in used}
        theirs, ours, lines = ported(f"{name}.{last}", text(last), edits)
    return SimpleNamespace(**used, theirs=theirs, ours=ours, lines=lines)


def translation(vocab: int = 64) -> Any:
    """Sentences of several lengths, padded with zeros: not each device has as many words."""
    lengths = random.integers(3, 9, (ROWS, 1))
    padded = lambda: np.where(np.arange(8) < lengths, tokens(8, vocab - 1) + 1, 0)
    return {"inputs": padded(), "targets": padded()}


SMALL = {
    "vocab_size": 64, "output_vocab_size": 64, "emb_dim": 32, "num_heads": 2, "num_layers": 1,
    "qkv_dim": 32, "mlp_dim": 64, "max_len": 8, "dropout_rate": 0.0, "attention_dropout_rate": 0.0,
}  # fmt: skip
# Of both programs of translation and of language: the loss is what is left of the step.
OF_WORDS = (
    (
        "def train_step(\n    state,\n    batch,\n    config,\n    learning_rate_fn,\n"
        "    label_smoothing=0.0,\n    dropout_rng=None,\n):\n",
        "def train_loss(params, batch, dropout_rng, config, label_smoothing=0.0):\n",
    ),
    (
        "  dropout_rng = jax.random.fold_in(dropout_rng, state.step)"
        "  # pyrefly: ignore[bad-argument-type]\n\n",
        "",
    ),
)


def wmt() -> Program:
    """Translation, under `jax.pmap`: its loss is the mean over the words of each device."""
    parts = example(
        "wmt",
        "models train",
        *OF_WORDS,
        ("mean_loss = loss / weight_sum", 'mean_loss = loss / jax.lax.pmean(weight_sum, "batch")'),
        (
            "  step = state.step\n...\n  return new_state, metrics\n",
            "  mean_loss, logits = loss_fn(params)\n"
            "  return mean_loss, compute_metrics(logits, targets, weights)\n",
        ),
    )
    config = parts.models.TransformerConfig(**SMALL)
    model, batch = parts.models.Transformer(config), translation()
    init = jax.jit(lambda: model.init(KEY, batch["inputs"], batch["targets"])["params"])
    step_fn = functools.partial(
        parts.theirs.train_step, config=config, learning_rate_fn=lambda step: 0.0
    )
    theirs = mapped(lambda state, batch, key: step_fn(state, batch, dropout_rng=key), KEY)

    def step(state, batch):
        state, metrics = theirs(state, batch)
        return state, metrics["loss"] / metrics["denominator"]

    make = lambda: parts.theirs.TrainState.create(
        apply_fn=model.apply, params=init(), tx=TX, dynamic_scale=None
    )
    loss = functools.partial(parts.ours.train_loss, config=config)
    return Program(make, loss, batch, rng=KEY, axis="batch", port=Port(step, parts.lines))


def lm1b() -> Program:
    """A language model whose parameters name axes, for a mesh that is not this one."""
    parts = example(
        "lm1b",
        "models utils train",
        *OF_WORDS,
        ("mean_loss = loss / weight_sum", 'mean_loss = loss / jax.lax.pmean(weight_sum, "data")'),
        (
            "  step = state.step\n...\n  return new_state, metrics\n",
            "  mean_loss, logits = loss_fn(params)\n"
            "  return mean_loss, compute_metrics(logits, inputs, weights)\n",
        ),
    )
    config = parts.models.TransformerConfig(**SMALL)
    model, batch = parts.models.TransformerLM(config), {"inputs": translation()["inputs"]}
    sizes = SimpleNamespace(per_device_batch_size=2, max_target_length=8)
    theirs = jax.jit(
        functools.partial(
            parts.theirs.train_step, config=config, learning_rate_fn=lambda step: 0.0,
            dropout_rng=KEY,
        )
    )  # fmt: skip

    def step(state, batch):
        state, metrics = theirs(state, batch)
        return state, metrics["loss"] / metrics["denominator"]

    make = lambda: parts.utils.init_train_state(model, TX, sizes, KEY)
    loss = functools.partial(parts.ours.train_loss, config=config)
    return Program(make, loss, batch, rng=KEY, port=Port(step, parts.lines))


def imagenet() -> Program:
    """A ResNet: its BatchNorm and its metrics are means over `jax.pmap`'s axis."""
    parts = example(
        "imagenet",
        "models train",
        (
            "def train_step(state, batch, learning_rate_fn):\n",
            "def train_loss(params, batch, batch_stats, apply_fn):\n",
        ),
        (
            "new_model_state = state.apply_fn(\n"
            "        {'params': params, 'batch_stats': state.batch_stats},\n"
            "        batch['image'],\n",
            "new_model_state = apply_fn(\n"
            "        {'params': params, 'batch_stats': batch_stats},\n"
            "        batch['image'],\n",
        ),
        (
            "  step = state.step\n  dynamic_scale = state.dynamic_scale\n...\n"
            "  return new_state, metrics\n",
            "  loss, (new_model_state, logits) = loss_fn(params)\n"
            "  return loss, {**new_model_state, **compute_metrics(logits, batch['label'])}\n",
        ),
    )
    model = parts.models._ResNet1(num_classes=1000, num_filters=16)
    config = SimpleNamespace(half_precision=False, momentum=0.9)
    batch = {
        "image": normal(ROWS, 16, 16, 3),
        "label": random.integers(0, 1000, ROWS).astype(np.int32),
    }
    rate = lambda step: 0.1
    theirs = mapped(functools.partial(parts.theirs.train_step, learning_rate_fn=rate))

    def step(state, batch):
        kernels = [x for x in jax.tree.leaves(state.params) if x.ndim > 1]
        penalty = 0.5e-4 * sum(jnp.sum(x**2) for x in kernels)  # not in what they log
        state, metrics = theirs(state, batch)
        return state, metrics["loss"] + penalty

    make = lambda: parts.theirs.create_train_state(KEY, config, model, 16, rate)
    loss = functools.partial(parts.ours.train_loss, apply_fn=model.apply)
    return Program(make, loss, batch, ("batch_stats",), axis="batch", port=Port(step, parts.lines))


def sst2() -> Program:
    """A classifier of sentences by recurrences in both directions, and attention."""
    parts = example(
        "sst2",
        "models train",
        (
            "def train_step(\n    state: TrainState,\n    batch: dict[str, Array],\n"
            "    rngs: dict[str, Any],\n) -> tuple[TrainState, Metrics]:\n"
            '  """Train for a single step."""\n'
            "  # Make sure to get a new RNG at every step.\n  step = state.step\n"
            "  rngs = {name: jax.random.fold_in(rng, step) for name, rng in rngs.items()}\n",
            'def train_loss(params, batch, rngs, apply_fn):\n  """Train for a single step."""\n',
        ),
        (
            "    logits = state.apply_fn(\n        variables,\n        batch['token_ids'],\n"
            "        batch['length'],\n        deterministic=False,\n",
            "    logits = apply_fn(\n        variables,\n        batch['token_ids'],\n"
            "        batch['length'],\n        deterministic=False,\n",
        ),
        (
            "  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)\n...\n"
            "  return new_state, metrics\n",
            "  loss, logits = loss_fn(params)\n"
            "  return loss, {'accuracy': jnp.mean((logits >= 0.0) == batch['label'][:, None])}\n",
        ),
    )
    model = parts.models.TextClassifier(
        embedding_size=32, hidden_size=32, vocab_size=64, output_size=1, dropout_rate=0.0,
        word_dropout_rate=0.0, unk_idx=1,
    )  # fmt: skip
    config = SimpleNamespace(learning_rate=0.1, momentum=0.9, weight_decay=3e-6)
    batch = {
        "token_ids": tokens(8),
        "length": random.integers(4, 9, ROWS).astype(np.int32),
        "label": random.integers(0, 2, ROWS).astype(np.float32),
    }
    theirs, rngs = jax.jit(parts.theirs.train_step), {"dropout": KEY}

    def step(state, batch):
        state, metrics = theirs(state, batch, rngs)
        return state, metrics.loss / ROWS

    make = lambda: parts.theirs.create_train_state(KEY, config, model)
    loss = functools.partial(parts.ours.train_loss, apply_fn=model.apply)
    return Program(make, loss, batch, rng=rngs, port=Port(step, parts.lines))


def seq2seq() -> Program:
    """Sums, spelled out by a decoder that is given the digits before."""
    parts = example(
        "seq2seq",
        "models input_pipeline train",
        (
            "@jax.jit\ndef train_step(\n"
            "    state: train_state.TrainState, batch: Array, lstm_rng: PRNGKey, eos_id: int\n"
            ") -> tuple[train_state.TrainState, dict[str, jax.Array]]:\n",
            "def train_loss(params, batch, lstm_key, apply_fn, eos_id):\n",
        ),
        ("  lstm_key = jax.random.fold_in(lstm_rng, state.step)\n", ""),
        ("    logits, _ = state.apply_fn(\n", "    logits, _ = apply_fn(\n"),
        (
            "  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)\n...\n  return state, metrics\n",
            "  loss, logits = loss_fn(params)\n"
            "  return loss, compute_metrics(logits, labels, eos_id)\n",
        ),
        **absent("absl"),
    )
    table = parts.input_pipeline.CharacterTable("0123456789+= ", 2)
    model = parts.models.Seq2seq(
        teacher_force=True, hidden_size=32, eos_id=table.eos_id, vocab_size=table.vocab_size
    )
    batch = table.get_batch(ROWS)
    init = jax.jit(lambda: parts.theirs.get_initial_params(model, KEY, table))

    def step(state, batch):
        state, metrics = parts.theirs.train_step(state, batch, KEY, table.eos_id)
        return state, metrics["loss"]

    make = lambda: TrainState.create(apply_fn=model.apply, params=init(), tx=TX)
    loss = functools.partial(parts.ours.train_loss, apply_fn=model.apply, eos_id=table.eos_id)
    return Program(make, loss, batch, rng=KEY, port=Port(step, parts.lines))


def ppo() -> Program:
    """Its loss normalizes advantages by the mean and the deviation of the minibatch."""
    parts = example(
        "ppo",
        "models agent ppo_lib",
        ("import ml_collections\n", "import ml_collections\nimport zerojax\n"),
        (
            "  advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)\n",
            "  advantages = advantages - zerojax.mean(advantages)\n"
            "  advantages = advantages / (zerojax.mean(advantages**2) ** 0.5 + 1e-8)\n",
        ),
    )
    model, batch = (
        parts.models.ActorCritic(num_outputs=4),
        (
            random.integers(0, 256, (ROWS, 84, 84, 4)).astype(np.float32),
            random.integers(0, 4, ROWS).astype(np.int32),
            normal(ROWS) - 2,
            normal(ROWS),
            normal(ROWS),
        ),
    )
    terms = {"clip_param": 0.1, "vf_coeff": 0.5, "entropy_coeff": 0.01}
    step = lambda state, batch: parts.theirs.train_step(state, batch, ROWS, **terms)
    init = jax.jit(lambda: model.init(KEY, jnp.ones((1, 84, 84, 4)))["params"])
    make = lambda: TrainState.create(apply_fn=model.apply, params=init(), tx=TX)
    loss = lambda params, batch: parts.ours.loss_fn(params, model.apply, batch, **terms)
    return Program(make, loss, batch, port=Port(step, parts.lines))


PROGRAMS = {
    "flax_wmt": wmt,
    "flax_lm1b": lm1b,
    "flax_imagenet": imagenet,
    "flax_sst2": sst2,
    "flax_seq2seq": seq2seq,
    "flax_ppo": ppo,
}
