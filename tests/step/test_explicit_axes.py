"""Meshes of Explicit axes, as `jax.make_mesh` makes them: types, numbers and programs."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.families import BATCH, FAMILIES
from tests.reference import assert_close

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS = np.linspace(-1, 1, 16 * 60, dtype="f").reshape(16, 60)


def types(tree):
    return [str(jax.typeof(leaf)).lstrip("~") for leaf in jax.tree.leaves(tree)]


def make():
    params = {f"b{n}": {"w": jnp.ones((60, 60)) / 60} for n in range(3)} | {"v": jnp.ones(64)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.contrib.muon(1e-2))


def loss(params, x):
    for n in range(3):
        x = jax.checkpoint(lambda x, p: x + jnp.tanh(x @ p["w"]))(x, params[f"b{n}"])
    return jnp.mean(x**2) * jnp.mean(params["v"])


def trained(mesh, stage, make, loss, batch, steps=2, **options):
    """What a loop has at its end, with the types of its state before it, and the program."""
    state = zerojax.shard_train_state(make, stage=stage, mesh=mesh, min_shard_size=1)
    before, batch = types(state), zerojax.shard_batch(batch, plan=state)
    step = zerojax.train_step(loss, **options)
    text = step.lower(state, batch).compile().as_text()
    for _ in range(steps):
        old, (state, metrics) = state, step(state, batch)
    assert jax.tree.leaves(old.params)[0].is_deleted() and step._cache_size() == 1
    return state, metrics, before, sorted(re.findall(r" = \S+ ([\w-]+)\(", text))


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_keeps_its_types_and_a_step_its_program(stage, is_set):
    """60 rests padded as 64 at stage 3. Muon's update does not run on Explicit axes."""
    found = []
    for kind in (AUTO, EXPLICIT):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            state, metrics, before, ops = trained(mesh, stage, make, loss, ROWS, accumulate=2)
            assert types(state) == before
            evaluated = zerojax.eval_step(loss)(state, ROWS)["loss"]
            found.append((metrics, zerojax.full_params(state), evaluated, ops))
        in_type = "@data" in str(jax.typeof(state.params["b0"]["w"]))
        assert in_type == (kind == EXPLICIT and stage == 3)
        assert state.params["v"].sharding.mesh.axis_types == (kind,)
    assert found[0][-1] == found[1][-1], "the programs have other operations"
    assert_close(found[0][:-1], found[1][:-1], 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_explicit_axes(name):
    family = FAMILIES[name]()
    if family.mesh:
        pytest.skip("its mesh has an axis of its own")
    found = []
    for kind in (AUTO, EXPLICIT):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
        state, metrics, before, _ = trained(mesh, 3, family.make, family.loss, BATCH, 1)
        assert types(state) == before
        found.append((metrics, zerojax.full_params(state)))
    assert_close(*found, 0)


def test_a_model_of_nnx_keeps_its_types():
    def make():
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    found = []
    for kind in (AUTO, EXPLICIT):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        model, optimizer = zerojax.nnx.shard(make, stage=3, mesh=mesh, min_shard_size=1)
        before = types(nnx.state((model, optimizer)))
        step = zerojax.nnx.train_step(lambda model, x: jnp.mean(model(x) ** 2))
        metrics = [step(model, optimizer, np.ones((16, 64), "f")) for _ in range(2)]
        assert types(nnx.state((model, optimizer))) == before
        assert ("@data" in str(before)) == (kind == EXPLICIT)
        found.append((metrics, np.asarray(model.kernel.get_value())))
    assert_close(*found, 0)


def test_a_loop_by_hand_and_a_checkpoint_keep_types(tmp_path):
    """`value_and_grad`, `plan.scatter` and `plan.constrain` in a user's own `jax.jit`."""
    found = []
    for kind in (AUTO, EXPLICIT):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        state = zerojax.shard_train_state(make, stage=3, mesh=mesh)
        plan, before = state.tx.plan, types(state)

        @jax.jit
        def step(state, x, plan=plan):
            value, grads = zerojax.value_and_grad(loss, plan)(state.params, x)
            new = plan.scatter(state).apply_gradients(grads=plan.logical_grads(grads))
            return plan.constrain(new, into=state), value, grads

        state, value, grads = step(state, ROWS)
        assert types(state) == before
        assert types(grads) == types(state.params)
        zerojax.save(tmp_path / kind.name, state)
        restored = zerojax.restore(tmp_path / kind.name, like=state)
        assert types(restored) == before
        assert zerojax.verify(zerojax.train_step(loss), state, ROWS)
        found.append((value, zerojax.full_params(restored)))
    assert_close(*found, 0)


def test_a_batch_and_keys_of_explicit_axes():
    """Their types come from arrays on another mesh, of the same devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(EXPLICIT,))
    placed = jax.device_put(ROWS, NamedSharding(mesh, P("data")))
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh, P()))

    def noisy(params, x, key):
        return loss(params, x + jax.random.normal(key, x.shape[1:]))

    found = []
    for batch, rng in ((ROWS, jax.random.key(0)), (placed, key)):
        state = zerojax.shard_train_state(make, stage=3)
        found.append(zerojax.train_step(noisy)(state, batch, rng)[1])
    assert_close(*found, 0)
