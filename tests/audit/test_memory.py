"""Memory of real steps on CPU devices, to the byte."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests import audits
from tests.audit.models import STAGES, audited
from tests.conftest import FUSED_AS_USERS


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_memory_is_the_plans_and_the_compilers(model, stage):
    report, plan, compiled = audited(model, stage)
    state, memory = plan.bytes_per_device(), report.memory
    found = (memory.parameters, memory.optimizer, memory.other_state)
    assert found == (state["params"], state["opt_state"], state["other"])
    stats = compiled.memory_analysis()
    assert memory.state + memory.batch == stats.argument_size_in_bytes
    assert memory.temporary == stats.temp_size_in_bytes
    assert memory.donated == stats.alias_size_in_bytes == memory.state
    assert report.not_donated == report.placement == report.kept == ()
    # The loss and the norm; CPU programs count a pointer for each output beside it.
    assert memory.outputs == 8
    outputs = stats.output_size_in_bytes - 8 * len(report.module.root(report.module.entry).arrays)
    assert outputs == memory.donated + memory.outputs
    assert memory.peak == memory.state + memory.batch + memory.temporary + 8


def test_gradients_of_microbatches_are_summed_whole_at_stage_1_and_in_shards_at_3():
    """At the fullest moment: at stage 1 the sums, and those of a microbatch that are added next."""
    options = {"accumulate": 2, "compiler_options": FUSED_AS_USERS}
    memory = {
        stage: audits.audited(audits.planned("cpu", stage), **options).memory for stage in (1, 3)
    }
    stack = audits.LAYERS * audits.DIM**2 * 4
    assert memory[1].gradients == 2 * memory[1].parameters
    assert memory[1].activations < stack > memory[3].gradients > 0


@pytest.mark.gpu_code
def test_sums_that_are_reduced_as_one_array_are_gradients():
    memory = audits.audited(audits.planned("8xH100", 0), accumulate=2).memory
    assert memory.gradients == 2 * memory.parameters and memory.activations < 2**16


def test_it_prints_in_units():
    memory = audited("mlp", 3)[0].memory
    assert re.match(r"\d+\.\d KiB at the peak: parameters \d+\.\d KiB, optimizer", str(memory))
    assert f"memory per device  {memory}\n" in str(audited("mlp", 3)[0])
    away = dataclasses.replace(memory, on_host=3 * 2**20, host_donated=1, host_temporary=2**20)
    assert str(away) == f"{memory}; in host memory: state 3.0 MiB"
    kept = dataclasses.replace(memory, host_temporary=2**20)
    assert str(kept) == f"{memory}; in host memory: kept for backward 1.0 MiB"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_batch_and_its_statistics_are_neither_weights_nor_gradients(stage):
    """A convolution pads its batch, and a batch norm reduces statistics that go into it."""

    def make_state():
        kernel = jax.random.normal(jax.random.key(0), (3, 3, 3, 16))
        params = {"kernel": kernel, "scale": jnp.ones(16)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-2))

    def loss_fn(params, batch):
        x = jax.lax.conv_general_dilated(
            batch, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = params["scale"] * (x - jax.lax.pmean(x.mean((0, 1, 2)), "data"))
        return jnp.mean(x**2)

    memories = []
    for rows in (64, 1024):
        state = zerojax.shard_train_state(make_state, stage=stage)
        step = zerojax.train_step(loss_fn)
        memories.append(zerojax.audit(step, state, np.ones((rows, 8, 8, 3), np.float32)).memory)
    small, large = memories
    whole = 4 * (3 * 3 * 3 * 16 + 16)
    assert large.gathered <= 2 * whole and large.gradients <= 2 * whole
    assert large.activations > 8 * small.activations
