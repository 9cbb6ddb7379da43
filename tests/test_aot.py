"""Meshes of GPUs that are not there, and what must be installed for them."""

import functools
import importlib.metadata
import importlib.util
import shutil
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from tests.hlo.modules import GPUS, gpu_named
from tests.support import audits

VOLTA = ("V100-16GB", "V100-32GB")  # only CUDA 12 compiles for them; CUDA 13 is tested to refuse
CUDA_12 = importlib.util.find_spec("jax_cuda12_plugin")
COMPILED = [name for name in GPUS if name not in VOLTA or CUDA_12]
LETTERS = {"bfloat16": "bf16", "float16": "f16"}


@pytest.mark.gpu_code
@pytest.mark.parametrize("name", COMPILED)
def test_every_gpu_compiles_a_program_in_its_16_bits(name):
    gpu, mesh = gpu_named(name), zerojax.aot.mesh(f"2x{name}")
    assert mesh.devices.flat[0].device_kind == gpu.device_kind
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((256, 128), gpu.half, sharding=rows)
    report = zerojax.audit(jax.jit(lambda x: (x.T @ x).sum()).lower(x).compile())
    assert report.gpu is gpu and report.backend == "gpu" and report.devices == 2
    # each device's half of the rows
    assert report.replay.flops_by_dtype == {LETTERS[gpu.half]: 2 * 128 * 128 * 128}
    assert report.memory.batch == 128 * 128 * 2 and report.step_seconds > 0


@pytest.mark.gpu_code
@pytest.mark.parametrize("name", ["T4", "H100", "B300", *(VOLTA if CUDA_12 else ())])
def test_a_step_compiles_from_abstract_state(name):
    gpu, plan = gpu_named(name), audits.planned(f"8x{name}", 3)
    state = plan.abstract()
    leaf = state.params["layers"]["w"]
    assert isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.mesh == plan.mesh
    loss = functools.partial(audits.loss, dtype=jnp.dtype(gpu.half))
    report = audits.audited(plan, loss).check()
    assert report.gpu is gpu and report.memory.peak < gpu.usable
    assert report.memory.parameters == plan.bytes_per_device()["params"]
    assert report.matmuls == (gpu.half,)
    with pytest.raises(ValueError, match="one can only compile"):
        plan.place(audits.make_state)


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("precision", "triton", "counted", "rate"),
    [
        ("default", False, "f32", 494.5e12),
        ("default", True, "f32", 494.5e12),
        ("highest", False, "f32 highest", 67e12),
        ("F32_F32_F32", True, "f32 highest", 67e12),
    ],
)
def test_what_precision_float32_is_multiplied_with(precision, triton, counted, rate):
    one = NamedSharding(zerojax.aot.mesh("1xH100"), PartitionSpec())
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=one)
    options = {"xla_gpu_enable_triton_gemm": triton}
    with jax.default_matmul_precision(precision):
        lowered = jax.jit(jnp.dot, compiler_options=options).lower(x, x)
    report = zerojax.audit(lowered.compile())
    assert report.replay.flops_by_dtype == {counted: 2 * 4096**3}
    reached = rate * report.gpu.reached_flops
    assert report.step_seconds == pytest.approx(2 * 4096**3 / reached, rel=0.02)


@pytest.mark.gpu_code
def test_meshes():
    mesh = zerojax.aot.mesh("64xH100")
    assert mesh.shape == {"data": 64}
    assert [d.process_index for d in mesh.devices.flat] == [i // 8 for i in range(64)]
    assert zerojax.aot.mesh("64xH100") == mesh, "the same devices, so that plans are equal"
    two = zerojax.aot.mesh("16xa100-40gb", (4, 4), ("replica", "data"), per_host=4)
    hosts = [[device.process_index for device in row] for row in two.devices]
    assert two.shape == {"replica": 4, "data": 4} and hosts == [[i] * 4 for i in range(4)]
    assert len({d.process_index for d in zerojax.aot.mesh("4xH100").devices.flat}) == 1
    assert zerojax.aot.mesh("1xB200").devices.flat[0].platform in ("gpu", "cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("H100",), "'H100' does not say how many of which GPU. Write for example '64xH100'"),
        (("0xH100",), "'0xH100' does not say how many"),
        (("8xV900",), r"no facts about a GPU 'V900'. Name one of T4, L4, L40S, A10G, RTX4090, RTX"),
        (("12xH100",), r"12 GPUs do not fill hosts of 8. Pass a multiple, or per_host="),
        (("8xH100", (2, 2), ("a", "b")), r"shape \(2, 2\) with axes \('a', 'b'\) does not hold 8"),
        (("8xH100", (2, 4)), "does not hold 8 GPUs. Pass shape= with that product, and as many"),
        (("v5e:2x4", (2, 2), ("a", "b")), r"axes \('a', 'b'\) does not hold 8 TPUs. Pass shape="),
        (("v5e:3x3",), "a slice of TPUs 'v5e:3x3'. Write for example 'v5e:2x4'; known: v5e of"),
        (("8xv5p",), "no facts about a slice of TPUs '8xv5p'. .*v5p of 2x2x1, 2x2x2"),
        (("v9:2x4",), "no facts about a slice of TPUs 'v9:2x4'"),
    ],
)
def test_meshes_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        zerojax.aot.mesh(*arguments)
    for per_host in (0, -1):
        with pytest.raises(ValueError, match=f"do not fill hosts of {per_host}. Pass a multiple"):
            zerojax.aot.mesh("8xH100", per_host=per_host)


def test_a_batch_is_sharded_along_its_first_dimension():
    plan = audits.planned("cpu", 3)
    key = jax.eval_shape(lambda: jax.random.key(0))
    made = zerojax.aot.batch({"x": jnp.ones((16, 3)), "n": jnp.int32(2), "key": key}, plan)
    assert made["x"].sharding.spec == PartitionSpec(("data",))
    assert made["x"].sharding.shard_shape((16, 3)) == (2, 3)
    for name in ("n", "key"):
        assert made[name].sharding.is_fully_replicated and made[name].shape == ()
    assert made["x"].dtype == jnp.float32 and isinstance(made["x"], jax.ShapeDtypeStruct)


# -- what is installed, and what is missing

PLAIN = "pip install 'jax[cuda13-local]' nvidia-cuda-nvcc"
FOR_12 = "pip install 'jax[cuda12-local]' nvidia-cuda-nvcc-cu12"
OF_13 = ("jax_cuda13_plugin", "jax_plugins", "jax_plugins.xla_cuda13")
OF_12 = ("jax_cuda12_plugin", "jax_plugins", "jax_plugins.xla_cuda12")


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Has only these of the packages be installed, and the compiler's tools where `tools` is."""
    find = importlib.util.find_spec
    for tool in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        path = tmp_path / "nvidia" / "cuda" / tool
        path.parent.mkdir(parents=True)
        path.touch()
    nvidia = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])

    def installed(*names, tools=False, version=jax.__version__):
        def found(name):
            parent, _, _ = name.rpartition(".")
            if parent == "jax_plugins" and parent not in names:  # as Python does
                raise ModuleNotFoundError("No module named 'jax_plugins'", name=parent)
            if name == "nvidia":
                return nvidia if tools else None
            ours = name.startswith(("jax_cuda", "jax_plugins"))
            return find(name) if not ours else find("json") if name in names else None

        monkeypatch.setattr(importlib.util, "find_spec", found)
        monkeypatch.setattr(shutil, "which", lambda _: None)
        monkeypatch.setattr(importlib.metadata, "version", lambda _: version)

    return installed


@pytest.mark.parametrize(
    ("names", "tools", "missing", "command"),
    [
        # None is there, nor the parent of one of them.
        ((), False, "jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc, nvidia-nvvm", PLAIN),
        (OF_13[1:], False, "jax-cuda13-plugin, nvidia-cuda-nvcc, nvidia-nvvm", PLAIN),
        (OF_13[1:], True, "jax-cuda13-plugin", PLAIN),
        (OF_13, False, "nvidia-cuda-nvcc, nvidia-nvvm", PLAIN),
        (OF_12, False, "nvidia-cuda-nvcc, nvidia-nvvm", FOR_12),
    ],
)
def test_missing_packages_are_named_with_the_command(names, tools, missing, command, installed):
    """The compiler would end the process."""
    installed(*names, tools=tools)
    text = f"compiling for GPUs needs packages that are missing here ({missing}). Run: {command}"
    with pytest.raises(ModuleNotFoundError) as raised:
        zerojax.aot._check_packages()
    assert str(raised.value) == text
    with pytest.raises(ModuleNotFoundError, match="pip install 'jax"):
        zerojax.aot.mesh("7xH100")
    assert zerojax.aot._install_command("cuda12" if names == OF_12 else "cuda13") == command


def test_tpus_need_libtpu_and_have_hosts_of_their_own(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"\(libtpu\). Run: pip install 'jax\[tpu\]'"):
        zerojax.aot.mesh("v6e:8x16")  # of which no other test makes one
    with pytest.raises(ValueError, match=r"hosts of v5e:2x4 follow from its shape\. Leave per_h"):
        zerojax.aot.mesh("v5e:2x4", per_host=4)
    with pytest.raises(ValueError, match="no speeds of TPUs, so it has no forecast for 'v5e:2x4'"):
        zerojax.tools.choose(print, gpus="v5e:2x4", make_state=dict, batch=1)


def test_a_plugin_of_another_version_is_refused(installed):
    installed(*OF_13, tools=True, version="0.1.2")
    with pytest.raises(ModuleNotFoundError, match=r"jax-cuda13-plugin 0.1.2 does not match jax \d"):
        zerojax.aot._check_packages()


def test_cuda_13_is_not_asked_to_compile_for_a_v100(installed):
    """JAX 0.12's compiler would end the process, that of 0.10 say that ptxas is too old."""
    installed(*OF_13, tools=True)
    for name in VOLTA:
        with pytest.raises(ModuleNotFoundError) as raised:
            zerojax.aot.mesh(f"5x{name}")
        text = str(raised.value)
        assert f"CUDA 13 does not compile for a {name}; CUDA 12 does. Make an environment" in text
        assert text.endswith(f"pip install zerojax jax=={jax.__version__} && {FOR_12}")


@pytest.mark.parametrize(
    ("gpus", "names", "topology"),
    [("24xV100", OF_12, "3x1x8"), ("24xH100", OF_13, "3x1x8"), ("3xH100", OF_13, "1x1x3")],
)
def test_nvlink_ends_at_a_host(gpus, names, topology, installed, monkeypatch):
    """XLA's scheduler prices collectives by which of its partitions they span. A plugin that JAX
    has given up is told how to keep it."""
    asked = []

    def gave_up(*_, **options):
        asked.append(options["topology"])
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", gave_up)
    installed(*names, tools=True)
    with pytest.raises(RuntimeError, match=r"Set JAX_PLATFORMS=cpu or JAX_SKIP_CUDA.*before JAX"):
        zerojax.aot.mesh(gpus)
    assert asked == [topology]
