"""The batch replayed on one device, part by part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import zerojax
from tests.conftest import make_mesh
from tests.models import mlp
from tests.reference import make_state
from tests.verify.steps import ADAM, MASKED, W, X, masked_loss, placed, squares
from zerojax._verify import replay as _replay


def test_parts_are_replayed_one_at_a_time_unless_they_speak_to_each_other(monkeypatch):
    seen = []
    for name in ("_one_by_one", "_all_at_once"):
        run = getattr(_replay, name)
        monkeypatch.setattr(
            _replay, name, lambda *a, run=run, name=name: seen.append(name) or run(*a)
        )
    for mean in (jnp.mean, zerojax.mean):
        loss = jax.checkpoint(functools.partial(masked_loss, mean=mean))
        _replay.evaluate(loss, W, (MASKED,), _replay.BatchSplit({"data": 8}, 1))
    assert seen == ["_one_by_one", "_all_at_once"]


def test_replay_on_two_axes_numbers_the_parts_as_the_mesh_does():
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 4), ("a", "b"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )  # fmt: skip
    state = placed(W, mesh=mesh, axis=("a", "b"))

    def loss(params, x, rng):
        weight = 1 + lax.axis_index("b") + 4 * lax.axis_index("a") + jax.random.uniform(rng)
        return weight * squares(params, x).mean()

    step, key = zerojax.train_step(loss), jax.random.key(5)
    report = zerojax.verify(step, state, X, key, whole_batch=False)
    assert report.ok, report


def test_one_device_passes():
    state = zerojax.shard_train_state(make_state(mlp(False), ADAM), 3, mesh=make_mesh(1))
    assert zerojax.verify(zerojax.train_step(mlp(False).loss), state, mlp(False).batch).ok


def test_meshes_take_turns():
    """JAX remembers calls inside of a loss with the mesh that they were traced for."""
    test_replay_on_two_axes_numbers_the_parts_as_the_mesh_does()
    test_one_device_passes()
