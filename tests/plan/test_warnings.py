"""What a user is warned of once in a process, seen in one of its own."""

import re
import sys

from tests.support.processes import python

PROGRAM = """
import warnings

import jax

jax.config.update("jax_num_cpu_devices", 6)

import flax.linen as nn
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax

W = np.arange(257 * 5, dtype="f").reshape(257, 5)
six = zerojax.mesh(data=6)
one = jax.sharding.Mesh(six.devices[:1], six.axis_names, axis_types=six.axis_types)


def state(apply_fn=None):
    params = {"w": W, "v": W}
    return TrainState.create(apply_fn=apply_fn, params=params, tx=optax.sgd(0.1, 0.9))


def rounded(**options):
    zerojax.plan(state(), mesh=six, precision=zerojax.Precision(**options))


def alone(stage):
    return zerojax.plan({"params": {"w": W}}, stage=stage)


warnings.simplefilter("error")  # who needs no help is not warned
zerojax.shard_train_state(state(nn.Dense(5).apply), mesh=six)  # Flax's error has a note
apply = jax.tree_util.Partial(lambda params, x: x @ params.T, jax.numpy.asarray(W))
zerojax.shard_train_state(zerojax.ModuleState.create(apply, optax.sgd(0.1)), mesh=six)
zerojax.shard_train_state(state(), stage=2, mesh=six)
zerojax.shard_train_state(state(), mesh=one)
zerojax.shard_train_state(state(), mesh=six, pad=False)
rounded(param="bfloat16", master="float32")
rounded(compute="bfloat16")
rounded(param="float32")

warnings.simplefilter("always")
warnings.showwarning = lambda text, kind, file, *_: print(file, kind.__name__, text)
for _ in range(2):
    zerojax.shard_train_state(state(), mesh=six)
    rounded(param="bfloat16")
devices = jax.devices()[:1]
jax.devices = lambda: devices
for stage in (0, 1, 3, 3):
    plan = alone(stage)
assert "sharded: nothing" in str(plan)
"""
SAID = (
    r"[wv] has the shape \(257, 5\) and is stored padded as \(258, 5\), because 6 devices do not "
    r"divide 257 \(1 more array is padded too\).*zerojax\.unpad\(state\), or .*pad=False",
    r"param='bfloat16'\) without master= rounds .*master='float32', .* FSDP2's .* does: "
    r"Precision\(compute='bfloat16'",
    r"one cpu device, so a stage shards nothing.*'jax_num_cpu_devices', 8\).*mesh=",
)


# On Python 3.11 warnings point into zerojax: see `_warn.py`.
WHERE = r"<string>" if sys.version_info >= (3, 12) else r"\S+/zerojax/\S+"


def test_it_is_said_once_of_the_users_line():
    code, said, error = python(PROGRAM)
    assert code == 0, error
    for line, wanted in zip(said.splitlines(), SAID, strict=True):
        assert re.match(rf"{WHERE} UserWarning ", line) and re.search(wanted, line)


def test_of_a_state_without_an_optimizer_the_plan_is_named_too():
    program = """import jax
jax.config.update("jax_num_cpu_devices", 6)
import numpy, zerojax
zerojax.shard_train_state(({"w": numpy.ones((257, 5), "f")}, ()))"""
    code, _, said = python(program)
    assert code == 0 and re.search(r"UserWarning: 0/w has.*zerojax\.unpad\(state, plan\)", said)
