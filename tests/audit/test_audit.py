"""Audits of arrays, shapes, programs and text, and what they pass on from the compiler."""

import os

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from tests.audit.models import audited
from tests.models import MODELS
from tests.reference import make_state
from zerojax._audit.audit import heard


def test_arrays_shapes_programs_and_text_are_audited_alike():
    made = MODELS["mlp"](True)
    state = zerojax.shard_train_state(make_state(made, optax.adamw(1e-3)), 3)
    plan, step = state.tx.plan, zerojax.train_step(made.loss)
    shapes = zerojax.aot.batch(jax.tree.map(zerojax._state.state.shape_dtype, made.batch), plan)
    compiled = audited("mlp", 3)[2]
    reports = [
        audited("mlp", 3)[0],
        zerojax.audit(step, state, made.batch),
        zerojax.audit(step, plan.abstract(), shapes),
        zerojax.audit(compiled.as_text(), plan=plan),
        zerojax.audit(compiled.as_text()),
    ]
    assert len({tuple(sorted(r.totals.items())) for r in reports}) == 1
    assert len({(r.memory.parameters, r.memory.optimizer) for r in reports}) == 1
    assert reports[-1].plan is None and reports[-1].devices == 8
    assert not state.params["in"]["w"].is_deleted()


def test_a_modelled_gpu_adds_times():
    compiled = audited("gpt", 3)[2]
    report = zerojax.audit(compiled, gpu="H100")
    assert report.step_seconds > report.exposed_seconds > 0
    assert report.step_seconds == pytest.approx(report.replay.compute + report.exposed_seconds)
    assert report.overlap == pytest.approx(report.replay.compute / report.step_seconds)
    assert "modelled step" in str(report) and "between" in str(report)
    slower = zerojax.audit(compiled, gpu="T4")
    assert slower.step_seconds > report.step_seconds
    with pytest.raises(ValueError, match=r"no facts about a GPU 'X1'. Name one of T4, L4"):
        zerojax.audit(compiled, gpu="X1")


def test_a_state_without_its_batch_is_refused():
    made = MODELS["mlp"](False)
    step = zerojax.train_step(made.loss)
    with pytest.raises(TypeError, match=r"compiles the step for a state and a batch: audit\(step"):
        zerojax.audit(step)
    with pytest.raises(TypeError, match=r"audit\(step, state, batch\)"):
        zerojax.audit(step, make_state(made, optax.sgd(0.1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "needs something compiled or to compile, got a int"),
        ((len,), "got a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_audited(arguments, message):
    with pytest.raises(TypeError, match=message):
        zerojax.audit(*arguments)


@pytest.mark.gpu_code
def test_audits_know_the_hosts_and_the_convolutions():
    """The mesh says that hosts have 4 GPUs; convolutions are calls of cuDNN on GPUs."""
    mesh = zerojax.aot.mesh("8xH100", per_host=4)
    spec = NamedSharding(mesh, PartitionSpec("data"))
    images = jax.ShapeDtypeStruct((64, 32, 32, 64), jnp.bfloat16, sharding=spec)
    whole = NamedSharding(mesh, PartitionSpec())
    kernel = jax.ShapeDtypeStruct((3, 3, 64, 128), jnp.bfloat16, sharding=whole)

    def loss(kernel, images):
        dims = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    plan = zerojax.plan({"params": {"k": jnp.ones((64, 64))}}, stage=3, mesh=mesh)
    step = jax.jit(jax.grad(loss))
    if jax.__version_info__ >= (0, 12):
        step = jax.jit(
            jax.grad(loss), compiler_options={"xla_gpu_experimental_use_collective_kernels": ""}
        )
    report = zerojax.audit(step.lower(kernel, images).compile(), plan=plan)
    forward = 2 * 8 * 32 * 32 * 128 * 3 * 3 * 64
    assert report.replay.flops == 2 * forward  # forward, and the gradient of the kernel
    assert {(one.group, one.on_host) for one in report.traffic} == {(8, 4)}


LOG = {
    "alarm": "E1122 10:00:00.0 7 slow_operation_alarm.cc:73] \n****\n[Compiling module jit_step] "
    "Very slow compile?\n****\n",
    "absl": "WARNING: All log messages before absl::InitializeLog() is called go to STDERR\n",
    "information": "I0000 00:00:17.0 7 service.cc:152] XLA service initialized\n",
    "older": "2026-11-22 10:00:00.0: W xla/service/hlo_rematerialization.cc:3] Can't reduce use\n",
}
SERIOUS = "E1122 10:00:01.0 7 spmd_partitioner.cc:5] Involuntary full rematerialization.\n  %dot\n"


def test_harmless_lines_of_the_compiler_are_heard_and_not_passed_on(capfd):
    with heard() as lines:
        os.write(2, "".join([LOG["absl"], LOG["alarm"], SERIOUS, *LOG.values()]).encode())
    assert capfd.readouterr().err == SERIOUS
    assert lines.count("[Compiling module jit_step] Very slow compile?") == 2


def test_where_compiling_fails_all_of_it_is_passed_on(capfd):
    with pytest.raises(RuntimeError), heard():
        os.write(2, LOG["alarm"].encode())
        raise RuntimeError
    assert capfd.readouterr().err == LOG["alarm"]
