"""Meshes of GPUs that are not there, and the facts about them."""

import importlib.metadata
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from tests import audits
from zerojax._audit.audit import heard
from zerojax._forecast import doctor as _doctor
from zerojax._hlo import gpus as _gpus

MEMORY_GB = {
    "T4": 16, "L4": 24, "L40S": 48, "A100-40GB": 40, "A100-80GB": 80, "H100": 80, "H200": 141,
    "B200": 180,
}  # fmt: skip


@pytest.mark.gpu_code
@pytest.mark.parametrize("name", _gpus.GPUS)
def test_every_gpu_compiles_a_program(name):
    mesh = zerojax.aot.mesh(f"2x{name}")
    assert mesh.devices.flat[0].device_kind == _gpus.GPUS[name].device_kind
    cut = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=cut)
    compiled = jax.jit(lambda x: (x.T @ x).sum()).lower(x).compile()
    report = zerojax.audit(compiled)
    assert report.gpu is _gpus.GPUS[name] and report.backend == "gpu" and report.devices == 2
    assert report.replay.flops == 2 * 128 * 128 * 128  # each device's half of the rows
    assert report.memory.batch == 128 * 128 * 4
    assert report.step_seconds > 0


@pytest.mark.gpu_code
def test_meshes():
    mesh = zerojax.aot.mesh("64xH100")
    assert mesh.shape == {"data": 64}
    assert [d.process_index for d in mesh.devices.flat] == [i // 8 for i in range(64)]
    assert zerojax.aot.mesh("64xH100") == mesh, "the same devices, so that plans are equal"
    two = zerojax.aot.mesh("16xa100-40gb", (4, 4), ("replica", "data"), per_host=4)
    assert two.shape == {"replica": 4, "data": 4}
    hosts = np.vectorize(lambda d: d.process_index)(two.devices)
    np.testing.assert_array_equal(hosts, np.arange(4)[:, None].repeat(4, 1))
    assert len({d.process_index for d in zerojax.aot.mesh("4xH100").devices.flat}) == 1
    (one,) = zerojax.aot.mesh("1xB200").devices.flat
    assert one.platform in ("gpu", "cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("H100",), "'H100' does not say how many of which GPU. Write for example '64xH100'"),
        (("0xH100",), "'0xH100' does not say how many"),
        (("-8xH100",), "does not say how many"),
        (("8xV900",), r"no facts about a GPU 'V900'. Name one of T4, L4, L40S, A100-40GB, A100-80"),
        (("12xH100",), r"12 GPUs do not fill hosts of 8. Pass a multiple, or per_host="),
        (("8xH100", (2, 2), ("a", "b")), r"shape \(2, 2\) with axes \('a', 'b'\) does not hold 8"),
        (("8xH100", (2, 4)), "does not hold 8 GPUs. Pass shape= with that product, and as many"),
    ],
)
def test_meshes_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        zerojax.aot.mesh(*arguments)


@pytest.mark.parametrize("per_host", [0, -1])
def test_hosts_without_gpus(per_host):
    with pytest.raises(ValueError, match=f"do not fill hosts of {per_host}. Pass a multiple"):
        zerojax.aot.mesh("8xH100", per_host=per_host)


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [("64xH100", 64, "H100"), (" 8 X h200 ", 8, "H200"), ("16*A100", 16, "A100-80GB"),
     ("1024xA100-40GB", 1024, "A100-40GB"), ("2xh100-80gb", 2, "H100")],
)  # fmt: skip
def test_counts_and_names(text, count, name):
    assert _gpus.parse_count(text) == (count, _gpus.GPUS[name])


def test_facts_of_gpus():
    assert {name: round(gpu.memory / 1e9) for name, gpu in _gpus.GPUS.items()} == {
        name: pytest.approx(size, rel=0.08) for name, size in MEMORY_GB.items()
    }
    h100 = _gpus.GPUS["H100"]
    assert h100.rates.flops == pytest.approx(600e12)
    assert h100.rates.memory == pytest.approx(2.7e12)
    assert h100.rates.link == pytest.approx(350e9)
    assert h100.rates.network == 50e9 and h100.usable == int(0.92 * h100.memory)
    for gpu in _gpus.GPUS.values():
        assert _gpus.of_device_kind(gpu.device_kind) is gpu
    assert _gpus.of_device_kind("TPU v5") is None


def test_a_batch_is_cut_by_its_first_dimension():
    plan = audits.planned("cpu", 3)
    key = jax.eval_shape(lambda: jax.random.key(0))
    made = zerojax.aot.batch({"x": jnp.ones((16, 3)), "n": jnp.int32(2), "key": key}, plan)
    assert made["x"].sharding.spec == PartitionSpec(("data",))
    assert made["x"].sharding.shard_shape((16, 3)) == (2, 3)
    for name in ("n", "key"):
        assert made[name].sharding.is_fully_replicated and made[name].shape == ()
    assert made["x"].dtype == jnp.float32 and isinstance(made["x"], jax.ShapeDtypeStruct)


@pytest.mark.gpu_code
def test_a_step_compiles_from_abstract_state():
    plan = audits.planned("8xH100", 3)
    state = plan.abstract()
    leaf = state.params["layers"]["w"]
    assert isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.mesh == plan.mesh
    report = audits.plain("8xH100", 3)
    assert report.memory.parameters == plan.bytes_per_device()["params"]
    assert report.gpu is _gpus.GPUS["H100"]


# -- what is missing


def test_missing_packages_are_named_with_the_command(monkeypatch):
    """The compiler would end the process."""
    find = importlib.util.find_spec
    gone = ("jax_cuda13_plugin", "nvidia")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in gone else find(n))
    monkeypatch.setattr(zerojax.aot.shutil, "which", lambda _: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        zerojax.aot.check_packages()
    text = str(raised.value)
    assert "compiling for GPUs needs packages that are missing here. Run: " in text
    assert f"-m pip install --no-deps jax-cuda13-plugin=={jax.__version__}" in text
    assert "nvidia-cuda-nvcc" in text and "nvidia-nvvm" in text and "\n" not in text
    zerojax.aot._devices.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps"):
        zerojax.aot.mesh("8xH100")


def test_a_plain_install_is_told_what_to_install(monkeypatch):
    """None of the packages is there, nor the parent of one of them, `jax_plugins`."""
    find = importlib.util.find_spec

    def plain(name):
        parent, _, _ = name.rpartition(".")
        if parent == "jax_plugins":  # as Python does
            raise ModuleNotFoundError("No module named 'jax_plugins'", name="jax_plugins")
        return None if name.startswith(("jax_cuda", "jax_plugins", "nvidia")) else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", plain)
    monkeypatch.setattr(zerojax.aot.shutil, "which", lambda _: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        zerojax.aot.check_packages()
    assert str(raised.value).endswith(f"Run: {zerojax.aot.install_command()}")
    (found,) = [c for c in _doctor._extras() if c.name == "compiling for GPUs"]
    assert found.text == str(raised.value)
    assert "pip install --no-deps jax-cuda13-plugin==" in zerojax.aot.install_command()


@pytest.mark.gpu_code
def test_a_plugin_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.1.2")
    with pytest.raises(ModuleNotFoundError, match=r"jax-cuda13-plugin 0.1.2 does not match jax \d"):
        zerojax.aot.check_packages()


@pytest.mark.gpu_code
def test_nothing_can_be_placed_on_gpus_that_are_not_there():
    plan = audits.planned("8xH100", 3)
    with pytest.raises(ValueError, match="one can only compile"):
        plan.place(audits.make_state)


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


@pytest.mark.gpu_code
def test_a_plugin_that_jax_gave_up_is_told_how_to_keep_it(monkeypatch):
    def gave_up(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(zerojax.aot.topologies, "get_topology_desc", gave_up)
    zerojax.aot._devices.cache_clear()
    with pytest.raises(RuntimeError, match=r"Set JAX_PLATFORMS=cpu or JAX_SKIP_CUDA.*before JAX"):
        zerojax.aot.mesh("8xH100")


# -- what the compiler says

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
