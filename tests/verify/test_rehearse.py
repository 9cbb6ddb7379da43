"""`zerojax.verify(plan=)`: the plan of a large mesh, on a small one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, PartitionSpec

import zerojax

BATCH = np.random.default_rng(0).integers(0, 16, (24, 4)).astype("int32")


@pytest.fixture(scope="module")
def large_mesh():
    """50 nodes of 8, as `zerojax.aot.mesh` makes it where the compiler for GPUs is installed: a
    mesh that nothing can run on, since it has each device many times."""
    devices = np.resize(np.array(jax.devices()), (50, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerojax._plan.mesh._check_mesh", lambda mesh: None)
        yield Mesh(devices, ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)


def make(width=512, layers=36, bias=None):
    def state():
        params = {
            "embed": jnp.full((16, width), 0.1),
            "layers": {
                "w": jax.random.normal(jax.random.key(0), (layers, width, width)) / width,
                "b": jnp.zeros((layers, width if bias is None else bias)),
            },
        }
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2, eps=1e-3))

    return state


def loss(params, tokens):
    layer = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["w"] + p["b"]), None))
    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return jnp.mean((x - 1) ** 2)


def test_a_plan_of_400_runs_on_8(large_mesh):
    groups = {"params": "gpu", "grads": "gpu", "opt_state": ("gpu", "node")}
    offload = zerojax.Offload(opt_state=True, min_bytes=2**10)
    plan = zerojax.plan(make(), mesh=large_mesh, groups=groups, offload=offload)
    step = zerojax.train_step(loss)
    # The state itself, whose step is a number that Flax has made no array of.
    result = zerojax.verify(step, make(32, 2)(), BATCH, plan=plan)
    assert result.ok, str(result)
    # 400 devices divide 512 no more than 6 divide 32: the same leaves are padded.
    assert "Ran on node=2, gpu=3 in place of node=50, gpu=8" in result.notes[0]
    assert not any("Padded" in note for note in result.notes)
    # Of three parameters: all-gathers and reduce-scatters, within nodes and between them.
    assert "Both have 12 kinds of collectives" in result.notes[-1], result.notes


def test_what_is_not_the_plan_is_named(large_mesh):
    plan = zerojax.plan(make(), mesh=large_mesh, axis=("node", "gpu"), stage=3)
    # A bias that is a scalar is no stack of vectors, and has no place in the plan.
    odd = make(32, 2)().params
    odd["layers"]["b"], odd["extra"] = jnp.zeros(2), jnp.zeros(32)

    def more(params, tokens):
        layer = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["w"] + p["b"]), None))
        x, _ = jax.lax.scan(layer, params["embed"][tokens] + params["extra"], params["layers"])
        return jnp.mean((x - 1) ** 2)

    source = lambda: TrainState.create(apply_fn=None, params=odd, tx=optax.sgd(1e-2))
    result = zerojax.verify(zerojax.train_step(more), source, BATCH, plan=plan)
    told = {check.path: check.verdict for check in result.wrong}
    assert "float32[36, 512] there, float32[2] here" in told["params/layers/b"]
    assert told["params/extra"] == "wrong: the plan has no such leaf"
    assert told["opt_state/0/mu/embed"] == "wrong: the small state has no such leaf"
    assert any("The collectives are not compared" in note for note in result.notes)


def test_padding_and_layers_in_a_python_loop(large_mesh):
    def unrolled(layers, width):
        def state():
            w = lambda i: jax.random.normal(jax.random.key(i), (width, width)) / width
            params = {f"layer_{i}": {"w": w(i)} for i in range(layers)}
            return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2, eps=1e-3))

        return state

    def loss(params, x):
        x = x @ jnp.ones((x.shape[1], params["layer_0"]["w"].shape[0]))
        for name in params:
            x = jnp.tanh(x @ params[name]["w"])
        return jnp.mean(x**2)

    plan = zerojax.plan(unrolled(12, 800), mesh=large_mesh, axis=("node", "gpu"), stage=2)
    rows = np.ones((16, 4), np.float32)
    result = zerojax.verify(zerojax.train_step(loss), unrolled(2, 24), rows, plan=plan)
    assert result.ok, str(result)
    assert "node=2, gpu=4" in result.notes[0]  # divides 24, as 400 divides 800, and 16 rows
    options = {"mesh": large_mesh, "axis": ("node", "gpu"), "stage": 2}
    plan = zerojax.plan(unrolled(12, 800), overrides={"layer_5": PartitionSpec()}, **options)
    result = zerojax.verify(zerojax.train_step(loss), unrolled(2, 27), rows, plan=plan)
    assert any("Padded here and not there: params/layer_0/w" in note for note in result.notes)
    named = {check.path for check in result.wrong if check.kind == "plan"}
    assert named == {f"{tree}/layer_5/w" for tree in ("params", "opt_state/0/mu", "opt_state/0/nu")}


def test_scales_of_a_small_model_that_is_too_narrow_to_share_them(large_mesh):
    """The numbers are right: only the widths of the small model differ."""
    plan = zerojax.plan(
        make(25600, 2),
        mesh=large_mesh,
        axis=("node", "gpu"),
        precision=zerojax.Precision(moments="int8"),
        min_shard_size=1,
    )
    scales = {leaf.path: leaf.dim for leaf in plan.leaves if "scales" in leaf.path}
    assert scales["opt_state/scales/0/mu/embed"] == 1
    for width in (32, 512):
        result = zerojax.verify(zerojax.train_step(loss), make(width, 2), BATCH, plan=plan)
        assert result.ok, str(result)
        notes = [note for note in result.notes if "opt_state/scales/0/mu/embed" in note]
        assert len(notes) == (width == 32) and all("8 devices share" in note for note in notes)
        assert all("of widths that 512 divides" in note for note in notes)


def test_refusals(large_mesh):
    plan = zerojax.plan(make(), mesh=large_mesh, axis=("node", "gpu"))
    with pytest.raises(ValueError, match=r"25 examples.*zerojax\.pad_batch\(batch\), with"):
        zerojax.verify(zerojax.train_step(loss), make(32, 2), np.ones((25, 4), "int32"), plan=plan)
    with pytest.raises(TypeError, match="Leave like= out"):
        step = zerojax.train_step(loss)
        zerojax.verify(step, make(32, 2), BATCH, plan=plan, like=step)
    with pytest.raises(TypeError, match=r"takes a step of zerojax\.train_step"):
        zerojax.verify(lambda state, batch: (state, {}), make(32, 2), BATCH, plan=plan)
