"""Flax's examples and two tutorials of nnx, as their authors wrote them: texts in the source of the
Flax that is installed, with the few lines that had to change."""

import functools
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from tests.foreign import program as _p
from tests.foreign.program import KEY, ROWS, TX, Edit, Port, Program, integers, normal, tokens

# They read data, write logs and play games.
UNUSED = _p.absent("clu", "tensorflow", "tensorflow_datasets", "input_pipeline", "bleu", "decode")
UNUSED |= _p.absent("temperature_sampler", "env_utils", "test_episodes", "flax.metrics")


def text_of(path: str) -> str:
    file = _p.SOURCES / f"flax-{flax.__version__}" / path
    if not file.exists():
        pytest.skip("`make foreign` downloads the source of the Flax that is installed")
    return file.read_text()


def example(name: str, modules: str, *edits: Edit, **others: Any) -> Any:
    """The modules of an example, and the last of them once more with `edits`."""
    for needed in ("ml_collections", "orbax.checkpoint", "flax.training.checkpoints"):
        _p.library(needed)
    text = lambda module: text_of(f"examples/{name}/{module}.py")
    *used, last = modules.split()
    with _p.importable(UNUSED | dict.fromkeys(used) | others):
        for each in used:
            sys.modules[each] = _p.module(f"{name}.{each}", text(each))
        used = {each: sys.modules[each] for each in used}
        theirs, ours, lines = _p.ported(f"{name}.{last}", text(last), edits)
    return SimpleNamespace(**used, theirs=theirs, ours=ours, lines=lines)


def logged(step: Any, loss_of: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A step that returns the loss in place of metrics; `loss_of` takes these and the old state."""

    def run(state, batch):
        new, metrics = step(state, batch)
        return new, loss_of(metrics, state)

    return run


# -- words: the loss is a mean over those of a device

SMALL = dict.fromkeys(["vocab_size", "output_vocab_size", "mlp_dim"], 64)
SMALL |= dict.fromkeys(["emb_dim", "qkv_dim"], 32)
SMALL |= {"num_heads": 2, "num_layers": 1, "max_len": 8}
SMALL |= dict.fromkeys(["dropout_rate", "attention_dropout_rate"], 0.0)


def lm1b() -> Program:
    """A language model whose parameters name axes, for a mesh that is not this one.

    Its mean becomes one over the words of all devices. Sentences are of several lengths.
    """
    parts = example(
        "lm1b",
        "models utils train",
        (
            "def train_step(\n...\n):\n",
            "def train_loss(params, batch, dropout_rng, config, label_smoothing=0.0):\n",
        ),
        (
            "  dropout_rng = jax.random.fold_in(dropout_rng, state.step)"
            "  # pyrefly: ignore[bad-argument-type]\n\n",
            "",
        ),
        (
            "mean_loss = loss / weight_sum",
            'mean_loss = loss / jax.lax.pmean(weight_sum, "data")',
        ),
        (
            "  step = state.step\n...\n  return new_state, metrics\n",
            "  mean_loss, logits = loss_fn(params)\n"
            "  return mean_loss, compute_metrics(logits, inputs, weights)\n",
        ),
    )
    config = parts.models.TransformerConfig(**SMALL)
    model = parts.models.TransformerLM(config)
    sizes = SimpleNamespace(per_device_batch_size=2, max_target_length=8)
    make = lambda: parts.utils.init_train_state(model, TX, sizes, KEY)
    options = {"config": config, "learning_rate_fn": lambda step: 0.0, "dropout_rng": KEY}
    theirs = jax.jit(functools.partial(parts.theirs.train_step, **options))
    step = logged(theirs, lambda metrics, _: metrics["loss"] / metrics["denominator"])
    loss = functools.partial(parts.ours.train_loss, config=config)
    known = np.arange(8) < _p.random.integers(3, 9, (ROWS, 1))
    batch = {"inputs": np.where(known, tokens(8, 63) + 1, 0)}
    return Program(make, loss, batch, rng=KEY, port=Port(step, parts.lines))


# -- others


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
            "        {'params': params, 'batch_stats': state.batch_stats},\n",
            "new_model_state = apply_fn(\n"
            "        {'params': params, 'batch_stats': batch_stats},\n",
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
    batch = {"image": normal(ROWS, 16, 16, 3), "label": integers(1000, ROWS)}
    rate = lambda step: 0.1

    def loss_of(metrics, state):  # with the penalty, which is not in what they log
        kernels = [x for x in jax.tree.leaves(state.params) if x.ndim > 1]
        return metrics["loss"] + 0.5e-4 * sum(jnp.sum(x**2) for x in kernels)

    theirs = _p.mapped(functools.partial(parts.theirs.train_step, learning_rate_fn=rate))
    make = lambda: parts.theirs.create_train_state(KEY, config, model, 16, rate)
    loss = functools.partial(parts.ours.train_loss, apply_fn=model.apply)
    port = Port(logged(theirs, loss_of), parts.lines)
    return Program(make, loss, batch, ("batch_stats",), axis="batch", port=port)


def seq2seq() -> Program:
    """Sums, spelled out by a decoder that is given the digits before."""
    parts = example(
        "seq2seq",
        "models input_pipeline train",
        (
            "@jax.jit\ndef train_step(\n...\n"
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
        **_p.absent("absl"),
    )
    table = parts.input_pipeline.CharacterTable("0123456789+= ", 2)
    sizes = {"hidden_size": 32, "eos_id": table.eos_id, "vocab_size": table.vocab_size}
    model = parts.models.Seq2seq(teacher_force=True, **sizes)
    init = jax.jit(lambda: parts.theirs.get_initial_params(model, KEY, table))
    make = lambda: TrainState.create(apply_fn=model.apply, params=init(), tx=TX)
    loss = functools.partial(parts.ours.train_loss, apply_fn=model.apply, eos_id=table.eos_id)
    theirs = lambda state, batch: parts.theirs.train_step(state, batch, KEY, table.eos_id)
    port = Port(logged(theirs, lambda metrics, _: metrics["loss"]), parts.lines)
    return Program(make, loss, table.get_batch(ROWS), rng=KEY, port=port)


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
    model = parts.models.ActorCritic(num_outputs=4)
    seen, action = integers(256, ROWS, 84, 84, 4).astype(np.float32), integers(4, ROWS)
    batch = (seen, action, normal(ROWS) - 2, normal(ROWS), normal(ROWS))
    terms = {"clip_param": 0.1, "vf_coeff": 0.5, "entropy_coeff": 0.01}
    step = lambda state, batch: parts.theirs.train_step(state, batch, ROWS, **terms)
    init = jax.jit(lambda: model.init(KEY, jnp.ones((1, 84, 84, 4)))["params"])
    make = lambda: TrainState.create(apply_fn=model.apply, params=init(), tx=TX)
    loss = lambda params, batch: parts.ours.loss_fn(params, model.apply, batch, **terms)
    return Program(make, loss, batch, port=Port(step, parts.lines))


PROGRAMS = {f"flax_{each.__name__}": each for each in (lm1b, imagenet, seq2seq, ppo)}

# -- a tutorial: the cells of its page

STEPS = 2
SHARDED = "zerojax.nnx.shard(model, optimizer, stage=3)\n"
TAKEN = "train_step = zerojax.nnx.train_step(loss_fn)\n"


class Tutorial(NamedTuple):
    """A step with what it takes, and the losses of the authors' own."""

    step: Any
    args: Sequence[Any]
    losses: list[float]
    lines: tuple[int, int]


def page(path: str, first: str, last: str, *edits: Edit) -> Any:
    """What its cells define, from the one with `first` to the one with `last`, and with `edits`."""
    cells = re.findall(r"```(?:python|{code-cell} ipython3)\n(.*?)```", text_of(path), re.DOTALL)
    start, end = (next(n for n, cell in enumerate(cells) if x in cell) for x in (first, last))
    text = "import jax, jax.numpy as jnp, optax, zerojax.nnx\nfrom flax import nnx\n"
    text += "".join(cells[start : end + 1])
    return _p.ported(path, text, edits)


def digits() -> Tutorial:
    """Dropout is switched off, as devices draw other numbers; the statistics are of all rows."""
    theirs, ours, lines = page(
        "docs_nnx/mnist_tutorial.md",
        "class CNN",
        "def loss_fn",
        ("nnx.BatchNorm(32, rngs", 'nnx.BatchNorm(32, axis_name="data", rngs'),
        ("nnx.BatchNorm(64, rngs", 'nnx.BatchNorm(64, axis_name="data", rngs'),
        ("y = model(jnp.ones((1, 28, 28, 1)), nnx.Rngs(0))\ny\n", ""),  # no mesh, no axis
        ("wrt=nnx.Param\n)\n", f"wrt=nnx.Param\n)\n{SHARDED}"),
        (
            "@nnx.jit\ndef train_step(model: CNN, optimizer: nnx.Optimizer, "
            "metrics: nnx.MultiMetric, rngs: nnx.Rngs, batch):\n...\n"
            "  optimizer.update(model, grads)  # In-place updates.\n",
            TAKEN,
        ),
    )
    for part in (theirs, ours):
        part.model.dropout1.rate = part.model.dropout2.rate = 0.0
    batch = {"image": normal(ROWS, 28, 28, 1), "label": integers(10, ROWS)}
    losses = []
    for _ in range(STEPS):
        theirs.metrics.reset()
        theirs.train_step(theirs.model, theirs.optimizer, theirs.metrics, nnx.Rngs(0), batch)
        losses.append(float(theirs.metrics.compute()["loss"]))
    args = (ours.model, ours.optimizer, batch, nnx.Rngs(0))
    return Tutorial(ours.train_step, args, losses, lines)
