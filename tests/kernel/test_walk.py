"""CONTRIBUTING's selection of what one weight passes in a step: entered in its order."""

import re

from tests.support.processes import ROOT, python

STATION = re.compile(r"^\d+\. `(\w+/\w+\.py): (\w+)`", re.MULTILINE)
PROGRAM = """
import sys

import jax, jax.numpy as jnp, optax
from flax.training.train_state import TrainState

import zerojax

entered = {}


def enter(frame, event, _):
    file, code = frame.f_code.co_filename, frame.f_code.co_name
    if event == "call" and "/zerojax/_" in file:
        entered.setdefault((file.rpartition("/zerojax/")[2], code))


def loss(params, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0] ** 2)


tx = optax.adam(1e-3)
state = TrainState.create(apply_fn=None, params={"w": jnp.ones((3, 16, 16))}, tx=tx)
sys.setprofile(enter)
state = zerojax.shard_train_state(state, stage=3)
step = zerojax.train_step(loss, schedule=zerojax.Schedule(prefetch=True))
step(state, jnp.ones((8, 16)))
sys.setprofile(None)
for file, code in entered:
    print(file, code)
"""


def test_a_step_enters_the_files_of_the_walk_in_its_order():
    stations = STATION.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len({file for file, _ in stations}) >= 10
    code, printed, error = python(PROGRAM, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert code == 0, error
    entered = [tuple(line.split()) for line in printed.splitlines()]
    assert set(stations) <= set(entered)
    assert sorted(stations, key=entered.index) == stations
