"""`choose` where experts stay apart: it gathers them, or changes their axis, if that is faster."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from tests.forecast import fakes

DIM, INNER, EXPERTS = 64, 256, 8
PATTERN, KEPT = {"expert": "up|down"}, {"data": 2, "expert": 4}
ROOMY = zerojax.Experts("expert", "(up|down)$", room=2.0)
GATHERED = 'stage=3, mesh={"data": 8}, experts=None'
EIGHT = 'stage=3, mesh={"data": 1, "expert": 8}'
SAME = (("axis", ("data", "expert")), ("experts", None))
TWO = 'stage=3, mesh={"data": 4, "expert": 2}'


def make_state(inner=INNER):
    shapes = {"router": (DIM, EXPERTS), "up": (EXPERTS, DIM, inner), "down": (EXPERTS, inner, DIM)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def loss(params, x):
    """Each expert takes its best rows."""
    shares = jax.nn.softmax(x @ params["router"])
    weight, rows = jax.lax.top_k(shares.T, max(1, len(x) // EXPERTS))
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", x[rows], params["up"]))
    y = jnp.einsum("ecf,efd->ecd", h, params["down"]) * weight[..., None]
    return jnp.mean(x.at[rows].add(y) ** 2)


def chosen(rows=256, losses=loss, inner=INNER, **options):
    batch = jax.ShapeDtypeStruct((rows, DIM), jnp.float32)
    usual = {"mesh": KEPT, "experts": PATTERN}
    made = lambda: make_state(inner)
    return zerojax.tools.choose(losses, made, batch, gpus="8xH100", **usual | options)


def compiled_as(monkeypatch, seconds):
    """Has steps take `seconds` by the devices that keep experts apart, and returns what would be
    compiled: the loss, these devices, the stage, and microbatches."""
    asked = []
    sent = {"kind": "all-gather", "axes": None, "is_of_loss": False, "scope": ""}
    traffic = [types.SimpleNamespace(total_bytes=2 * fakes.GIB, **sent)]
    memory = types.SimpleNamespace(gathered=0)
    report = types.SimpleNamespace(traffic=traffic, memory=memory)

    def case(work, variant, stage, accumulate, schedule):
        size = work.mesh.shape.get("expert")
        asked.append((variant, size, stage, accumulate))
        step = seconds[size] + 0.01 * (3 - stage) + (variant == "slow")
        return fakes.case(stage, 10, step_seconds=step, compute_seconds=0.0, report=report)

    monkeypatch.setattr(fakes.Workload, "case", case)
    return asked


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({4: 1.0, 8: 1.1, None: 1.2}, "stage=3"),
        ({4: 1.0, 8: 0.9, None: 1.2}, EIGHT),
        ({4: 1.0, 8: 1.1, None: 0.8}, GATHERED),
    ],
)
def test_the_rest_is_chosen_for_the_fastest_mesh(seconds, best, cpus, monkeypatch):
    asked = compiled_as(monkeypatch, seconds)
    found = chosen(losses={"slow": loss, "": loss})
    assert asked[:4] == [("slow", 4, 3, 1), ("", 4, 3, 1), ("", 8, 3, 1), ("", None, 3, 1)]
    assert str(found.best.way) == best and len(asked) <= 9
    size = dict(found.best.way.on(found.options).mesh).get("expert")
    assert {each for _, each, *_ in asked[4:]} == {size}, "stages and the like"
    assert TWO in {str(one.way) for one in found.tried}, "not compiled, and not hidden"


def test_what_cannot_be_faster_is_not_compiled(cpus, monkeypatch):
    """Of weights, 1 GiB is gathered over 4 devices, and 4 GiB over all: 9 ms."""
    asked = compiled_as(monkeypatch, {4: 5e-3, 8: 5e-3})
    chosen(inner=16 * INNER)
    assert {size for _, size, *_ in asked} == {4, 8}


def test_a_mesh_without_experts_stays(cpus, monkeypatch):
    asked = compiled_as(monkeypatch, {None: 1.0})
    found = chosen(mesh={"data": 8}, experts=None)
    assert {size for _, size, *_ in asked} == {None}
    assert not any(one.way.instead for one in found.tried)


@pytest.mark.parametrize(("experts", "room"), [(PATTERN, 1.25), (ROOMY, 2.0)], ids=str)
def test_python_of_each_mesh_runs(experts, room, cpus, monkeypatch):
    compiled_as(monkeypatch, {4: 1.0, 8: 0.9, None: 0.8})
    found = chosen(experts=experts)
    lines = {str(one.way): found.python(one.way) for one in found.compiled}
    assert "mesh = zerojax.mesh(data=1, expert=8)" in lines[EIGHT]
    assert "mesh" not in lines[GATHERED] and "experts" not in lines[GATHERED]
    for way, wanted in ("stage=3", 4), (EIGHT, 8), (GATHERED, None):
        scope = {"zerojax": zerojax, "make_state": make_state, "loss_fn": loss}
        exec(lines[way], scope)
        plan = scope["state"].tx.plan
        assert plan.mesh.shape.get("expert") == wanted
        assert getattr(plan.experts, "room", None) == (wanted and room)
        assert scope["step"].lower(scope["state"], np.ones((64, DIM), np.float32))


@pytest.mark.parametrize("name", ["loss", "overrides"])
def test_the_loss_or_overrides_may_name_the_axis_of_experts(name, cpus):
    """Experts are gathered along it then: rows are split over it all the same."""
    named = lambda params, x: loss(params, x) / jax.lax.axis_size("expert")
    how = {"losses": named} if name == "loss" else {"overrides": {"router": P("expert")}}
    found = chosen(rows=64, inner=2048, **how)
    (gathered,) = (one for one in found.tried if one.way == fakes.WayToTrain(instead=SAME))
    assert str(gathered.way) == 'stage=3, axis=("data", "expert"), experts=None'
    scope = {"zerojax": zerojax, "make_state": make_state, "loss_fn": how.get("losses", loss)}
    scope |= {"overrides": how.get("overrides")}
    exec(found.python(gathered.way), scope)
    plan = scope["state"].tx.plan
    assert plan.experts is None and dict(plan.mesh.shape) == KEPT
    assert scope["step"].lower(scope["state"], np.ones((64, DIM), np.float32))


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("rows", "inner", "gathers"), [(64, 2048, False), (16384, 32, True)], ids=["few", "many"]
)
def test_rows_or_weights_travel_whichever_are_fewer(rows, inner, gathers):
    found = chosen(rows, inner=inner)
    ways = {str(one.way): one for one in found.compiled}
    assert {"stage=3", EIGHT} <= {*ways} and len(ways) <= 9
    assert ("experts=None" in str(found.best.way)) == gathers, str(found)
    assert "experts=" in found.python(found.best.way) or gathers
    assert found.best.case.step_seconds == min(one.case.step_seconds for one in found.compiled)
