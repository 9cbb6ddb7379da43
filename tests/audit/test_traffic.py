"""Traffic and memory of the steps of the table, to the byte, and the parameters that they serve."""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests.support import audits, steps
from tests.support.reference import divided, tree_bytes

N = 4
SCALAR = 2 * 4 * (N - 1) // N  # bytes that each device sends to sum one float32


def params_of(name):
    """By name: the parameters that the devices share, and the others."""
    model, _ = steps.model_and_state(steps.row(name).model)
    return divided({"params": model.params}, N)


def sent_for(report, kind):
    """Bytes by parameter; of joined operations each array has its own."""
    found = {}
    for one in report.traffic:
        for part in one.parts if one.kind == kind else ():
            factor = {"all-gather": N - 1, "all-reduce": 2 * (N - 1) / N}.get(kind, (N - 1) / N)
            path = ", ".join(part.paths)
            found[path] = found.get(path, 0) + part.nbytes * factor * one.trips
    return found


@pytest.mark.parametrize("name", ["stage0", "stage1", "stage2", "stage3", "in_line"])
def test_traffic_is_the_papers_to_the_byte(name):
    report, stage = steps.row(name).report, steps.row(name).plan.stage
    psi, others = (tree_bytes(leaves) * (N - 1) / N for leaves in params_of(name))
    assert psi > 9 * others
    scalars = report.totals["all-reduce"] - 2 * (others if stage else others + psi)
    assert scalars % SCALAR == 0 and 1 <= scalars / SCALAR < 10  # the loss, and parts of the norm
    assert report.totals.get("reduce-scatter", 0) == (psi if stage else 0)
    if stage < 3:
        assert report.totals.get("all-gather", 0) == (psi if stage else 0)
    assert report.wire_bytes == sum(report.totals.values())


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3", "in_line"])
def test_every_collective_is_traced_to_what_it_serves(name):
    report = steps.row(name).report
    shared, others = params_of(name)
    share = (N - 1) / N
    assert sent_for(report, "reduce-scatter") == {p: x.nbytes * share for p, x in shared.items()}
    assert set(sent_for(report, "all-gather")) == set(shared)
    assert set(sent_for(report, "all-reduce")) - {""} == set(others)
    assert {t.axes for t in report.traffic} == {("data",)}


def net(params, batch):
    hidden = jnp.tanh(batch @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"]) ** 2)


NET = {"up": (64, 512), "bias": (512,), "down": (512, 8)}
HSDP = {"params": "gpu", "grads": "gpu", "opt_state": "gpu"}
STAGE2 = HSDP | {"params": ()}


@pytest.mark.parametrize(
    ("gpus", "groups", "accumulate"),
    [
        ("", HSDP, 1),
        ("", HSDP, 2),
        ("", STAGE2, 1),
        ("", STAGE2, 2),
        ("", HSDP | {"opt_state": ("gpu", "node")}, 1),
        pytest.param("16xH100", HSDP, 1, marks=pytest.mark.gpu_code),
    ],
)
def test_gradients_that_are_reduced_twice_are_traced_both_times(gpus, groups, accumulate):
    """In a node, then between nodes: there in one all-reduce, or in a reduce-scatter for each. GPUs
    reduce one array between nodes, of all gradients."""
    mesh = zerojax.mesh(node=2, gpu=4)
    if gpus:
        mesh = zerojax.aot.mesh(gpus, (2, 8), ("node", "gpu"))
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in NET.items()}
    tx = optax.adam(1e-3)
    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    plan = zerojax.plan(state, mesh=mesh, groups=groups, tx=tx)
    step = zerojax.train_step(net, tx=tx, plan=plan, accumulate=accumulate)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((64, 64), "float32"), plan)
    sent = collections.Counter()
    for one in zerojax.audit(step, plan.abstract(), batch).traffic:
        for part in one.parts if one.kind != "all-gather" else ():
            sent[one.kind, one.axes, part.paths] += int(part.nbytes) * one.trips
    sizes = {(f"params/{name}",): 4 * math.prod(shape) for name, shape in sorted(NET.items())}
    within = {("reduce-scatter", ("gpu",), path): n * accumulate for path, n in sizes.items()}
    between = {path: n // mesh.shape["gpu"] for path, n in sizes.items()}
    if gpus:
        between = {sum(between, ()): sum(between.values())}
    last = "reduce-scatter" if groups["opt_state"] != "gpu" else "all-reduce"
    of_params = {key: nbytes for key, nbytes in sent.items() if key[-1]}
    assert of_params == within | {(last, ("node",), path): n for path, n in between.items()}
    assert sum((sent - collections.Counter(of_params)).values()) < 64  # the loss, and the norm


# -- memory


def test_gradients_of_microbatches_are_summed_whole_at_stage_1_and_in_shards_at_3():
    """At the fullest moment: at stage 1 the sums, and those of a microbatch that are added next."""
    memory = {n: steps.row(f"microbatches{n}").report.memory for n in (1, 3)}
    stack = audits.LAYERS * audits.DIM**2 * 4
    assert memory[1].gradients > memory[1].parameters + stack
    assert memory[1].activations < memory[1].parameters / 4
    table = steps.VOCAB * audits.DIM * 4  # whole until it is reduced
    assert table < memory[3].gradients < table + 2 * memory[3].parameters


def test_a_batch_and_its_statistics_are_neither_weights_nor_gradients():
    """A convolution pads its batch, and a batch norm reduces statistics that go into it."""
    memory = steps.row("fields").report.memory
    whole = tree_bytes(steps.model_and_state("convnet")[0].params)
    assert memory.gathered <= 2 * whole and memory.gradients <= 2 * whole
    assert memory.activations > 4 * whole


def test_activations_reduced_over_a_tensor_axis_are_no_gradients():
    layers = [{"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))} for _ in range(4)]
    specs = {"up": P("data", "tensor"), "down": P("tensor", "data")}
    make = lambda: TrainState.create(apply_fn=None, params=layers, tx=optax.sgd(0.1))
    plan = zerojax.plan(make, mesh=zerojax.mesh(data=4, tensor=2), overrides=specs)

    def loss(layers, x):
        layer = jax.checkpoint(lambda x, p: x + jnp.tanh(x @ p["up"]) @ p["down"])
        return jnp.mean(functools.reduce(layer, layers, x) ** 2)

    x = zerojax.aot.batch(jnp.ones((4096, 32)), plan)
    memory = zerojax.audit(zerojax.train_step(loss), plan.abstract(), x).memory
    assert 0 < memory.gradients <= tree_bytes(layers) / 2  # of the two parts, the device's own
    assert memory.activations > tree_bytes(layers)


def test_memory_is_printed_in_units():
    memory = steps.row("stage3").report.memory
    assert re.match(r"\d+\.\d MiB at the peak: parameters \d+\.\d KiB, optimizer", str(memory))
    away = dataclasses.replace(memory, on_host=3 * 2**20, host_donated=1, host_temporary=2**20)
    assert str(away) == f"{memory}; in host memory: state 3.0 MiB"
