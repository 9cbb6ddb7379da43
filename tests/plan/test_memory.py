"""Bytes per device: the ZeRO paper's formula, read from the compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import stages
from tests.models import MODELS, gpt_loss, gpt_params
from tests.reference import divided, make_state, tree_bytes

DEVICES = 8
# At each stage: which kinds of state are sharded.
SHARDED = {0: (), 1: ("opt_state",), 2: ("opt_state",), 3: ("params", "opt_state")}


@pytest.mark.parametrize("stage", stages(1, 3))
@pytest.mark.parametrize("model", MODELS)
def test_state_bytes_are_the_papers_formula(model, stage):
    made = MODELS[model](False)
    state = make_state(made, optax.adam(1e-3))
    plan = zerojax.plan(state, stage=stage)
    wanted = 0
    for kind in SHARDED[3]:
        shared, others = map(tree_bytes, divided(getattr(state, kind)))
        assert shared > 0.9 * (shared + others)
        wanted += (shared / DEVICES if kind in SHARDED[stage] else shared) + others
    wanted += tree_bytes(made.fields) + 4  # and the count of steps
    step = zerojax.train_step(made.loss, mutable=tuple(made.fields))
    args = (plan.abstract(), made.batch) + (() if made.rng is None else (made.rng,))
    memory = step.lower(*args).compile().memory_analysis()
    batch = sum(np.prod(x.shape[1:], initial=1) * x.dtype.itemsize * x.shape[0] / DEVICES
                for x in jax.tree.leaves(made.batch))  # fmt: skip
    key = 0 if made.rng is None else 8
    assert memory.argument_size_in_bytes == pytest.approx(wanted + batch + key, rel=0.01)
    assert sum(plan.bytes_per_device().values()) == pytest.approx(wanted, rel=1e-6)


def gpt_state(**sizes):
    params = gpt_params(**sizes)
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


@pytest.mark.parametrize(("stage", "bytes_per_parameter"), [(0, 12), (1, 5), (2, 5), (3, 1.5)])
def test_bytes_per_parameter_with_adam(stage, bytes_per_parameter):
    state = jax.eval_shape(gpt_state)
    plan = zerojax.plan(state, stage=stage, min_shard_size=1)
    count = sum(x.size for x in jax.tree.leaves(state.params))
    total = sum(plan.bytes_per_device().values())
    assert total / count == pytest.approx(bytes_per_parameter, rel=0.01)


@pytest.mark.parametrize(("stage", "bytes_per_parameter"), [(0, 14), (1, 3.5), (3, 1.75)])
def test_master_copies_give_the_papers_2_and_12_bytes(stage, bytes_per_parameter):
    precision = zerojax.Precision(param="bfloat16", master="float32")
    state = zerojax.shard_train_state(gpt_state(), stage, precision=precision, min_shard_size=1)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    count = sum(x.size for x in jax.tree.leaves(state.params))
    assert held / count == pytest.approx(bytes_per_parameter, rel=0.01)


def test_state_born_sharded_is_never_full_on_any_device():
    make = lambda: gpt_state(layers=8, dim=128, vocab=1024)
    plan = zerojax.plan(make, stage=3)
    memory = plan.born_sharded(make).lower().compile().memory_analysis()
    state = jax.eval_shape(make)
    whole, largest = tree_bytes(state), max(map(tree_bytes, jax.tree.leaves(state)))
    shard = whole / DEVICES
    assert memory.output_size_in_bytes == pytest.approx(shard, rel=0.02)
    peak = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert peak < shard + largest < whole / 4


def test_end_of_step_gather_needs_no_second_copy_of_a_stack():
    """Stages 1 and 2 gather updated stacks layer by layer, into the donated memory."""
    sizes = {"layers": 16, "dim": 64, "vocab": 64}
    state = jax.eval_shape(lambda: gpt_state(**sizes))
    stack = tree_bytes(state.params["blocks"])
    plan = zerojax.plan(state, stage=2)
    update = jax.jit(
        lambda s, g: plan.constrain(plan.scatter(s).apply_gradients(grads=g), into=s),
        donate_argnums=0,
    )
    abstract = plan.abstract()
    cut = [
        s
        for s, leaf in zip(plan.shard_shardings, plan.leaves, strict=True)
        if leaf.kind == "params"
    ]
    leaves, treedef = jax.tree.flatten(abstract.params)
    grads = treedef.unflatten(
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
            for x, s in zip(leaves, cut, strict=True)
        ]
    )
    compiled = update.lower(abstract, grads).compile()
    assert " all-gather" in compiled.as_text()
    assert 0 < compiled.memory_analysis().temp_size_in_bytes < 0.6 * stack


def test_layers_are_not_all_gathered_at_once():
    """Peak temporary memory of stage 3 grows by less than the weights it adds."""

    def temp(layers):
        make = lambda: gpt_state(layers=layers, dim=128, vocab=64)
        plan = zerojax.plan(make, stage=3)
        step = zerojax.train_step(lambda p, b: gpt_loss(p, b, jax.checkpoint))
        tokens = jnp.zeros((8, 16), jnp.int32)
        memory = step.lower(plan.abstract(), tokens).compile().memory_analysis()
        return memory.temp_size_in_bytes, tree_bytes(jax.eval_shape(make).params)

    (few, few_weights), (many, many_weights) = temp(2), temp(12)
    # Shards of gradients and of the update, and one row of activations: not weights.
    assert 0 < many - few < 0.5 * (many_weights - few_weights)
