"""What starts a program on several hosts: the files `examples/multihost_*`."""

import json
import os
import subprocess
import time

import jax
import pytest
import yaml

import zerojax
from tests.support.processes import ROOT, output, ssh, stub

HOSTS = "127.0.0.1 other"


def test_ssh_hands_hosts_port_and_arguments_to_the_other_shell_as_they_are(tmp_path):
    program = tmp_path / "a program.py"
    names = ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"]
    values = f"[*map(os.getenv, {names}), *sys.argv[1:]]"
    program.write_text(
        f"import os, sys\nos.write(1, str({values}).encode() + b'\\n')"  # in one piece
    )
    hosts, env = "me@$(date);a\n-oB", ssh(tmp_path / "bin") | {"PORT": "1;exit"}
    said, _ = output("examples/multihost_ssh.sh", hosts, program, "a  b", "$HOME", **env)
    assert said == f"{['$(date);a', '1;exit', '2', 'a  b', '$HOME']}\n" * 2
    _, said = output("examples/multihost_ssh.sh", "", program, code=1, **env)
    assert 'the hosts are missing, as in "host1 host2"' in said


def test_ssh_ends_all_when_one_host_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, time\nif os.environ['RANK'] == '1': exit(3)\ntime.sleep(30)")
    started = time.monotonic()
    output("examples/multihost_ssh.sh", HOSTS, program, code=3, **ssh(tmp_path / "bin"))
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("code", [0, 1, 143])
def test_slurm_requeues_what_was_saved_before_its_end(tmp_path, code):
    env = stub(tmp_path / "bin", "srun", 'shift; exec "$@"')
    stub(tmp_path / "bin", "scontrol", f'echo "$@" > {tmp_path}/asked')
    program, asked = tmp_path / "program.py", tmp_path / "asked"
    program.write_text(f"raise SystemExit({code})")
    output("examples/multihost_slurm.sh", program, code=code, SLURM_JOB_ID="17", **env)
    assert asked.exists() == (code == 143)
    assert code != 143 or asked.read_text() == "requeue 17\n"


RAY = """import sys
from unittest import mock

def trainer(work, train_loop_config, scaling_config, **rest):
    print(scaling_config["num_workers"], scaling_config["resources_per_worker"])
    return mock.Mock(fit=lambda: work(train_loop_config))

sys.modules["ray.train"] = mock.Mock(ScalingConfig=dict)
sys.modules["ray.train.v2.jax"] = mock.Mock(JaxTrainer=trainer)
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
    said, _ = output(tmp_path / "ray.py", "--hosts", 2, "--gpus", 8, program, "--steps", 3)
    assert said == "2 {'GPU': 8}\n__main__ found --steps 3\n"


# -- manifests, started here as their services start them

TOLD = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))"


def jobset_pods():
    """As Kubernetes starts them: names by DNS, the index from the annotation, then the command."""
    jobset = yaml.safe_load((ROOT / "examples/multihost_jobset.yaml").read_text())
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
    values = {name: one["value"] for name, one in env.items() if "value" in one}
    return [(container["command"], {**values, "RANK": str(rank)}) for rank in range(count)]


def skypilot_nodes():
    task = yaml.safe_load((ROOT / "examples/multihost_skypilot.yaml").read_text())
    assert task["num_nodes"] == 2 and task["envs"] == {"CHECKPOINTS": None}
    values = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_NODES": "2"}
    values |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "CHECKPOINTS": "/a b"}
    nodes = [{**values, "SKYPILOT_NODE_RANK": str(rank)} for rank in range(2)]
    return [(["bash", "-c", task["run"]], node) for node in nodes]


@pytest.mark.parametrize(
    ("hosts", "address", "directory"),
    [
        (jobset_pods, "zerojax-hosts-0-0.zerojax:29500", "/shared/gpt"),
        (skypilot_nodes, "10.0.0.1:29500", "/a b"),
    ],
)
def test_manifests_join_their_hosts(hosts, address, directory, tmp_path, monkeypatch):
    """With the variables that they set, `zerojax.initialize` joins the processes of one run."""
    (tmp_path / "program.py").write_text(TOLD)
    script = f'exec "$PYTHON" {tmp_path}/program.py "$@"'
    common = os.environ | stub(tmp_path / "bin", "python", script)
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **asked: joined.append(asked))
    for arguments, env in hosts():
        said = subprocess.run(arguments, env=common | env, stdout=subprocess.PIPE, check=True)
        options, variables = json.loads(said.stdout)
        assert options == ["-u", "examples/train_gpt.py", "--checkpoints", directory]
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            zerojax.initialize()
    who = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    wanted = [(address, 2, rank, None) for rank in range(2)]
    assert [tuple(map(asked.get, who)) for asked in joined] == wanted
