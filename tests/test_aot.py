"""Meshes of GPUs that are not there, and what must be installed for them."""

import functools
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from tests import audits
from zerojax._forecast import doctor as _doctor
from zerojax._hlo import known as _known

VOLTA = ("V100-16GB", "V100-32GB")  # only CUDA 12 compiles for them; CUDA 13 is tested to refuse
COMPILED = [name for name in _known.GPUS if name not in VOLTA or zerojax.aot._cuda() == "cuda12"]


@pytest.mark.gpu_code
@pytest.mark.parametrize("name", COMPILED)
def test_every_gpu_compiles_a_program(name):
    mesh = zerojax.aot.mesh(f"2x{name}")
    assert mesh.devices.flat[0].device_kind == _known.GPUS[name].device_kind
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=rows)
    compiled = jax.jit(lambda x: (x.T @ x).sum()).lower(x).compile()
    report = zerojax.audit(compiled)
    assert report.gpu is _known.GPUS[name] and report.backend == "gpu" and report.devices == 2
    assert report.replay.flops == 2 * 128 * 128 * 128  # each device's half of the rows
    assert report.memory.batch == 128 * 128 * 4
    assert report.step_seconds > 0


@pytest.mark.gpu_code
@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize(
    ("precision", "counted", "rate"),
    [
        ("default", "f32", 494.5e12),
        ("highest", "f32 highest", 67e12),
        ("F32_F32_F32", "f32 highest", 67e12),
    ],
)
def test_what_precision_float32_is_multiplied_with(triton, precision, counted, rate):
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
@pytest.mark.parametrize(
    "name", sorted({"T4", "A10G", "RTX4090", "RTX5090", "H20", "B300", *VOLTA} & {*COMPILED})
)
def test_a_step_compiles_in_the_16_bits_that_a_gpu_has(name):
    gpu, plan = _known.GPUS[name], audits.planned(f"8x{name}", 3)
    loss = functools.partial(audits.loss, dtype=jnp.dtype(gpu.half))
    step = zerojax.train_step(loss, plan=plan)
    compiled = step.lower(plan.abstract(), audits.tokens(plan)).compile()
    report = zerojax.audit(compiled, plan=plan)
    report.check()
    assert report.gpu is gpu and report.memory.peak < gpu.usable
    assert {"bfloat16": "bf16[", "float16": "f16["}[gpu.half] in compiled.as_text()


@pytest.mark.gpu_code
def test_attention_of_cudnn_compiles_without_it():
    rows = NamedSharding(zerojax.aot.mesh("8xH100"), PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((16, 512, 4, 64), jnp.bfloat16, sharding=rows)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    loss = lambda x: attend(x, x, x, is_causal=True).astype(jnp.float32).sum()
    compiled = jax.jit(jax.grad(loss)).lower(x).compile()
    assert "__cudnn$fmhaSoftmaxBackward" in compiled.as_text()
    report = zerojax.audit(compiled)
    assert report.replay.flops == (2 + 5) * (2 * 4 * 512 * 512) * 64  # two rows of each GPU, causal


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
        (
            ("8xV900",),
            r"no facts about a GPU 'V900'. Name one of T4, L4, L40S, A10G, RTX4090, RTX5090",
        ),
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


def test_a_batch_is_sharded_along_its_first_dimension():
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
    assert report.gpu is _known.GPUS["H100"]


# -- what is missing


def test_missing_packages_are_named_with_the_command(monkeypatch):
    """The compiler would end the process."""
    find = importlib.util.find_spec
    specs = {"jax_cuda13_plugin": None, "nvidia": None, "jax_cuda12_plugin": None}
    specs |= dict.fromkeys(("jax_plugins", "jax_plugins.xla_cuda13"), find("json"))  # any is there
    found = lambda name: specs[name] if name in specs else find(name)
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(zerojax.aot.shutil, "which", lambda _: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        zerojax.aot.check_packages()
    text = str(raised.value)
    missing = "jax-cuda13-plugin, nvidia-cuda-nvcc, nvidia-nvvm"
    assert f"compiling for GPUs needs packages that are missing here ({missing}). Run: " in text
    assert text.endswith(zerojax.aot.install_command()) and "\n" not in text
    zerojax.aot._devices.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install 'jax"):
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
    assert zerojax.aot.install_command() == "pip install 'jax[cuda13-local]' nvidia-cuda-nvcc"
    cuda12 = "pip install 'jax[cuda12-local]' nvidia-cuda-nvcc-cu12"
    assert zerojax.aot.install_command("cuda12") == cuda12


@pytest.mark.parametrize(("name", "half"), [("V100-32GB", "float16"), ("V100-16GB", "float16")])
def test_cuda_13_is_not_asked_to_compile_for_a_v100(name, half, monkeypatch):
    """JAX 0.12's compiler would end the process, that of 0.10 say that ptxas is too old."""
    zerojax.aot._devices.cache_clear()
    monkeypatch.setattr(zerojax.aot, "check_packages", lambda: None)
    monkeypatch.setattr(zerojax.aot, "_is_installed", lambda module: module == "jax_cuda13_plugin")
    with pytest.raises(ModuleNotFoundError) as raised:
        zerojax.aot.mesh(f"8x{name}")
    text = str(raised.value)
    assert f"CUDA 13 does not compile for a {name}; CUDA 12 does. Make an environment with" in text
    assert f"pip install zerojax jax=={jax.__version__} && pip install 'jax[cuda12-local]'" in text
    assert text.endswith(" nvidia-cuda-nvcc-cu12") and _known.GPUS[name].half == half


def test_what_cuda_12_lacks_is_named_as_its_own_packages(monkeypatch):
    installed = ("jax_cuda12_plugin", "jax_plugins.xla_cuda12")
    monkeypatch.setattr(zerojax.aot, "_is_installed", lambda module: module in installed)
    monkeypatch.setattr(zerojax.aot, "_find_tool", lambda _: None)
    monkeypatch.setattr(zerojax.aot.shutil, "which", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"'jax\[cuda12-local\]' nvidia-cuda-nvcc-cu12$"):
        zerojax.aot.check_packages()
    monkeypatch.setattr(zerojax.aot, "_find_tool", lambda relative: relative)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: jax.__version__)
    zerojax.aot.check_packages()
    zerojax.aot._check_compiles(_known.GPUS["V100-32GB"])


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
def test_a_plugin_that_jax_gave_up_is_told_how_to_keep_it(monkeypatch):
    def gave_up(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(zerojax.aot.topologies, "get_topology_desc", gave_up)
    zerojax.aot._devices.cache_clear()
    with pytest.raises(RuntimeError, match=r"Set JAX_PLATFORMS=cpu or JAX_SKIP_CUDA.*before JAX"):
        zerojax.aot.mesh("8xH100")


@pytest.mark.gpu_code
@pytest.mark.parametrize(("gpus", "topology"), [("16xH100", "2x1x8"), ("4xH100", "1x1x4")])
def test_nvlink_ends_at_a_host(gpus, topology, monkeypatch):
    """XLA's scheduler prices collectives by which of its partitions they span."""
    asked, made = [], zerojax.aot.topologies.get_topology_desc

    def noted(*args, **options):
        asked.append(options["topology"])
        return made(*args, **options)

    monkeypatch.setattr(zerojax.aot.topologies, "get_topology_desc", noted)
    zerojax.aot._devices.cache_clear()
    hosts = [device.process_index for device in zerojax.aot.mesh(gpus).devices.flat]
    assert asked == [topology]
    assert hosts == [i // 8 for i in range(len(hosts))]
