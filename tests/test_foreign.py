"""Programs of other libraries at stages 0 and 3: one device's numbers, the collectives of the plan.

`make foreign` installs the libraries and runs all; of those that the test extra has, stage 3 runs
always."""

import functools
import re

import jax
import pytest

import zerojax
from examples import models_hf
from tests.foreign import HEAVY, LIGHT, program
from tests.reference import assert_close, tree_bytes
from tests.test_readme import ENV, README, ROOT, blocks, run

STEPS, DEVICES = 2, 8
QUICK = {"xla_backend_optimization_level": 0}  # compile sooner; values are checked, not speed
SCALARS = 4  # the loss and the like

# How these libraries use JAX and each other is theirs to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@functools.cache
def one_device(name):
    """The state and losses of a plain loop."""
    one = program(name)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(state, batch):
        model_of = getattr(state, "model_of", lambda params: params)
        fields = {name: getattr(state, name) for name in one.mutable}

        def loss(params):
            result = one.loss(model_of(params), batch, **fields)
            return result if one.mutable else (result, {})

        (value, fields), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, **fields), value

    state, losses = one.make(), []
    for _ in range(STEPS):
        state, loss = step(state, one.batch)
        losses.append(float(loss))
    return state, losses


CASES = [
    pytest.param(name, stage, marks=[pytest.mark.slow] * (name in HEAVY or stage == 0))
    for name in LIGHT | HEAVY
    for stage in (0, 3)
]


@pytest.mark.parametrize("name, stage", CASES)
def test_program(name, stage):
    one = program(name)
    wanted, losses = one_device(name)
    state = zerojax.shard_train_state(one.make(), stage, stacked=one.stacked)
    step = zerojax.train_step(one.loss, mutable=one.mutable, compiler_options=QUICK)
    report = zerojax.audit(step, state, one.batch)
    if stage == 3 and one.unmet:
        found = report.findings()
        assert found and all(re.search(one.unmet, finding) for finding in found)
    else:
        report.check()
    fields = [getattr(state, field) for field in one.mutable]
    check_traffic(report, state.tx.plan, tree_bytes(fields))
    zerojax.verify(step, state, one.batch).raise_if_wrong()
    for loss in losses:
        state, metrics = step(state, one.batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    check_placement(state)
    assert_close(state.params, wanted.params, 1e-4)
    for field in one.mutable:
        assert_close(getattr(state, field), getattr(wanted, field), 1e-4)


def check_traffic(report, plan, averaged):
    """In bytes of whole arrays: nothing that is sharded is summed whole."""
    moved = lambda kind, ways: report.totals.get(kind, 0) / (ways * (DEVICES - 1) / DEVICES)
    cut = [leaf for leaf in plan.params if leaf.dim is not None]
    sharded = sum(leaf.nbytes for leaf in cut)
    whole = sum(leaf.nbytes for leaf in plan.params if leaf.dim is None)
    assert moved("reduce-scatter", 1) == sharded
    scalars = 4 * (SCALARS + len(cut))  # with the part of each in the norm
    assert 0 <= moved("all-reduce", 2) - whole <= averaged + scalars
    if plan.stage == 0:
        assert sharded == moved("all-gather", 1) == 0
    else:  # used in backward alone or in forward alone, a weight is gathered once
        assert sharded > whole and sharded <= moved("all-gather", 1) <= 2 * sharded


def check_placement(state):
    plan = state.tx.plan
    for value, leaf in zip(jax.tree.leaves(state), plan.leaves, strict=True):
        held = value.addressable_shards[0].data.nbytes
        assert held == leaf.bytes_per_device(plan.mesh), leaf.path


def test_transformers_reads_what_names_have_written(tmp_path):
    """Version 4, which refuses files of formats that it does not know."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "FlaxGPT2LMHeadModel"):
        pytest.skip("`make foreign` installs transformers<5, the last with models in Flax")
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16}
    model = models_hf.GPT2({**config, "vocab_size": 64, "layer_norm_epsilon": 1e-5})
    keys = iter(jax.random.split(jax.random.key(0), 16))
    draw = lambda leaf: jax.random.normal(next(keys), leaf.shape) / 5
    params = jax.tree.map(draw, models_hf.structs(model))
    models_hf.save(tmp_path / "gpt2", model, params)
    (file,) = (tmp_path / "gpt2").glob("*.safetensors")
    file.rename(tmp_path / "gpt2" / "model.safetensors")  # their loader for Flax reads no index
    (tmp_path / "gpt2" / "model.safetensors.index.json").unlink()
    theirs = transformers.FlaxGPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    tokens = jax.numpy.arange(32).reshape(2, 16)
    assert_close(theirs(tokens).logits, model(params, tokens), 1e-4)


LOOP = """
for n in meter:
    state, metrics = step(state, batch)
    meter.update(metrics)
"""
TENSORBOARD = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

writer.flush()
events = EventAccumulator("runs/a", {"tensors": 0}).Reload()
read = events.Tensors if events.Tags()["tensors"] else events.Scalars
print("steps", *(event.step for event in read("grad_norm")))
"""
WANDB = """
wandb.log({}, commit=True)  # as when a program ends; until then it holds the last step back
assert wandb.run.summary["grad_norm"] == float(metrics["grad_norm"])
print("steps", wandb.run.summary["_step"])
"""
LOGS = {
    "clu": (TENSORBOARD, [1, *range(10, 101, 10)]),
    "tensorboardX": (TENSORBOARD, [1, *range(10, 101, 10)]),
    "wandb": (WANDB, [100]),
}


@pytest.mark.slow
@pytest.mark.parametrize("library", LOGS)
def test_the_page_on_logging_writes_what_the_library_reads(library, tmp_path, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.setitem(ENV, "WANDB_MODE", "offline")
    reading, steps = LOGS[library]
    (lines,) = [code for code in blocks(ROOT / "docs/logging.md", "py") if library in code]
    meter = "" if "Meter" in lines else "meter = zerojax.Meter(100, on_log=on_log)"
    program = blocks(README, "python")[1]
    printed = run("\n".join([program, lines, meter, LOOP, reading]), tmp_path)
    assert f"steps {' '.join(map(str, steps))}\n" in printed
