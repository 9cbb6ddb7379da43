"""The examples: what they promise in small, in full with `-m slow`; what starts them on hosts."""

import functools
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from safetensors import safe_open
from sklearn.datasets import load_sample_images

import zerojax
from tests.processes import free_port
from zerojax._run import processes as _processes

ROOT = pathlib.Path(__file__).parents[1]
ON_TWO_AXES = {  # what each of them sends over the second one
    "mixture_of_experts": {"all-to-all over expert"},
    "tensor_parallel": {"all-reduce over tensor", "all-gather over tensor"},
    "context_parallel": {"all-to-all over sequence"},
    "pipeline": {"collective-permute over pipe"},
}
PROGRAMS = [path for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()]
OTHERS = {*ON_TWO_AXES, "multihost_ray"}  # without microbatches, and a launcher that needs Ray
SCRIPTS = sorted(path for path in PROGRAMS if path.stem not in OTHERS)
SMALL = ["--layers", "2", "--dim", "64", "--tokens", "64"]
GPT = ["examples/train_gpt.py", *SMALL, "--lr", "1e-2", "--steps", "40", "--eval-every", "20"]


def run(program, *arguments, code=0, timeout=600, **env):
    """(standard output, standard error) of a program, started as from a user's shell."""
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    python = [sys.executable] if str(program).endswith(".py") else []
    done = subprocess.run(
        [*python, program, *map(str, arguments)], cwd=ROOT, timeout=timeout, check=False,
        env={**inherited, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def figures(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def losses(output):
    """Of validation: those on the way, and the last."""
    return figures(r"validation loss (\d+\.\d+)", output)


@pytest.fixture
def example(monkeypatch):
    """Imports a script of examples/ into this process, which has its 8 devices already."""

    def imported(name):
        update = jax.config.update
        with monkeypatch.context() as patched:
            asked = lambda key, value: key == "jax_num_cpu_devices" or update(key, value)
            patched.setattr(jax.config, "update", asked)
            return importlib.import_module(name)

    monkeypatch.syspath_prepend(ROOT / "examples")
    return imported


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_short_and_explain_their_options(script, example):
    assert len(script.read_text().splitlines()) < 250
    said = example(script.stem).parser.format_help()
    assert said.startswith("usage:") and "--accumulate" in said


def test_a_mixture_of_experts_says_why_it_has_no_microbatches(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mixture_of_experts.py", "--accumulate", "2"])
    with pytest.raises(SystemExit):
        example("mixture_of_experts").main()
    said = " ".join(capsys.readouterr().err.split())
    assert "--accumulate 2: the balancing loss multiplies two means" in said
    assert "Leave --accumulate out" in said


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """A short run of train_gpt.py: its directory and what it printed."""
    out = tmp_path_factory.mktemp("gpt")
    saving = ["--checkpoints", out / "saved", "--save-every", 20, "--export", out / "base"]
    return out, *run(*GPT, "--sample", 40, *saving)


def test_gpt_learns_and_writes(gpt):
    _, said, bar = gpt
    start, _, end = losses(said)
    assert start > 5.4 and end < 2.9  # ln 256 is 5.5; the bytes' frequencies alone give 3.2
    written = said.split("The model writes:\n")[1]
    assert len(written) > 30 and " " in written
    assert re.search(r"40/40 .*loss=2\.\d+, .*tokens/s=[\d,]+, memory=\d+\.\d [KM]iB", bar)


def test_gpt_goes_on_where_it_was(gpt, tmp_path):
    """The data too: the resumed run ends with the same model, to the last byte that it writes."""
    out, said, _ = gpt
    shutil.copytree(out / "saved" / "20", tmp_path / "20")
    again, _ = run(*GPT, "--sample", 40, "--checkpoints", tmp_path, "--save-every", 20)
    assert "goes on from step 20" in again
    assert again.split("validation loss")[-1] == said.split("validation loss")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_convnet", "finetune_lora"])
def test_others_go_on_where_they_were(script, gpt, tmp_path):
    """The data, and what dropout draws: the last batch's loss is the same to three digits."""
    lora = [*SMALL, "--base", gpt[0] / "base", "--sample", 40]
    sizes = {"train_convnet": ["--width", 8, "--batch", 32], "finetune_lora": lora}
    options = [*sizes[script], "--steps", 8, "--eval-every", 4, "--save-every", 4, "--checkpoints"]
    said, bar = run(f"examples/{script}.py", *options, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "4", tmp_path / "half" / "4")
    again, its_bar = run(f"examples/{script}.py", *options, tmp_path / "half")
    assert "goes on from step 4" in again
    assert again.split("validation")[-1] == said.split("validation")[-1]
    assert figures(r"loss=(\d\.\d+)", its_bar)[-1] == figures(r"loss=(\d\.\d+)", bar)[-1]


def stub(directory, name, script):
    """A command of that name, first on the PATH."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (directory / name).chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}", "PYTHON": sys.executable}


@pytest.fixture
def ssh(tmp_path):
    """Runs on this machine what it is to run on a host."""
    return stub(tmp_path / "bin", "ssh", 'exec bash -c "${@: -1}"') | {"PORT": str(free_port())}


@pytest.mark.slow  # a minute
def test_several_processes_train_the_same_gpt_with_no_edit(gpt, ssh):
    """Two of them, 16 devices in all, started as on two hosts."""
    said, _ = run("examples/multihost_ssh.sh", "127.0.0.1 other", *GPT, "--sample", 0, **ssh)
    assert said.startswith("zerojax: 2 processes, 16 devices")
    assert losses(said) == pytest.approx(losses(gpt[1]), abs=2e-3)
    assert said.count("nats a byte") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [pytest.param("nnx_loop", marks=pytest.mark.slow), "equinox_loop"]
)
def test_several_processes_run_the_same_loop(script, ssh):
    """Without dropout, which draws differently for each device."""
    small = ["--layers", "2", "--dim", "32", "--tokens", "16", "--batch", "16", "--dropout", "0"]
    program = [f"examples/{script}.py", *small, "--steps", "5"]
    alone, _ = run(*program)
    said, _ = run("examples/multihost_ssh.sh", "127.0.0.1 other", *program, **ssh)
    assert "zerojax: 2 processes, 16 devices" in said
    assert losses(said) == pytest.approx(losses(alone), abs=2e-3)
    assert said.count("nats a byte") == 1


def test_hosts_port_and_arguments_reach_the_other_shell_as_they_are(ssh, tmp_path):
    program = tmp_path / "a program.py"
    names = ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"]
    values = f"[*map(os.getenv, {names}), *sys.argv[1:]]"
    program.write_text(
        f"import os, sys; os.write(1, str({values}).encode() + b'\\n')"
    )  # in one piece
    hosts, env = "me@$(date);a\n-oB", ssh | {"PORT": "1;exit"}
    said, _ = run("examples/multihost_ssh.sh", hosts, program, "a  b", "$HOME", **env)
    assert said == f"{['$(date);a', '1;exit', '2', 'a  b', '$HOME']}\n" * 2
    _, said = run("examples/multihost_ssh.sh", "", program, code=1, **env)
    assert 'the hosts are missing, as in "host1 host2"' in said


def test_one_host_that_fails_ends_all(ssh, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(30)"
    )
    started = time.monotonic()
    run("examples/multihost_ssh.sh", "127.0.0.1 other", program, code=3, **ssh)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("code", [0, 1, 143])
def test_slurm_requeues_what_was_saved_before_its_end(tmp_path, code):
    env = stub(tmp_path / "bin", "srun", 'shift; exec "$@"')
    stub(tmp_path / "bin", "scontrol", f'echo "$@" > {tmp_path}/asked')
    program = tmp_path / "program.py"
    program.write_text(f"raise SystemExit({code})")
    run("examples/multihost_slurm.sh", program, code=code, SLURM_JOB_ID="17", **env)
    assert (tmp_path / "asked").exists() == (code == 143)
    if code == 143:
        assert (tmp_path / "asked").read_text() == "requeue 17\n"


TOLD = """import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
JOINED = """import jax, sys, zerojax
zerojax.initialize()
print(jax.process_index(), *sys.argv[1:])
"""


def started(commands, directory, program):
    """Returns what a program prints, by host, that the commands of several hosts start here."""
    (directory / "program.py").write_text(program)
    common = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    common |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    common |= stub(
        directory / "bin", "python", f'exec {sys.executable} {directory}/program.py "$@"'
    )
    running = [
        subprocess.Popen(command, env={**common, **env}, stdout=subprocess.PIPE, text=True)
        for command, env in commands
    ]
    said = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    return said


def check_joined(commands, directory, address, arguments):
    """The variables are those that `zerojax.initialize` reads, and differ in the rank alone."""
    for rank, said in enumerate(started(commands, directory, TOLD)):
        given, env = json.loads(said)
        assert given == arguments
        assert _processes._from_environment(env) == {
            "coordinator_address": address, "num_processes": 2, "process_id": rank,
            "local_device_ids": None,
        }  # fmt: skip


def test_jobset_joins_its_pods(tmp_path):
    """As Kubernetes does: names by DNS, the index from the annotation, then the command."""
    jobset = yaml.safe_load((ROOT / "examples" / "multihost_jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,), name = jobset["spec"]["replicatedJobs"], jobset["metadata"]["name"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed" and job["replicas"] == 1
    env = {one["name"]: one for one in container["env"]}
    assert env["MASTER_ADDR"]["value"] == f"{name}-{job['name']}-0-0.{name}"
    count = int(env["WORLD_SIZE"]["value"])
    assert count == spec["parallelism"] == spec["completions"] == 2
    field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env["RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == field
    volumes = {one["name"] for one in spec["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    given = {name: one["value"] for name, one in env.items() if "value" in one}
    pods = [(container["command"], {**given, "RANK": str(n)}) for n in range(count)]
    arguments = ["-u", "examples/train_gpt.py", "--checkpoints", "/shared/gpt"]
    check_joined(pods, tmp_path, "zerojax-hosts-0-0.zerojax:29500", arguments)


def skypilot_nodes(task, first):
    given = {"SKYPILOT_NODE_IPS": f"{first}\n10.0.0.2\n", "SKYPILOT_NUM_NODES": "2"}
    given |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "CHECKPOINTS": "/a b"}
    command = ["bash", "-c", task["run"]]
    return [(command, {**given, "SKYPILOT_NODE_RANK": str(n)}) for n in range(2)]


def test_skypilot_joins_its_nodes(tmp_path):
    task = yaml.safe_load((ROOT / "examples" / "multihost_skypilot.yaml").read_text())
    assert task["num_nodes"] == 2 and task["envs"] == {"CHECKPOINTS": None}
    nodes, arguments = skypilot_nodes(task, "10.0.0.1"), ["-u", "examples/train_gpt.py"]
    check_joined(nodes, tmp_path, "10.0.0.1:29500", [*arguments, "--checkpoints", "/a b"])


@pytest.mark.slow
def test_skypilots_nodes_start_as_one_run(tmp_path):
    task = yaml.safe_load((ROOT / "examples" / "multihost_skypilot.yaml").read_text())
    task["run"] = task["run"].replace("29500", str(free_port()))
    said = started(skypilot_nodes(task, "127.0.0.1"), tmp_path, JOINED)
    asked = "-u examples/train_gpt.py --checkpoints /a b\n"
    assert said == [f"zerojax: 2 processes, 2 devices\n0 {asked}", f"1 {asked}"]


RAY = """import sys, types


def stand_in(name, **found):
    sys.modules[name] = types.SimpleNamespace(**found)


class Trainer:
    def __init__(self, work, train_loop_config, scaling_config, **rest):
        print(scaling_config["num_workers"], scaling_config["resources_per_worker"])
        self.fit = lambda: work(train_loop_config)


stand_in("ray.train", FailureConfig=dict, RunConfig=dict, ScalingConfig=dict)
stand_in("ray.train.v2.jax", JaxConfig=dict, JaxTrainer=Trainer)
sys.path.insert(0, "examples")
import multihost_ray

multihost_ray.main()
"""


def test_ray_starts_the_program_with_its_options(tmp_path):
    """Without Ray: what the trainer is told, and what a worker runs."""
    (tmp_path / "ray.py").write_text(RAY)
    program = tmp_path / "program.py"
    program.write_text("import sys, beside\nprint(__name__, beside.here, *sys.argv[1:])")
    (tmp_path / "beside.py").write_text("here = 'found'")
    said, _ = run(tmp_path / "ray.py", "--hosts", 2, "--gpus", 8, program, "--steps", 3)
    assert said == "2 {'GPU': 8}\n__main__ found --steps 3\n"


@pytest.mark.slow
def test_lora_learns_with_the_base_frozen(gpt, tmp_path):
    base, adapters = gpt[0] / "base", tmp_path / "adapters"
    options = ["--steps", 20, "--eval-every", 20, "--sample", 0, "--accumulate", 2]
    said, _ = run(
        "examples/finetune_lora.py", *SMALL, "--base", base, "--export", adapters, *options
    )
    before, after = losses(said)
    assert after < before - 0.1
    trained = 2 * 8 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))  # two layers, of rank 8
    assert f"trains {trained:,} of" in said
    assert figures(r"(\d+) KiB of optimizer", said)[0] == round(8 * trained / 8 / 1024)
    with safe_open(next(adapters.glob("*.safetensors")), framework="np") as file:
        assert len(file.keys()) == 8 and all("lora_" in name for name in file.keys())  # noqa: SIM118


SLOWLY = """
import pathlib, sys, time
sys.path.insert(0, "examples")
import finetune_hf, models_hf, zerojax

write = pathlib.Path.write_text
pathlib.Path.write_text = lambda *args: (time.sleep(2), write(*args))
zerojax.initialize()
args = finetune_hf.parser.parse_args(["--base", sys.argv[1], *sys.argv[2:]])
finetune_hf.make_base(args)
print(f"layers: {models_hf.model_of(args.base).config['n_layer']}")
"""


def test_no_process_reads_the_config_of_a_checkpoint_before_it_is_there(tmp_path, ssh):
    (tmp_path / "program.py").write_text(SLOWLY)
    small = ["--layers", "2", "--dim", "32", "--tokens", "8"]
    program = [tmp_path / "program.py", tmp_path / "base", *small]
    said, _ = run("examples/multihost_ssh.sh", "127.0.0.1 other", *program, **ssh)
    assert said.count("layers: 2") == 2


@pytest.mark.parametrize("shape", [(40,), (1, 40)])  # as tokenizers return them, too
def test_token_ids_are_read_in_one_row(example, tmp_path, shape):
    np.save(tmp_path / "ids.npy", np.arange(40).reshape(shape))
    finetune = example("finetune_hf")
    args = finetune.parser.parse_args(["--data", str(tmp_path / "ids.npy")])
    training, validation = finetune.read_ids(args)
    assert training.tolist() == list(range(36)) and validation.tolist() == list(range(36, 40))


REDUCED = """
import sys
sys.path.insert(0, "examples")
import finetune_lora, jax, numpy as np, zerojax

args = finetune_lora.parser.parse_args(sys.argv[1:])
_, make_state, loss_fn = finetune_lora.with_adapters(args)
plan = zerojax.plan(make_state, stage=args.stage)
text = np.zeros((args.batch, args.tokens + 1), np.int32)
report = zerojax.audit(zerojax.train_step(loss_fn), plan.abstract(), text).check()
for one in report.traffic:
    if one.kind == "reduce-scatter":
        print(*one.paths)
"""


def test_lora_reduces_gradients_of_adapters_alone(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(REDUCED)
    said, _ = run(program, *SMALL)
    assert len(said.split()) == 8 and all("/lora_" in path for path in said.split())


@pytest.mark.slow  # `make examples` runs it for a few steps
def test_convnet_learns():
    said, _ = run("examples/train_convnet.py", "--width", 16, "--steps", 40, "--stage", 2)
    start, end = figures(r"accuracy (\d\.\d+)", said)
    assert start < 0.3 and end > 0.85


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


def test_cifar_10_is_read_and_all_of_its_images_are_scored(example, crops):
    convnet, vit = example("train_convnet"), example("train_vit")
    args = vit.parser.parse_args(["--cifar", str(crops), "--patch", "8"])
    training, validation = convnet.read_images(args)
    assert len(training["label"]) == 2000 and len(validation["label"]) == 300
    record = np.fromfile(crops / "data_batch_3.bin", np.uint8)[7 * 3073 : 8 * 3073]
    image, label = training["image"][807], training["label"][807]
    assert label == record[0] and (image.shape, image.dtype) == ((32, 32, 3), np.float32)
    assert image[5, 9, 2] * 255 == pytest.approx(record[1 + 2 * 1024 + 5 * 32 + 9])

    model = vit.ViT(args.layers, args.dim, args.patch, args.dropout)
    make_state = vit.state_maker(model, validation["image"][:1], args)
    params = jax.eval_shape(make_state).params
    assert params["positions"].shape == (16, args.dim)
    train_loss, _ = vit.losses_of(model)
    batch = next(convnet.batches(training, 8))
    assert jax.eval_shape(train_loss, params, batch, jax.random.key(0))[0].shape == ()

    def eval_loss(params, batch):  # of a model that compiles sooner
        logits = (batch["image"] - 0.4).sum((1, 2)) @ params["w"]
        loss, aux = convnet.scores(logits, batch["label"], batch["real"])
        return loss, {**aux, "real": jnp.mean(batch["real"])}

    params = {"w": np.eye(3, 10, dtype=np.float32)}
    plan = zerojax.plan({"params": params}, stage=3)
    eval_step, state = zerojax.eval_step(eval_loss, plan=plan), plan.place({"params": params})
    accuracy = convnet.accuracy_of(eval_step, state, validation, 128)
    logits = (validation["image"] - 0.4).sum((1, 2)) @ params["w"]
    assert accuracy == pytest.approx(np.mean(logits.argmax(-1) == validation["label"]), abs=1e-6)
    assert 0 < accuracy < 1


def test_a_directory_without_cifar_10_says_where_to_download_it(example, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data_batch_\*.bin. Download .*kriz/cifar.html"):
        example("train_convnet").read_cifar(tmp_path)


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def on_device(tree):
    """The elements that one device has."""
    return sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree))


def same(one, other, atol=0.0):
    pairs = zip(*map(jax.tree.leaves, map(zerojax.gather_params, (one, other))), strict=True)
    return all(np.allclose(a, b, rtol=0, atol=atol) for a, b in pairs)


TEXT = np.random.default_rng(0).integers(0, 256, (16, 9), np.int32)
TINY = ["--layers", "2", "--dim", "32", "--tokens", "8"]


@pytest.mark.slow
def test_dpo_freezes_and_shards_its_reference(example):
    dpo, train_gpt = example("dpo"), example("train_gpt")
    model, args = train_gpt.GPT(2, 32, 8), dpo.parser.parse_args([*TINY, "--lr", "1e-2"])
    plan = zerojax.plan(dpo.state_maker(model, args), stage=3)
    start = plan.place(dpo.state_maker(model, args))
    step = zerojax.train_step(dpo.dpo_loss(model, 0.1), donate=False)
    pairs = TEXT.reshape(8, 2, 9)
    state, metrics = step(start, pairs)
    assert metrics["loss"] == pytest.approx(np.log(2)) and metrics["aux"]["accuracy"] == 0
    assert same(state.params["reference"], start.params["reference"])
    assert not same(state.params["policy"], start.params["policy"])
    assert step(state, pairs)[1]["loss"] < np.log(2) - 0.01
    assert on_device(state.params["reference"]) < size(state.params["reference"]) / 7
    assert size(state.opt_state) < 2 * size(state.params["policy"]) + 10  # two moments, counts
    traffic = zerojax.audit(step, plan.abstract(), pairs, plan=plan).traffic
    reference = [one for one in traffic if any("/reference/" in path for path in one.paths)]
    assert {one.kind for one in reference} == {"all-gather"}
    kernels = [one for one in reference if "params/reference/blocks/up/kernel" in one.paths]
    assert [one.trips for one in kernels] == [2]  # a layer at a time, and not in backward


def test_dpo_pairs_have_one_prompt_and_the_same_words(example):
    text = np.frombuffer(b"a prompt, then some words in their order", np.uint8).astype(np.int32)
    chosen, other = example("dpo").pair(text)
    assert bytes(chosen.astype(np.uint8)) == bytes(text.astype(np.uint8))
    said = bytes(other.astype(np.uint8))
    assert said.startswith(b"a prompt, then some ") and said != bytes(chosen.astype(np.uint8))
    assert sorted(said[20:].split(b" ")) == [b"in", b"order", b"their", b"words"]


def test_the_average_of_the_weights_is_sharded_as_they_are(example):
    tx = optax.chain(optax.sgd(0.5), example("diffusion").average_of_params(0.9))
    params = {"w": jnp.ones((16, 8)), "stack": jnp.ones((3, 8, 8))}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state = zerojax.shard_train_state(state, stage=3)
    loss_fn = lambda params, x: jnp.mean(x @ params["w"]) + jnp.mean(params["stack"] ** 2)
    state, _ = zerojax.train_step(loss_fn)(state, np.ones((8, 16), np.float32))
    ema = state.opt_state[-1]
    assert same(ema, jax.tree.map(lambda new: 0.9 + 0.1 * new, state.params), atol=1e-7)
    assert [leaf.sharding for leaf in ema.values()] == [p.sharding for p in state.params.values()]
    assert on_device(ema) == size(ema) / 8


def test_relora_merges_without_a_change_and_forgets(example):
    relora = example("relora")
    args = relora.parser.parse_args(TINY)
    tx = relora.restarting(optax.scale_by_adam(), 3)
    model, make_state, _ = relora.with_adapters(args, tx)
    plan = zerojax.plan(make_state, stage=3)
    state = plan.place(make_state)
    nonzero = lambda path, leaf: leaf + 0.1 if "lora_b" in jax.tree_util.keystr(path) else leaf
    state = state.replace(params=jax.tree_util.tree_map_with_path(nonzero, state.params))
    before = zerojax.gather_params(state.params)
    after = relora.merge_step(plan)(state, jax.random.key(1)).params
    assert on_device(after) < size(after) / 7
    after = zerojax.gather_params(after)
    up = lambda params: params["blocks"]["up"]
    assert np.abs(up(after)["kernel"] - up(before)["kernel"]).max() > 0.01
    assert not up(after)["lora_b"]["kernel"].any()
    assert np.abs(up(after)["lora_a"]["kernel"] - up(before)["lora_a"]["kernel"]).max() > 0.1
    run = jax.jit(lambda params: model.apply({"params": params}, TEXT[:, :-1]))
    np.testing.assert_allclose(run(after), run(before), atol=1e-5)
    moments, seen = tx.init(jnp.ones(4)), []
    for n in range(4):
        update, moments = tx.update(jnp.arange(4.0) + n, moments)
        seen.append(update)
    assert np.allclose(seen[3], 1, atol=1e-5)  # Adam's first update is the sign
    assert not np.allclose(seen[2], 1, atol=1e-5)


def test_mezo_steps_the_same_on_one_device(example):
    """Along a normal direction, times the slope; each of 8 devices has its shards of the state."""
    mezo = example("mezo")
    make_state = lambda: {"params": {"w": jnp.eye(64), "out": jnp.ones((64, 8)) / 8}}
    loss_fn = lambda params, x: jnp.mean((jnp.tanh(x @ params["w"]) @ params["out"] - 1) ** 2)
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    states = []
    for devices in (1, 8):
        mesh = Mesh(jax.devices()[:devices], ("data",))
        plan = zerojax.plan(make_state, stage=3, mesh=mesh)
        step = mezo.mezo_step(loss_fn, plan, lr=1e-2, eps=1e-2)
        state = plan.place(make_state)
        states.append(step(state, zerojax.shard_batch(x, mesh=mesh), jax.random.key(3)))
    (alone, _), (state, metrics) = states
    assert same(alone, state, atol=1e-5)
    assert on_device(state) == size(state) / 8
    params = zerojax.gather_params(state)
    along = params["w"] - np.eye(64)
    assert np.std(along) == pytest.approx(1e-2 * abs(float(metrics["slope"][0])), rel=0.05)
    assert loss_fn(params, x) < loss_fn(make_state()["params"], x)


def test_muon_by_layer_is_optax_s_for_the_flops_of_a_share(example):
    """Of two stacks of three layers, no device orthogonalizes more than one layer."""
    muon = example("muon")
    mesh = Mesh(jax.devices(), ("data",))
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"up": (3, 32, 64), "down": (3, 64, 32), "head": (32, 8)}
    params = {
        name: jax.random.normal(key, shape) / 8
        for (name, shape), key in zip(params.items(), keys, strict=True)
    }

    def loss_fn(params, x):
        layer = lambda x, p: (x + jnp.tanh(x @ p[0]) @ p[1], None)
        x, _ = jax.lax.scan(layer, x, (params["up"], params["down"]))
        return jnp.mean((x @ params["head"]) ** 2)

    x = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    state = TrainState.create(apply_fn=None, params=params, tx=muon.optax_muon(0.1))
    alone = jax.jit(
        lambda state, x: state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x))
    )
    sharded = TrainState.create(apply_fn=None, params=params, tx=muon.muon(0.1, mesh))
    plan = zerojax.plan(sharded, stage=3, mesh=mesh)
    sharded, step = plan.place(sharded), zerojax.train_step(loss_fn)
    compiled = step.lower(sharded, x).compile()
    flops = [made.cost_analysis()["flops"] for made in (compiled, alone.lower(state, x).compile())]
    assert flops[0] < 0.4 * flops[1]
    report = zerojax.audit(compiled, plan=plan).check()
    exchanges = [one for one in report.traffic if one.kind == "all-to-all"]
    assert len(exchanges) == 8  # momentum and gradient of two stacks, there and back
    assert on_device(sharded.opt_state) < size(sharded.opt_state) / 3
    for _ in range(2):
        state, (sharded, _) = alone(state, x), step(sharded, x)
    assert same(state.params, sharded.params, atol=2e-4)


@pytest.mark.parametrize("script", ["nnx_loop", "equinox_loop"])
@pytest.mark.slow  # `make examples` runs both for a few steps
def test_loop_learns_and_goes_on_at_another_stage(script, tmp_path):
    small = ["--layers=2", "--dim=32", "--tokens=16", "--batch=16", "--lr=2e-2"]
    program = [f"examples/{script}.py", *small, "--save-every=10", "--checkpoints", tmp_path]
    first, _ = run(*program, "--steps", 10)
    assert "1 process, 8 devices" in first and "starts from scratch" in first
    assert re.search(r"up-projections .*\((2, 4, 128|2, 16, 32)\) a device", first)
    more, bar = run(*program, "--steps", 100, "--stage", 1, "--accumulate", 2)
    assert "goes on from step 10" in more
    assert losses(first)[-1] < 5.4  # ln 256, nothing learned, is 5.5
    assert losses(more)[-1] < 2.9  # the bytes' frequencies alone give 3.2
    # The loss of one small batch, of another text with each version of Python.
    assert re.search(r"100/100 .*loss=[23]\.\d+, .*tokens/s=[\d,]+, memory=\d+\.\d [KM]iB", bar)
    assert re.search(r"up-projections .*\((2, 32, 128|2, 128, 32)\) a device", more)


@pytest.mark.slow
def test_stages_compare_as_zero_says():
    said, _ = run("examples/compare_stages.py", *SMALL, "--steps", 1)
    table = [line.split() for line in said.splitlines() if re.match(r" +[0-3]  ", line)]
    params, optimizer, state, peak = (
        [float(row[column]) for row in table] for column in range(1, 5)
    )
    assert params[0] == params[1] == params[2] == pytest.approx(8 * params[3], rel=0.1)
    assert optimizer[0] == pytest.approx(8 * optimizer[1], rel=0.1)
    assert optimizer[1] == optimizer[2] == optimizer[3]
    assert state[0] == pytest.approx(params[0] + optimizer[0], abs=0.02)
    assert peak[0] > peak[1] > peak[3] > state[3]
    # Two layers' gradients, each in its loop, and those of the rest.
    assert table[0][5:] == ["3", "x,", table[0][7], "-", "-", "1.00", "x"]


@pytest.mark.slow
@pytest.mark.parametrize("script", ON_TWO_AXES)
def test_on_two_axes_the_step_is_that_of_one_device(script):
    """They raise where it is not; `make examples` runs all."""
    said, _ = run(f"examples/{script}.py", *SMALL, "--batch", 16, "--steps", 1)
    assert "as on one device" in said
    assert ON_TWO_AXES[script] <= set(re.findall(r"[a-z-]+ over \w+", said))


@pytest.mark.slow
def test_ragged_experts_with_rooms_for_all_are_the_batched_ones(example):
    """Losses and gradients, with two experts a device, whose weights stay there."""
    moe = example("mixture_of_experts")
    small = [*TINY, "--experts", "4", "--room", "4"]
    text = np.random.default_rng(0).integers(0, 256, (16, 9), np.int32)
    mesh = zerojax.mesh(data=-1, expert=2)

    def stepped(*options):
        args = moe.parser.parse_args([*small, *options])

        def make_state():
            params = moe.init_experts(jax.random.key(0), args)
            return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))

        plan = zerojax.plan(make_state, stage=3, mesh=mesh, overrides=moe.OVERRIDES)
        state, batch = plan.place(make_state), zerojax.shard_batch(text, plan=plan)
        step = zerojax.train_step(functools.partial(moe.loss_fn, args=args))
        compiled = step.lower(state, batch).compile()
        traffic = zerojax.audit(compiled, plan=plan).traffic
        sent = [(one.kind, one.axes) for one in traffic if "params/blocks/up" in one.paths]
        return *compiled(state, batch), sent

    (batched, metrics, sent), (ragged, its, its_sent) = stepped(), stepped("--ragged")
    assert metrics["aux"]["seated"] == its["aux"]["seated"] == 1
    assert float(metrics["loss"]) == pytest.approx(float(its["loss"]), abs=1e-6)
    assert same(batched.params, ragged.params, atol=1e-6)
    assert sorted(sent) == sorted(its_sent)
    assert all(axes == ("data",) for kind, axes in its_sent if kind == "all-gather")


@pytest.mark.slow
@pytest.mark.parametrize("script", ON_TWO_AXES)
def test_on_two_axes_they_reach_their_stated_loss(script):
    said, _ = run(f"examples/{script}.py", timeout=3600)
    assert losses(said)[-1] < (2.6 if script == "mixture_of_experts" else 2.4)


@pytest.mark.slow
def test_gpt_reaches_its_stated_loss():
    said, _ = run("examples/train_gpt.py", timeout=3600)
    assert losses(said)[-1] < 1.5


@pytest.mark.slow
def test_convnet_reaches_its_stated_accuracy():
    said, _ = run("examples/train_convnet.py", timeout=3600)
    assert figures(r"accuracy (\d\.\d+)", said)[-1] > 0.98


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("train_vit", ["--steps", 100, "--patch", 8]),
        ("train_convnet", ["--steps", 60, "--width", 8]),
    ],
)
def test_they_tell_photographs_apart_as_of_cifar_10(script, options, crops):
    said, _ = run(f"examples/{script}.py", "--cifar", crops, *options, timeout=3600)
    found = figures(r"accuracy (\d+\.\d+)", said)[-1]
    assert found > {"train_vit": 90, "train_convnet": 0.9}[script]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "pattern", "least"),
    [
        ("train_vit", r"accuracy (\d+\.\d+)%", 97),
        ("diffusion", r"(\d+\.\d+)% of 160 drawn", 90),
        ("dpo", r"of unseen pairs (\d+\.\d+)% right", 90),
    ],
)
def test_methods_reach_what_they_state(script, pattern, least):
    said, _ = run(f"examples/{script}.py", timeout=3600)
    assert figures(pattern, said)[-1] > least


@pytest.mark.slow
def test_relora_resumes_and_restarts_as_if_undisturbed(tmp_path):
    args = ["examples/relora.py", *SMALL, "--base", tmp_path / "base", "--restart-every", 2]
    saving = ["--checkpoints", tmp_path / "run", "--save-every", 3, "--steps", 5]
    whole, _ = run(*args, *saving)
    shutil.rmtree(tmp_path / "run" / "5")  # as if it had not come to its end
    resumed, _ = run(*args, *saving)
    assert "goes on from step 3" in resumed
    # Before the restart at step 4, after its merge, and at the end.
    assert losses(resumed) == losses(whole)[-3:]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "stated"), [("relora", 2.05), ("muon", 2.4)])
def test_methods_reach_their_stated_losses(script, stated):
    said, _ = run(f"examples/{script}.py", timeout=3600)
    assert losses(said)[-1] < stated


@pytest.mark.slow
def test_muon_costs_what_its_docstring_says():
    said, _ = run("examples/muon.py", "--compare", "--steps", 0)
    rows = re.findall(r"^(.*\w) {2,}(\d+\.\d+) +(\d+\.\d+) \(", said, flags=re.MULTILINE)
    close = functools.partial(pytest.approx, rel=0.05)
    assert {name: (float(gflop), float(mib)) for name, gflop, mib in rows} == {
        "Adam, stage 3": close((0.47, 16.2)),
        "Muon, data parallel": close((5.21, 10.8)),
        "Muon, stage 3": close((1.21, 62.1)),
        "Muon by layer, stage 3": close((1.09, 18.8)),
    }


@pytest.mark.slow
def test_mezo_reaches_its_stated_loss_with_the_memory_of_evaluation():
    said, _ = run("examples/mezo.py", timeout=3600)
    assert losses(said)[-1] < 2.3
    (evaluation,) = figures(r"evaluation (\d+\.\d+) MiB", said)
    mezo, adam = figures(r"(?:MeZO|Adam) (\d+\.\d+)", said)
    assert mezo == pytest.approx(evaluation, rel=0.02)
    assert mezo == pytest.approx(3.6, rel=0.05) and adam == pytest.approx(14.9, rel=0.05)


@pytest.mark.slow
def test_hugging_face_s_gpt_2_reaches_its_stated_loss(tmp_path):
    said, _ = run("examples/finetune_hf.py", "--base", tmp_path / "base", timeout=3600)
    start, *_, end = losses(said)
    assert start > 5.5 and end < 2.4


@pytest.mark.slow
@pytest.mark.parametrize(("script", "stated"), [("nnx_loop", 2.4), ("equinox_loop", 2.3)])
def test_loops_reach_their_stated_losses(script, stated):
    said, _ = run(f"examples/{script}.py", timeout=3600)
    assert losses(said)[-1] < stated


@pytest.mark.slow
def test_lora_trains_its_own_base_and_reaches_its_stated_loss(tmp_path):
    said, _ = run("examples/finetune_lora.py", "--base", tmp_path / "base", timeout=3600)
    before, *_, after = losses(said.split("trains")[1])
    assert before > 2.1 and after < 1.95
