"""The house: what a plain step enters, what overrides what, and which features can be deleted."""

import functools
import pathlib
import re
import shutil

import pytest

from tests import house
from tests.mutants import table
from tests.support.processes import ROOT, python

SOURCES = house.sources()
DELETED = pathlib.Path(__file__).with_name("deleted.diff")
EXPERTS = ["_passes/experts.py", "_passes/trips.py", "_passes/rooms.py"]
FEATURES = {
    "layered": ["_passes/layered.py"],
    "rolled": ["_passes/rolled.py", "_passes/runs.py"],
    "sequences": [
        *("_passes/sequences.py", "_passes/mixing.py", "_passes/control.py", "_passes/kernels.py"),
        *("_passes/block_runner.py", "_passes/blocks.py"),
        *EXPERTS,
    ],
    "experts": EXPERTS,
    "tables": ["_passes/tables.py"],
    "activations": ["_features/activations.py"],
}
GOES_WITH = {"sequences": "experts"}  # whose rows run by the rules for sequences
PLAIN = """
import sys

import jax, jax.numpy as jnp, optax
from flax.training.train_state import TrainState

import zerojax

entered, deep = set(), []
all_gather = jax.lax.all_gather


def file_of(frame):
    _, _, file = frame.f_code.co_filename.rpartition("/zerojax/")
    return file if frame.f_code.co_filename.endswith(f"/zerojax/{file}") and file else ""


def enter(frame, event, _):
    if event == "call" and "/zerojax/" in frame.f_code.co_filename:
        entered.add(file_of(frame))


def counted(*args, **named):
    frame, frames = sys._getframe(1), 0
    while frame:
        frames += "/zerojax/" in frame.f_code.co_filename
        frame = frame.f_back
    deep.append(frames)
    return all_gather(*args, **named)


def loss(params, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


params, tx = {"w": jnp.ones((3, 16, 16))}, optax.adam(1e-3)
state = TrainState.create(apply_fn=None, params=params, tx=tx)
state = zerojax.shard_train_state(state, stage=3)
step = zerojax.train_step(loss)
jax.lax.all_gather = counted
sys.setprofile(enter)
state, metrics = step(state, jnp.ones((8, 16)))
sys.setprofile(None)
print(*sorted(entered), sep="\\n")
print(min(deep), float(metrics["loss"]))
"""


@functools.cache
def plain(**settings):
    """The files that a plain step enters, the frames above its first all-gather, its loss."""
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", **settings}
    code, printed, error = python(PLAIN, **settings)
    assert code == 0, error
    *files, last = printed.splitlines()
    frames, loss = last.split()
    return files, int(frames), float(loss)


def test_a_plain_step_enters_few_files():
    files, frames, _ = plain()
    assert len(files) <= 48, files
    assert not [file for file in files if file.startswith("_update/")]
    passes = {file for file in files if file.startswith("_passes/")}
    assert not passes & {"_passes/layered.py", "_passes/runs.py", "_passes/codes.py"}
    assert frames <= 21  # Python 3.11 has frames for comprehensions


def test_the_kernel_gives_few_names():
    names = house.names_from_kernel(SOURCES)
    assert "places.LeafPlan" in names and len(names) <= 30, sorted(names)


def test_no_class_overrides_a_method_of_another_package():
    assert house.overrides(
        {"_a.x": "class A:\n def f(self): pass", "_b.y": "class B(A):\n def f(self): pass"}
    )
    assert not house.overrides(SOURCES)


def test_one_file_knows_of_a_feature():
    imports = house.imports({k: v for k, v in SOURCES.items() if "__init__" not in k})
    for feature, files in FEATURES.items():
        own = {file.replace("/", ".").removesuffix(".py") for file in files}
        knows = [name for name, others in imports.items() if name not in own and others & own]
        assert len(knows) == 1, (feature, knows)


@pytest.mark.ci
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_can_be_deleted(feature, tmp_path):
    """With its file and the lines of tests/deleted.diff: a plain step stays as it was."""
    shutil.copytree(ROOT / "zerojax", tmp_path / "zerojax")
    for file in FEATURES[feature]:
        (tmp_path / "zerojax" / file).unlink()
    blocks = re.split(r"^(?=# )", DELETED.read_text(), flags=re.M)[1:]
    for each in map(table.parsed, blocks):
        if each.name in (feature, GOES_WITH.get(feature)):
            path = tmp_path / each.file
            path.write_text(each.applied(path.read_text()))
    assert plain(PYTHONPATH=str(tmp_path), PYTHONSAFEPATH="1")[2] == plain()[2]
