"""Optimizers of whole matrices, each run by the device that owns the matrix."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.forecast import fakes
from tests.support.reference import assert_close, train_state
from tests.support.schedules import train_step
from zerojax.manual import by_matrix


class SoapState(NamedTuple):
    count: jax.Array
    sides: tuple[jax.Array, jax.Array]  # Shampoo's, (in, in) and (out, out)
    bases: tuple[jax.Array, jax.Array]
    mu: jax.Array
    nu: jax.Array


def soap(decay=0.9, eps=1e-2, every=2):
    """Adam in bases that follow, by steps of a power iteration, the eigenvectors of Shampoo's."""

    def init(w):
        sides = tuple(0.1 * jnp.eye(n) for n in w.shape)
        zeros = jnp.zeros_like(w)
        return SoapState(jnp.int32(0), sides, tuple(map(jnp.eye, w.shape)), zeros, zeros)

    def update(g, old, w=None):
        mixed = lambda old, new: decay * old + (1 - decay) * new
        sides = mixed(old.sides[0], g @ g.T), mixed(old.sides[1], g.T @ g)
        turned = lambda: tuple(
            jnp.linalg.qr(s @ b)[0] for s, b in zip(sides, old.bases, strict=True)
        )
        left, right = bases = jax.lax.cond(old.count % every == 0, turned, lambda: old.bases)
        mu, nu = mixed(old.mu, g), mixed(old.nu, (left.T @ g @ right) ** 2)
        step = left @ (left.T @ mu @ right / (jnp.sqrt(nu) + eps)) @ right.T
        return -0.02 * step, SoapState(old.count + 1, sides, bases, mu, nu)

    return optax.GradientTransformation(init, update)


def normalized(decay=0.9):
    """Each matrix has a scalar of its own, and decays."""

    def update(g, norm, w=None):
        norm = decay * norm + (1 - decay) * jnp.linalg.norm(g)
        return -0.05 * g / norm - 0.01 * w, norm

    return optax.GradientTransformation(lambda w: jnp.float32(1), update)


TX = {"muon": optax.contrib.muon(0.05), "soap": soap(), "normalized": normalized()}


def one_by_one(tx):
    each = lambda x: x.reshape(-1, *x.shape[-2:])

    def init(params):
        return [[tx.init(w) for w in each(stack)] for stack in jax.tree.leaves(params)]

    def update(grads, states, params):
        flat, treedef = jax.tree.flatten(grads)
        for k, (g, w) in enumerate(zip(flat, jax.tree.leaves(params), strict=True)):
            new = [tx.update(*one) for one in zip(each(g), states[k], each(w), strict=True)]
            flat[k] = jnp.stack([step for step, _ in new]).reshape(g.shape)
            states[k] = [state for _, state in new]
        return treedef.unflatten(flat), states

    return optax.GradientTransformation(init, update)


def with_others(tx):
    """Clipped by the norm of all; vectors are Adam's."""
    labels = lambda params: jax.tree.map(lambda w: "tx" if w.ndim > 1 else "adam", params)
    parts = optax.partition({"tx": tx, "adam": optax.adam(1e-2, eps=1e-3)}, labels)
    return optax.chain(optax.clip_by_global_norm(0.5), parts)


def layer(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    return jnp.mean((x * params["scale"] - 1) ** 2)


def looped(params, x):
    for p in params["layers"]:
        x = jax.checkpoint(layer)(x, p)
    return jnp.mean((x * params["scale"] - 1) ** 2)


def model(kind, count, rows, columns):
    """Returns parameters, a loss, and a batch."""
    draw = np.random.default_rng(0)
    normal = lambda *shape: draw.normal(size=shape).astype("f") / 5
    stacks = {"down": normal(count, columns, rows), "up": normal(count, rows, columns)}
    layers = [{k: v[n] for k, v in stacks.items()} for n in range(count)]
    params = {"layers": stacks if kind == "scan" else layers, "scale": np.ones(rows, "f")}
    return params, scanned if kind == "scan" else looped, normal(16, rows)


SCAN, LOOP, ODD = ("scan", 3, 16, 24), ("loop", 9, 16, 24), ("loop", 3, 12, 22)


@functools.cache
def on_one_device(made, tx, steps=3):
    params, loss, x = model(*made)
    tx = with_others(one_by_one(TX[tx]))
    state, step = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = step(jax.jit(jax.grad(loss))(params, x), state, params)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params)


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


LEVELS = {"mesh": (("node", 2), ("gpu", 4)), "axis": ("node", "gpu")}
TENSOR = {"mesh": (("data", 4), ("tensor", 2)), "overrides": {"up": P("data", "tensor")}}
ROWS: dict[str, Any] = {
    "scan": (SCAN, "muon", {"stage": 3}, {}),
    "scan 2": (SCAN, "soap", {"stage": 2}, {"accumulate": 2}),
    "scan 1": (SCAN, "normalized", {"stage": 1}, {}),
    "loop": (LOOP, "soap", {"stage": 3}, {"roll": False}),
    "rolled": (LOOP, "muon", {"stage": 3}, {"roll": True, "accumulate": 2}),
    "odd": (ODD, "soap", {"stage": 3}, {}),
    "odd 1": (ODD, "muon", {"stage": 1}, {}),
    "whole": (SCAN, "soap", {"stage": 0}, {}),
    "levels": (LOOP, "muon", {"stage": 3, **LEVELS}, {}),
    "groups": (
        LOOP,
        "soap",
        {"groups": dict.fromkeys(("params", "grads", "opt_state"), "gpu"), **LEVELS},
        {},
    ),
    "tensor": (LOOP, "muon", {"stage": 3, **TENSOR}, {}),
    "explicit": (ODD, "muon", {"stage": 3, "mesh": (("data", 8),), "explicit": True}, {}),
    "offload odd": (ODD, "muon", {"stage": 3, "offload": zerojax.Offload(min_bytes=0)}, {}),
    "offload": (SCAN, "soap", {"stage": 3, "offload": zerojax.Offload(min_bytes=0)}, {}),
}


def placed(name):
    made, tx, place, options = ROWS[name]
    params, loss, x = model(*made)
    place = dict(place)
    axes = dict(place.pop("mesh", (("data", 8),)))
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes)) if place.pop("explicit", 0) else None
    place["mesh"] = mesh or mesh_of(**axes)
    state = train_state(params, with_others(by_matrix(TX[tx])))
    state = zerojax.shard_train_state(state, min_shard_size=1, **place)
    return state, train_step(loss, **options), x


@pytest.mark.parametrize("name", ROWS)
def test_numbers_are_those_of_each_matrix_alone(name):
    state, step, x = placed(name)
    for _ in range(3):
        state, _ = step(state, x)
    assert_close(zerojax.gather_params(state), on_one_device(*ROWS[name][:2]), 2e-4)


def sent(report, kind="all-to-all"):
    """What the exchange of matrices sends, or another collective within the optimizer."""
    return [t.wire_bytes for t in report.traffic if t.kind == kind and "optimizer" in t.scope]


@pytest.mark.parametrize("name", ROWS)
def test_a_step_sends_gradients_to_the_owners_and_updates_back(name):
    """One all-to-all each way for each shape, of as many matrices as fill up the devices."""
    (_, count, rows, columns), tx, place, _ = ROWS[name]
    state, step, x = placed(name)
    report = zerojax.audit(step, state, x).check()
    assert "by_matrix" not in str(report)
    if place.get("stage") == 0:
        assert sent(report) == []
        return
    devices = 4 if name in ("groups", "tensor") else 8
    pad = lambda length: -(-length // devices) * devices
    one = {"normalized": 3}.get(tx, 2)  # which reads parameters
    moved = [
        pad(count) * min(pad(r) * c, r * pad(c)) for r, c in ((rows, columns), (columns, rows))
    ]
    wanted = sorted([4 * n / devices * (devices - 1) / devices for n in moved] * one)
    assert sorted(sent(report)) == pytest.approx(wanted)
    gathered = sent(report, "all-gather")
    assert len(gathered) == (name == "tensor"), "whole matrices are gathered"


def of_layers(params):
    numbers = optax.contrib.MuonDimensionNumbers((1,), (2,))
    return jax.tree.map(lambda w: numbers if w.ndim > 2 else None, params)


@pytest.mark.parametrize(
    ("tx", "names"),
    [
        (optax.contrib.muon(0.05, muon_weight_dimension_numbers=of_layers), True),
        (optax.adafactor(1e-3), False),
    ],
    ids=["muon", "adafactor"],
)
def test_an_audit_points_to_it(tx, names):
    """No stage promises what an optimizer sends, and the report says what would send less."""
    params, loss, x = model("scan", 1, 256, 512)
    state = zerojax.shard_train_state(train_state(params, tx), stage=3, min_shard_size=1)
    report = zerojax.audit(train_step(loss), state, x).check()
    assert ("to multiply whole matrices: zerojax.manual.by_matrix(tx) runs" in str(report)) == names


def test_state_rests_whole_with_the_owner():
    """Of three matrices on eight devices, five have none."""
    state, *_ = placed("odd")
    stacks = optax.tree.get(state.opt_state, "stacks")["float32_12x22"]
    left = stacks.sides[0]
    assert [shard.data.shape for shard in left.addressable_shards] == [(1, 12, 12)] * 8
    assert stacks.count.shape == () and zerojax.unpad(state).opt_state is not None
    logical = optax.tree.get(zerojax.unpad(state).opt_state, "stacks")["float32_12x22"]
    assert logical.bases[1].shape == (3, 22, 22)


def test_a_matrix_that_has_a_scalar_of_its_own_keeps_it():
    params = {"w": np.ones((3, 4, 5), "f"), "v": np.ones((4, 5), "f")}
    assert by_matrix(normalized()).init(params).stacks["float32_4x5"].shape == (4,)
    assert by_matrix(soap()).init(params).stacks["float32_4x5"].count.shape == ()


def test_a_matrix_may_have_three_dimensions():
    numbers = optax.contrib.MuonDimensionNumbers(0, (1, 2))
    tx = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)
    params = {"heads": np.random.default_rng(0).normal(size=(2, 8, 4, 3)).astype("f")}
    whole = by_matrix(tx, dims=3)
    updates, _ = whole.update(params, whole.init(params), params)
    for n in range(2):
        one = params["heads"][n]
        assert_close(updates["heads"][n], tx.update(one, tx.init(one), one)[0])


def test_what_is_no_matrix_is_refused():
    params = {"w": np.ones((4, 5)), "bias": np.ones(5)}
    with pytest.raises(ValueError, match=r"parameter bias of shape \(5,\).*optax.partition"):
        by_matrix(soap()).init(params)
    stack = {"layers": {"w": np.ones((3, 4, 5)), "bias": np.ones((3, 5))}}
    with pytest.raises(ValueError, match=r"layers/bias of shape \(3, 5\), a stack of layers"):
        by_matrix(soap()).init(stack)
    alone = by_matrix(TX["muon"]).init({"layers": {"bias": np.ones((3, 5))}})
    assert alone.stacks["float64_3x5"] is not None
    with pytest.raises(ValueError, match="call update\\(grads, state, params\\)"):
        by_matrix(soap()).update(params, None)


def test_moments_that_would_stay_wide_are_refused():
    params, loss, x = model(*SCAN)
    narrow = zerojax.manual.narrow_moments
    inside = with_others(by_matrix(narrow(TX["muon"], "int8")))
    for tx in (with_others(by_matrix(TX["muon"])), inside):
        state = train_state(params, tx)
        with pytest.raises(
            ValueError, match=r"use zerojax\S+narrow_moments\(tx, 'int8'\) for each"
        ):
            zerojax.plan(state, precision=zerojax.Precision(moments="int8"))
    with pytest.raises(ValueError, match="has those of by_matrix"):
        narrow(with_others(by_matrix(TX["muon"]))).init(params)
    state = zerojax.shard_train_state(train_state(params, inside), stage=3, min_shard_size=1)
    state, _ = train_step(loss)(state, x)
    coded = [leaf for leaf in state.tx.plan.leaves if re.search("/inner/.*/mu$", leaf.path)]
    assert [str(leaf.dtype) for leaf in coded] == ["int8"] * 2


def test_a_model_of_nnx_resumes_on_other_devices(tmp_path):
    def made(devices):
        layers = [nnx.Linear(12, 12, rngs=nnx.Rngs(n)) for n in range(3)]
        model = nnx.Sequential(*layers)
        optimizer = nnx.Optimizer(model, with_others(by_matrix(soap())), wrt=nnx.Param)
        place = {"stage": 3, "mesh": mesh_of(data=devices), "min_shard_size": 1}
        return zerojax.nnx.shard(model, optimizer, **place) or (model, optimizer)

    x = np.random.default_rng(1).normal(size=(16, 12)).astype("f")
    step = zerojax.nnx.train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2))
    first, then = made(8), made(2)
    step(*first, x)
    zerojax.save(tmp_path / "state", zerojax.nnx.state(*first))
    zerojax.nnx.update(*then, zerojax.restore(tmp_path / "state", zerojax.nnx.state(*then)))
    losses = [[step(*pair, x)["loss"] for _ in range(3)] for pair in (first, then)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_forecast_counts_the_exchange():
    params, loss, x = model(*SCAN)
    make_state = lambda: train_state(params, with_others(by_matrix(soap())))
    with fakes.cpus_for_gpus():
        (case,) = zerojax.forecast(loss, make_state, x, gpus="8xH100", stages=(3,)).cases
    exchanged = sent(case.report)
    assert len(exchanged) == 4 and case.report.findings() == []
    assert case.wire_bytes > sum(exchanged)
