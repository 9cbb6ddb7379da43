"""The examples: they learn, resume, and keep what they promise; in full with `-m slow`."""

import importlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from safetensors import safe_open
from sklearn.datasets import load_sample_images

import zerojax
from tests.conftest import make_mesh
from tests.support.engine import serving
from tests.support.processes import ROOT, output, ssh
from tests.support.reference import assert_close

OF_MESHES = ("tensor_parallel", "mixture_of_experts", "context_parallel", "pipeline")
LOSS = r"validation loss (\d+\.\d+)"
PERCENT = r"accuracy (\d+\.\d+)%"
ACCURACY = r"validation accuracy (\d+\.\d+)"
BAR = r"loss=(\d\.\d+)"
SMALL = "--layers 2 --dim 64 --tokens 64"
TINY = "--layers 2 --dim 32 --tokens 16 --batch 16"


def figures(pattern, text):
    return [float(figure) for figure in re.findall(pattern, text)]


@pytest.fixture
def example(monkeypatch, as_it_was):
    """Imports a script of examples/ into this process, which has its 8 devices already."""
    update, devices = jax.config.update, "jax_num_cpu_devices"
    monkeypatch.setattr(jax.config, "update", lambda key, to: key == devices or update(key, to))
    monkeypatch.setattr(zerojax, "initialize", lambda: 1)  # too late, after other tests
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module


@pytest.fixture
def filled(request, tmp_path):
    """Returns a line with the directories that it names; there is no `{new}` yet."""
    named = lambda name: tmp_path / "new" if name == "new" else request.getfixturevalue(name)
    return lambda line: re.sub(r"\{(\w+)\}", lambda match: str(named(match[1])), line)


@pytest.fixture
def said(example, filled, monkeypatch, capsys):
    """Runs an example in this process; returns what it prints."""

    def said(line, *more):
        script, *options = filled(line).split()
        monkeypatch.setattr(sys, "argv", [script, *options, *map(str, more)])
        example(script).main()
        return capsys.readouterr()

    return said


@pytest.fixture
def base(example, tmp_path):
    """Files of weights that train_gpt.py begins with."""
    model, text = example("train_gpt").GPT(2, 64, 64), np.zeros((1, 64), np.int32)
    params = jax.jit(model.init)(jax.random.key(0), text)["params"]
    zerojax.checkpoint.export_safetensors(tmp_path / "base", params)
    return tmp_path / "base"


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    """A directory as of CIFAR-10, with crops of two photographs: which one is the class.

    Those for validation are of columns that those for training do not touch, and are too few for
    the last batch.
    """
    directory, draw = tmp_path_factory.mktemp("crops"), np.random.default_rng(0)
    photographs = load_sample_images().images

    def write(name, count, columns):
        records = []
        for label in draw.integers(len(photographs), size=count):
            seen = photographs[label][:, columns]
            top, left = draw.integers(seen.shape[0] - 31), draw.integers(seen.shape[1] - 31)
            crop = seen[top : top + 32, left : left + 32]
            records.append(bytes([label]) + crop.transpose(2, 0, 1).tobytes())
        (directory / name).write_bytes(b"".join(records))

    for n in range(1, 6):
        write(f"data_batch_{n}.bin", 400, slice(448))
    write("test_batch.bin", 300, slice(448, None))
    return directory


@pytest.mark.ci
def test_a_gpt_learns_and_writes(tmp_path):
    """As from a user's shell."""
    options = [*SMALL.split(), "--lr", "1e-2", "--steps", 40, "--eval-every", 20, "--sample", 40]
    printed, bar = output("examples/train_gpt.py", *options, "--export", tmp_path / "mine")
    start, _, end = figures(LOSS, printed)
    assert start > 5.4 and end < 2.9  # ln 256 is 5.5; the bytes' frequencies alone give 3.2
    written = printed.split("The model writes:\n")[1]
    assert len(written) > 30 and " " in written
    assert re.search(r"40/40 .*loss=2\.\d+, .*tokens/s=[\d,]+, memory=\d+\.\d [KM]iB", bar)
    with safe_open(next((tmp_path / "mine").glob("*.safetensors")), framework="np") as file:
        assert "blocks.up.kernel" in file.keys()  # noqa: SIM118


# -- a few steps of each

SAMPLED = "--steps 4 --sample-every 2 --bytes 8 --names"
RUNS = {
    f"demo {TINY} --steps 3": r"loss 5\.\d+ -> 5\.\d+\n(?s:.*)100%",
    f"finetune_hf {TINY} --steps 3 --base {{new}}": "making a small GPT-2",
    "train_vit --steps 3 --layers 2 --dim 32 --cifar {crops} --patch 8": ACCURACY,
    "nnx_vit --steps 3 --layers 3 --dim 32": r"% of 297 (?s:.*), \(4, 128\) on each device",
    "diffusion --steps 3 --layers 2 --dim 32 --times 3": "% of 160 drawn digits",
    f"dpo {TINY} --steps 3 --base {{new}} --base-steps 3": r"step 3: of unseen pairs \d",
    "fp8 --steps 5 --dim 32": r"flax: loss \d\.\d+, (?s:.*)amax of the images: 1\.00",
    "ppo --iterations 2 --envs 16 --unroll 4": r"iteration 2: mean reward -\d",
    "grpo --iterations 2 --prompts 8 --dim 32": r"iteration 2: mean reward 0\.\d+, divergence \d",
    f"mezo {SMALL} --steps 3 --base {{base}}": r"Adam \d+\.\d+\n(?s:.*)step 3: validation loss",
    f"muon {TINY} --steps 3": "step 3: validation loss",
    "qlora --layers 2 --dim 64 --steps 2": r"gathers \d+ KiB of u8\n(?s:.*)step 2: loss \d",
    f"compare_stages {TINY} --steps 1": r"\n +0 .* 3 x, \S+ +- +- +1\.00 x\n",
    f"tensor_parallel {TINY} --steps 1 --grid 2x2": r"P\(None, 'row', 'column'\)(?s:.*)over column",
    f"tensor_parallel {TINY} --steps 1": "all-(reduce|gather) over tensor.*all-(gather|reduce) ov",
    f"mixture_of_experts {TINY} --steps 1": "all-to-all over expert",
    f"mixture_of_experts {TINY} --steps 1 --seats 2.0": "all-to-all over expert",
    f"context_parallel {TINY} --steps 1": "over sequence(?s:.*)tokens of neighbours in forward",
    f"context_parallel {TINY} --steps 1 --sequence 4 --stage 1": "sums over tokens in forward",
    "cyclic --steps 20 --width 80 --batch 32": r"sends \d+\.\d+ MiB a step to one other",
    f"pipeline {TINY} --steps 1": "collective-permute over pipe",
    f"sample {TINY} {SAMPLED}": r"step 4: loss 5(?s:.*)layers\.1\.up\.kernel: bfloat16\[32",
    f"sample {TINY} {SAMPLED} --model nnx": r"step 4: loss \d(?s:.*)layers\.1\.norms\.1\.scale: ",
}


@pytest.mark.ci
@pytest.mark.parametrize("line", RUNS, ids=lambda line: line.partition(" --")[0])
def test_a_few_steps_run(line, said):
    """Those on meshes of two axes raise where their first step is not that of one device."""
    printed = said(line).out
    assert re.search(RUNS[line], printed), printed
    assert ("as on one device" in printed) == line.startswith(OF_MESHES)
    gathered = figures(r"all-gather over expert \((\d+) KiB", printed)
    assert sum(gathered) < 16, f"weights of experts do not stay where they are: {printed}"


@pytest.mark.ci
def test_a_llama_learns_a_task_and_then_its_adapters_do(said, tmp_path):
    base, mine, merged = (tmp_path / name for name in ("base", "mine", "merged"))
    right = r"step \d+: .* (\d+\.\d)% right"
    printed = said("finetune_llama", "--base", base, "--export", mine).out
    first, *_, last = figures(right, printed)
    assert "making a small Llama" in printed and first < 60 and last > 90
    line = "finetune_llama --rank 8 --steps 40 --lr 1e-2"
    options = ("--base", mine, "--export", merged, "--checkpoints", tmp_path / "saved")
    printed = said(line, *options).out
    assert figures(right, printed)[-1] > 90
    assert re.search(r"^[a-z]{6} backwards is [a-z]{6}$", printed, flags=re.MULTILINE)
    assert list(merged.glob("*.safetensors"))
    assert (tmp_path / "merged_adapters" / "adapter_config.json").exists()
    assert figures(right, said(line, *options[:2], *options[4:]).out) == []  # resumed at its end


@pytest.mark.gpu_code
def test_one_gpu_is_forecast_and_a_small_model_trains(said):
    printed = said("one_gpu --steps 3 --batch 8 --layers 2 --dim 256").out
    assert re.search(r"0\.0B +\d+\.\d fits +\d+\.\d+ s +\d+\.\d fits", printed), printed
    assert re.search(r"step 3: loss 5\.(?s:.*) MiB of optimizer state in \w*host memory", printed)


SAVED = "--steps 4 --save-every 2 --eval-every 2"
RESUMED = {  # and how they go on
    f"train_gpt {TINY} {SAVED} --lr 1e-2 --sample 0 --accumulate 2": "",
    f"train_convnet --width 8 --batch 32 {SAVED}": "",
    f"finetune_lora {SMALL} {SAVED} --base {{base}} --sample 0": "",
    f"relora {SMALL} --steps 5 --save-every 3 --restart-every 2 --base {{base}}": "",
    f"nnx_loop {TINY} --lr 1e-2 --dropout 0 --steps 4 --save-every 2": "--stage 1 --accumulate 2",
    f"equinox_loop {TINY} --lr 1e-2 --dropout 0 --steps 4 --save-every 2": "--stage 1",
}


@pytest.mark.ci
@pytest.mark.parametrize("line", RESUMED, ids=lambda line: line.partition(" --")[0])
def test_runs_go_on_where_they_were(line, said, tmp_path):
    """The data too, and what dropout draws: each loss is the same to the last digit printed."""
    at = line.partition("--save-every ")[2][0]
    whole = said(line, "--checkpoints", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / at, tmp_path / "half" / at)
    half = said(line, *RESUMED[line].split(), "--checkpoints", tmp_path / "half")
    assert f"resuming from step {at}" in half.out and "resuming" not in whole.out
    resumed, unbroken = (figures(r"validation \w+ (\d+\.\d+)", run.out) for run in (half, whole))
    assert resumed == unbroken[-len(resumed) :] != []
    assert figures(BAR, half.err)[-1:] == figures(BAR, whole.err)[-1:]


@pytest.mark.ci
def test_several_processes_train_the_same_with_no_edit(said, tmp_path):
    """Without dropout, which draws differently for each of the 16 devices."""
    options = f"{TINY} --lr 1e-2 --steps 4 --dropout 0"
    alone = said(f"nnx_loop {options}").out
    hosts, env = ("examples/multihost_ssh.sh", "127.0.0.1 other"), ssh(tmp_path / "bin")
    printed, _ = output(*hosts, "examples/nnx_loop.py", *options.split(), **env)
    assert printed.startswith("zerojax: 2 processes, 16 devices")
    assert figures(LOSS, printed) == pytest.approx(figures(LOSS, alone), abs=2e-3)
    assert printed.count("nats a byte") == 1


# -- what their parts promise

TEXT = np.random.default_rng(0).integers(0, 256, (16, 17), np.int32)


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def on_device(tree):
    """The elements that one device has."""
    return sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree))


def assert_same(one, other, tolerance=1e-5):
    assert_close(*map(zerojax.gather_params, (one, other)), tolerance)


@pytest.mark.ci
def test_lora_trains_and_reduces_adapters_alone(said, example, tmp_path):
    line = f"finetune_lora {SMALL} --steps 20 --eval-every 20 --sample 0 --accumulate 2"
    printed = said(f"{line} --base {{base}} --export {{new}}").out
    before, after = figures(LOSS, printed)
    assert after < before - 0.1
    trained = 2 * 8 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))  # two layers, of rank 8
    assert f"trains {trained:,} of" in printed
    assert figures(r"(\d+) KiB of optimizer", printed) == [round(8 * trained / 8 / 1024)]
    with safe_open(next((tmp_path / "new").glob("*.safetensors")), framework="np") as file:
        assert len(file.keys()) == 8 and all("lora_" in name for name in file.keys())  # noqa: SIM118

    lora = example("finetune_lora")
    _, make_state, loss_fn = lora.with_adapters(lora.parser.parse_args(SMALL.split()))
    plan = zerojax.plan(make_state, stage=3)
    text = np.zeros((32, 65), np.int32)
    report = zerojax.audit(zerojax.train_step(loss_fn), plan.abstract(), text).check()
    reduced = [path for one in report.traffic if one.kind == "reduce-scatter" for path in one.paths]
    assert len(reduced) == 8 and all("/lora_" in path for path in reduced)


@pytest.mark.ci
def test_relora_merges_without_a_change_and_forgets(example):
    relora = example("relora")
    tx = relora.restarting(optax.scale_by_adam(), 3)
    model, make_state, _ = relora.with_adapters(relora.parser.parse_args(TINY.split()), tx)
    plan = zerojax.plan(make_state, stage=3)
    state = plan.place(make_state)
    nonzero = lambda path, leaf: leaf + 0.1 if "lora_b" in jax.tree_util.keystr(path) else leaf
    state = state.replace(params=jax.tree_util.tree_map_with_path(nonzero, state.params))
    before = zerojax.gather_params(state.params)
    after = relora.merge_step(plan)(state, jax.random.key(1)).params
    assert on_device(after) < size(after) / 7
    after = zerojax.gather_params(after)
    old, new = (params["blocks"]["up"] for params in (before, after))
    assert np.abs(new["kernel"] - old["kernel"]).max() > 0.01
    assert np.abs(new["lora_a"]["kernel"] - old["lora_a"]["kernel"]).max() > 0.1
    assert not new["lora_b"]["kernel"].any()
    run = jax.jit(lambda params: model.apply({"params": params}, TEXT[:, :-1]))
    np.testing.assert_allclose(run(after), run(before), atol=1e-5)
    moments = tx.init(jnp.ones(4))
    for n in range(4):
        update, moments = tx.update(jnp.arange(4.0) + n + 1, moments)
        # Adam's first update is the sign.
        assert np.allclose(update, 1, atol=1e-5) == (n in (0, 3))


@pytest.mark.ci
def test_mezo_steps_the_same_on_one_device(example):
    """Along a normal direction, times the slope; each of 8 devices has its shards of the state."""
    mezo = example("mezo")
    make_state = lambda: {"params": {"w": jnp.eye(64), "out": jnp.ones((64, 8)) / 8}}
    loss_fn = lambda params, x: jnp.mean((jnp.tanh(x @ params["w"]) @ params["out"] - 1) ** 2)
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    results = []
    for mesh in map(make_mesh, (1, 8)):
        plan = zerojax.plan(make_state, stage=3, mesh=mesh)
        step = mezo.mezo_step(loss_fn, plan, lr=1e-2, eps=1e-2)
        batch = zerojax.shard_batch(x, like=mesh)
        results.append(step(plan.place(make_state), batch, jax.random.key(3)))
    (alone, _), (state, metrics) = results
    assert_same(alone, state)
    assert on_device(state) == size(state) / 8
    params = zerojax.gather_params(state)
    along = params["w"] - np.eye(64)
    assert np.std(along) == pytest.approx(1e-2 * abs(float(metrics["slope"][0])), rel=0.05)
    assert loss_fn(params, x) < loss_fn(make_state()["params"], x)


@pytest.fixture
def tiny(example):
    """A GPT, its loss, and the function that makes its parameters."""
    train_gpt = example("train_gpt")
    model = train_gpt.GPT(3, 32, 16)
    make_state = lambda: {"params": model.init(jax.random.key(0), TEXT[:, 1:])["params"]}
    return model, lambda params, text: train_gpt.next_byte_loss(model, params, text), make_state


@pytest.mark.ci
def test_the_estimator_of_a_quantum_state_is_the_gradient_of_its_energy(said, example):
    """Summed over all configurations; with samples, it finds the lowest energy."""
    ising = example("ising")
    matrix, spins = ising.hamiltonian(6, 1.0), ising.configurations(6)

    def energy(params):
        psi = jnp.exp(ising.log_psi(params, spins))
        return psi @ matrix @ psi / (psi @ psi)

    params = {"w": jax.random.normal(jax.random.key(0), (6, 16)) / 4, "b": jnp.ones(16) / 4}
    plan = zerojax.plan({"params": params}, stage=3, min_shard_size=0)
    placed = plan.place({"params": params})["params"]
    grads = zerojax.value_and_grad(ising.exact_loss(1.0), plan, has_aux=True)
    (_, aux), grads = jax.jit(grads)(placed, spins)
    value, wanted = jax.value_and_grad(energy)(params)
    assert float(aux["energy"]) == pytest.approx(float(value), rel=1e-5)
    assert_same(grads, wanted)
    printed = said("ising --steps 100 --sites 6 --walkers 512").out
    lowest, exact = figures(r"(?:step 100: energy|exactly) (-\d+\.\d+)", printed)
    assert lowest == pytest.approx(exact, rel=0.01)


@pytest.mark.ci
def test_numpyro_trains_by_rows_of_a_plate(said, monkeypatch):
    """Its first step is that of one device, unless the plate has only the rows that it sees."""
    numpyro = pytest.importorskip("numpyro")
    printed = said("numpyro_svi --steps 300 --hidden 64").out
    assert figures(PERCENT, printed)[-1] > 80 and "(8, 64) on each device" in printed
    plate = numpyro.plate
    monkeypatch.setattr(
        numpyro, "plate", lambda name, _, subsample_size: plate(name, subsample_size)
    )
    with pytest.raises(AssertionError, match="loss on the whole batch"):
        said("numpyro_svi --steps 1")


@pytest.mark.ci
def test_zo2_has_mezo_s_losses_with_its_parameters_in_host_memory(example, tiny):
    """The last update waits for the next step, or for `settle`."""
    (model, loss_fn, make_state), mezo, zo2 = tiny, example("mezo"), example("zo2")
    on_devices = zerojax.plan(make_state, stage=3)
    on_host = zerojax.plan(make_state, stage=3, offload=zerojax.Offload(params=True, min_bytes=0))
    plain, state = on_devices.place(make_state), zo2.begun(on_host.place(make_state))
    stepped = mezo.mezo_step(loss_fn, on_devices, 0.02, 1e-2)
    step, settle = zo2.steps(model, on_host, 0.02, 1e-2)
    text = zerojax.shard_batch(TEXT)
    for n in range(3):
        before, key = zerojax.gather_params(plain), jax.random.key(n)
        plain, wanted = stepped(plain, text, key)
        state, metrics = step(state, text, key)
        assert_close(metrics, wanted, 1e-3)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state["params"])}
        assert kinds == {"pinned_host"}
        assert_close(zerojax.gather_params(state), before, 1e-4)
    after = zerojax.gather_params(settle(state))
    assert_close(after, zerojax.gather_params(plain), 1e-4)
    moves = jax.tree.map(lambda new, old: np.max(abs(new - old)), after, before)
    assert min(jax.tree.leaves(moves)) > 1e-3


@pytest.mark.gpu_code
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA copies other layers")
def test_a_gpu_has_a_few_layers_of_zo2_s_at_a_time(said):
    """All of the rest is on the host, where nothing of it is copied."""
    printed = said("mezo --way zo2 --gpus 1xH100 --layers 16 --dim 512 --batch 1").out
    device, host = figures(r"(\d+\.\d+) MiB", printed)
    matrices = 16 * 12 * 512**2 * 4 / 2**20
    assert matrices < host < matrices + 1 and device < 6 * matrices / 16


@pytest.mark.ci
def test_cyclic_steps_are_those_of_a_gradient_one_step_old(example):
    cyclic, steps, lr = example("cyclic"), 4, 0.05
    rng = np.random.default_rng(0)
    images = rng.normal(size=(steps, 32, 16)).astype(np.float32)
    labels = rng.integers(0, 10, (steps, 32))
    layers = cyclic.init_layers(jax.random.key(0), 8, 16)

    def loss(layers, x, labels):
        x, _ = jax.lax.scan(lambda x, w: (cyclic.layer(w, x), None), x, layers)
        return cyclic.loss_of(x, labels)

    versions = [layers, layers]
    for batch in zip(images, labels, strict=True):
        grads = jax.grad(loss)(versions[-2], *batch)
        versions.append(jax.tree.map(lambda w, g: w - lr * g, versions[-1], grads))
    trained, _ = cyclic.trainer(zerojax.mesh(data=8), lr)(layers, images, labels)
    assert_close(trained, versions[steps], 1e-5)


@pytest.mark.ci
def test_muon_by_matrix_is_optax_s_for_the_flops_of_a_share(example):
    """Of two stacks of three layers, no device orthogonalizes more than one layer."""
    muon, mesh = example("muon"), make_mesh()
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    shapes = {"up": (3, 32, 64), "down": (3, 64, 32), "head": (32, 8)}
    params = {name: normal(*shape) / 8 for name, shape in shapes.items()}

    def loss_fn(params, x):
        layer = lambda x, p: (x + jnp.tanh(x @ p[0]) @ p[1], None)
        x, _ = jax.lax.scan(layer, x, (params["up"], params["down"]))
        return jnp.mean((x @ params["head"]) ** 2)

    x = normal(8, 32)
    state = TrainState.create(apply_fn=None, params=params, tx=muon.optax_muon(0.1))
    grad = jax.grad(loss_fn)
    alone = jax.jit(lambda state, x: state.apply_gradients(grads=grad(state.params, x)))
    sharded = TrainState.create(apply_fn=None, params=params, tx=muon.muon(0.1))
    plan = zerojax.plan(sharded, stage=3, mesh=mesh)
    sharded, step = plan.place(sharded), zerojax.train_step(loss_fn)
    compiled = step.lower(sharded, x).compile()
    whole = alone.lower(state, x).compile().cost_analysis()["flops"]
    assert compiled.cost_analysis()["flops"] < 0.4 * whole
    report = zerojax.audit(compiled, plan=plan).check()
    exchanges = [one for one in report.traffic if one.kind == "all-to-all"]
    assert len(exchanges) == 4  # the gradients of two stacks there, and updates back
    assert on_device(sharded.opt_state) < size(sharded.opt_state) / 3
    for _ in range(2):
        state, (sharded, _) = alone(state, x), step(sharded, x)
    assert_same(state.params, sharded.params, 2e-4)


@pytest.mark.ci
def test_fp8_of_flax_has_one_device_s_scales(example):
    """Its histories are maxima over devices whose rows differ; the reference is Flax's own way."""
    fp8 = example("fp8")
    args, draw = fp8.parser.parse_args(["--dim", "64"]), np.random.default_rng(0)
    x = draw.normal(size=(32, 64)) * np.geomspace(0.1, 10, 32)[:, None]
    batch = {"x": x.astype("float32"), "y": draw.integers(10, size=32)}
    make_state, step, _ = fp8.by_flax(args, optax.adam(1e-2), batch["x"][:1])
    state = zerojax.shard_train_state(make_state, stage=3)
    zerojax.verify(step, state, batch).check()
    dot = lambda: fp8.fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=16)
    model = fp8.Reader(args.dim, dot)
    variables = model.init(jax.random.key(0), batch["x"][:1])
    alone = TrainState.create(apply_fn=None, params=variables, tx=optax.adam(1e-2))
    with pytest.raises(ValueError, match=r"/_overwrite_with_gradient/.*fp8\.py"):
        zerojax.shard_train_state(alone, stage=3)
    loss_fn = lambda params: fp8.cross_entropy(model.apply(params, batch["x"]), batch["y"])
    one_step = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss_fn)(state.params)))
    for _ in range(3):
        alone, (state, _) = one_step(alone), step(state, batch)
    assert on_device(state.params["weights"]) < size(state.params["weights"]) / 3
    params = zerojax.gather_params(state)
    assert_close(params["fp8"]["values"], alone.params[fp8.OVERWRITE], 1e-5)
    assert_close(params["weights"], alone.params["params"], 1e-5)
    assert params["fp8"]["one"] == 1


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:'VariableState' was removed")
@pytest.mark.parametrize(
    ("by", "bwd"), [("qwix", None), ("qwix", "float8_e5m2"), ("qwix-static", None)]
)
def test_fp8_of_qwix_is_one_device_s(example, by, bwd):
    pytest.importorskip("qwix")
    fp8, draw = example("fp8"), np.random.default_rng(0)
    args = fp8.parser.parse_args(["--dim", "64", "--by", by])
    x = draw.normal(size=(32, 64)) * np.geomspace(0.5, 2, 32)[:, None]
    batch = {"x": x.astype("float32"), "y": draw.integers(10, size=32)}
    make_state, step, _ = fp8.by_qwix(args, optax.sgd(0.1), batch["x"][:1], bwd)
    one, all_devices = (
        step(zerojax.shard_train_state(make_state, stage=3, mesh=make_mesh(n)), batch)[0]
        for n in (1, 8)
    )
    if by == "qwix":  # a gradient of weights has scales over a device's rows: it rounds otherwise
        assert_same(one.params, all_devices.params, 1e-5 if bwd is None else 1e-2)
    else:  # scales are of a device's rows until there are means of earlier steps
        of_images = [state.quant_stats["Dense_0"] for state in (one, all_devices)]
        assert_same(*of_images)
        assert 1 in jax.tree.leaves(of_images)  # a count


@pytest.mark.ci
def test_ppo_is_one_device_s_and_its_rollouts_send_nothing(example):
    """Over rollouts, advantages, minibatches and running statistics."""
    ppo = example("ppo")
    line = "--envs 16 --unroll 4 --minibatches 1 --iterations 2"
    args, results = ppo.parser.parse_args(line.split()), []
    for mesh in map(make_mesh, (1, 8)):
        *_, (state, reward) = ppo.train(args, mesh)
        results.append((zerojax.gather_params(state), jax.device_get((state.stats, reward))))
    assert_close(results[1], results[0], 1e-4)
    stats, _ = results[1][1]
    assert stats["count"] == 1 + 2 * ppo.EPOCHS and stats["mean"].all()
    assert on_device(state.params) < size(state.params) / 3
    _, play, _ = ppo.learner(args)
    rows = zerojax.shard_batch(np.zeros(args.envs, "float32")).sharding
    env = {"angle": "float32", "speed": "float32", "age": "int32"}
    env = {name: jax.ShapeDtypeStruct((args.envs,), of, sharding=rows) for name, of in env.items()}
    compiled = play.lower(zerojax.reshard(state), state.stats, env, jax.random.key(0)).compile()
    assert "channel_id" not in compiled.as_text()


@pytest.mark.ci
def test_grpo_is_one_device_s_and_an_engine_takes_its_weights(example):
    """The rewards show that all devices write the same; the engine is asked as vLLM would be."""
    grpo, results = example("grpo"), []
    line = "--prompts 16 --group 4 --epochs 2 --iterations 2 --dim 32"
    args = grpo.parser.parse_args(line.split())
    for mesh in map(make_mesh, (1, 8)):
        *_, (state, reward, metrics) = grpo.train(args, mesh)
        results.append(jax.device_get((zerojax.gather_params(state), reward, metrics["aux"])))
    assert_close(results[1], results[0], 1e-4)
    assert metrics["aux"]["divergence"] > 0
    names, params = grpo.engine_names(state), results[1][0]
    with serving() as server:
        engine = grpo.Engine(server.url, server.join)
        engine.update(state, names)
        engine.update(state, names)
    init, update = ["get_world_size", "init_weight_transfer_engine"], ["update_weights"]
    before, after = ["pause", "start_weight_update"], ["finish_weight_update", "resume"]
    assert server.calls == init + 2 * (before + update + after)
    assert server.weights.keys() >= {"layers.0.up.kernel", "layers.1.up.kernel", "embed.embedding"}
    one = server.weights["layers.1.up.kernel"]
    assert one.dtype == jnp.bfloat16
    assert_close(one.astype("float32"), params["blocks"]["up"]["kernel"][1], 1e-2)
    assert sum(w.size for w in server.weights.values()) == size(params)


# -- in full, as their docstrings state

FULL = {  # figures, the last of its kind each, and between what they are
    "train_gpt": {LOSS: (0, 1.5)},
    "train_convnet": {ACCURACY: (0.98, 1)},
    "train_convnet --cifar {crops} --steps 60 --width 8": {ACCURACY: (0.9, 1)},
    "train_vit": {PERCENT: (97, 100)},
    "train_vit --cifar {crops} --steps 100 --patch 8": {PERCENT: (90, 100)},
    "diffusion": {r"(\d+\.\d+)% of 160 drawn": (90, 100)},
    "finetune_hf --base {new}": {rf"(?s)^.*?{LOSS}": (5.5, 5.6), LOSS: (0, 2.4)},
    "finetune_lora --base {new}": {rf"(?s)trains.*?{LOSS}": (2.1, 2.4), LOSS: (0, 1.95)},
    "relora --base {new}": {LOSS: (0, 2.05)},
    "dpo --base {new}": {r"of unseen pairs (\d+\.\d+)% right": (90, 100)},
    "mezo --base {new}": {
        LOSS: (0, 2.3),
        r"evaluation (\d+\.\d+) MiB": (3.53, 3.67),
        r"MeZO (\d+\.\d+)": (3.53, 3.67),
        r"Adam (\d+\.\d+)\n": (14.2, 15.6),
    },
    "cyclic": {r"(\d+\.\d+)% of unseen": (97, 100), r"sends (\d+\.\d+) MiB": (13.9, 14.1)},
    "muon": {LOSS: (0, 2.4)},
    "muon --gram": {LOSS: (0, 2.4)},
    "qlora": {r"step 1: loss (\d\.\d+)": (0.9, 1.3), r"step 60: loss (\d\.\d+)": (0, 0.36)},
    "muon --compare --steps 0": {  # GFLOP and MiB
        r"Adam, stage 3 +(\d\.\d+) ": (0.45, 0.49),
        r"Muon, stage 3 +(\d\.\d+) ": (1.15, 1.27),
        r"Muon, stage 3 .* (\d+\.\d+) \(": (59.0, 65.2),
        r"Muon by matrix, stage 3 +(\d\.\d+) ": (1.04, 1.14),
        r"Muon by matrix, stage 3 .* (\d+\.\d+) \(": (17.3, 17.7),
        r"on Gram matrices +(\d\.\d+) ": (0.84, 0.9),
    },
    "fp8": {r"(\d+\.\d+)% of unseen": (88, 100)},
    "fp8 --by qwix": {r"(\d+\.\d+)% of unseen": (88, 100)},
    "ppo": {r"(?s)^.*?reward (-\d\.\d+)": (-7, -6), r"reward (-\d\.\d+)": (-1.5, 0)},
    "grpo": {r"(?s)^.*?reward (\d\.\d+)": (0, 0.2), r"reward (\d\.\d+)": (0.9, 1)},
    "ising": {
        r"step 300: energy (-\d+\.\d+)": (-12.82, -12.75),
        r"exactly (-.*)": (-12.79, -12.78),
    },
    "numpyro_svi": {PERCENT: (95, 100)},
    "nnx_loop": {LOSS: (0, 2.4)},
    "nnx_vit": {PERCENT: (95, 100)},
    "equinox_loop": {LOSS: (0, 2.3)},
    "tensor_parallel": {LOSS: (0, 2.4)},
    "context_parallel": {LOSS: (0, 2.4)},
    "pipeline": {LOSS: (0, 2.4)},
    "mixture_of_experts": {LOSS: (0, 2.4)},
}


@pytest.mark.slow
@pytest.mark.parametrize("line", FULL)
def test_they_reach_what_their_docstrings_state(line, filled):
    script, *options = filled(line).split()
    printed, _ = output(f"examples/{script}.py", *options, timeout=3600)
    for pattern, (low, high) in FULL[line].items():
        assert low <= figures(pattern, printed)[-1] <= high, (pattern, printed)
