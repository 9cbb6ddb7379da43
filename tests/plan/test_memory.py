"""Bytes on each device: those of the state by the ZeRO paper's formula, and a step's by XLA."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.support.models import gpt_params
from tests.support.reference import train_state, tree_bytes

DEVICES = 8
MASTERS = zerojax.Precision(param="bfloat16", master="float32")


def gpt_state(**sizes):
    params = gpt_params(**sizes)
    return train_state(params, optax.adam(1e-3))


@pytest.mark.parametrize(
    ("precision", "bytes_per_parameter"),
    [(None, (12, 5, 5, 1.5)), (MASTERS, (14, 3.5, 3.5, 1.75))],  # the paper's 2 and 12 with Adam
)
@pytest.mark.parametrize("stage", range(4))
def test_the_state_takes_what_the_paper_says(stage, precision, bytes_per_parameter):
    plan = zerojax.plan(gpt_state, stage=stage, precision=precision, min_shard_size=1)
    count = sum(leaf.nbytes // leaf.dtype.itemsize for leaf in plan.params)
    total = sum(plan.bytes_per_device().values())
    assert total / count == pytest.approx(bytes_per_parameter[stage], rel=0.01)


def test_state_born_sharded_is_never_full_on_any_device():
    make = lambda: gpt_state(layers=8, dim=128, vocab=1024)
    plan = zerojax.plan(make, stage=3)
    memory = plan._born_sharded(make).lower().compile().memory_analysis()
    state = jax.eval_shape(make)
    whole, largest = tree_bytes(state), max(map(tree_bytes, jax.tree.leaves(state)))
    shard = whole / DEVICES
    assert memory.output_size_in_bytes == pytest.approx(shard, rel=0.02)
    peak = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert peak < shard + largest < whole / 4


STACK = {"w": jax.ShapeDtypeStruct((16, 64, 64), jnp.float32)}


def test_updated_stacks_are_gathered_into_the_donated_memory():
    """At stages 1 and 2, a layer at a time: a second copy is at no time there."""
    plan = zerojax.plan({"params": STACK, "opt_state": ()}, stage=2, mesh=make_mesh(4), stacked="w")

    def update(state):
        new = jax.tree.map(lambda x: 2 * x, plan.scatter(state))
        return plan.constrain(new, into=state)

    compiled = jax.jit(update, donate_argnums=0).lower(plan.abstract()).compile()
    assert " all-gather" in compiled.as_text()
    assert 0 < compiled.memory_analysis().temp_size_in_bytes < 0.6 * tree_bytes(STACK)
