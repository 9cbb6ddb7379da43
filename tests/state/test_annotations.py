"""Models annotated with mesh axes, as their authors have them."""

from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from tests.support.shapes import shape

BATCH = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
INIT = nn.initializers.xavier_uniform()
ONE, TWO = make_mesh(), zerojax.mesh(data=4, tensor=2)
RULES = [("embed", "data"), ("mlp", "tensor"), ("heads", "model"), ("batch", "data")]
WIDE = [("mlp", ("model", "tensor")), ("embed", None)]
OVER = NamedSharding(TWO, P(None, "tensor"))
WEIGHT = shape(16, 2, 16)


def named(*names):
    return nn.Partitioned(WEIGHT, names)


def logical(*names, **rules):
    return nn.LogicallyPartitioned(WEIGHT, names, **rules)


@pytest.mark.parametrize(
    ("box", "mesh", "rules", "spec", "absent"),
    [
        (named("data", None, None), ONE, (), P("data"), set()),
        (named(None, "tensor", "model"), TWO, (), P("data", "tensor"), {"model"}),
        (named("fsdp", None, ("data", "model")), ONE, (), P("data"), {"fsdp", "model"}),
        (logical("embed", "mlp"), ONE, RULES, P("data"), {"tensor"}),
        (logical("embed", "mlp"), ONE, (), P("data"), {"embed", "mlp"}),
        (logical("embed", "heads", "mlp"), TWO, RULES, P("data", None, "tensor"), {"model"}),
        (logical("embed", "mlp"), TWO, WIDE, P("data", "tensor"), {"model"}),
        (
            logical("mlp", P.UNCONSTRAINED, rules=[("mlp", "tensor")]),
            TWO,
            (),
            P("tensor", None, "data"),
            set(),
        ),
    ],
)
def test_linens_boxes_are_read_by_the_rules(box, mesh, rules, spec, absent, capsys):
    with nn.logical_axis_rules(rules):
        plan = zerojax.plan(({"w": box}, ()), mesh=mesh)
    (leaf,) = plan.leaves
    assert (leaf.spec, plan._absent) == (spec, absent)
    assert ("not in the mesh" in str(plan)) == bool(absent)
    plan.show("0/w/value")
    beside = f"not over {', '.join(sorted(absent))}: the mesh has no such axis"
    assert (beside in capsys.readouterr().out) == bool(absent)


@pytest.mark.parametrize(
    ("names", "axis", "left"),
    [
        (("expert",), ("data", "expert"), True),
        (("expert",), "data", False),
        ((("data", "expert"),), ("data", "expert"), False),
    ],
)
def test_an_axis_that_zero_shards_over_too_is_named(names, axis, left, capsys):
    plan = zerojax.plan(({"w": named(*names)}, ()), mesh=zerojax.mesh(data=4, expert=2), axis=axis)
    assert (plan.leaves[0].taken == ("expert",), "left to ZeRO" in str(plan)) == (left, left)
    assert ("expert" in str(plan.leaves[0].spec)) or not left
    plan.show("0/w/value")
    remedy = "annotated over expert, which axis= has too: gathered whole"
    assert (remedy in capsys.readouterr().out) == left


def test_an_array_that_is_placed_over_an_axis_stays_there():
    placed = jax.device_put(np.ones((16, 16), "f"), OVER)
    for weight in (placed, nn.Partitioned(placed, names=("data", None))):
        (leaf,) = zerojax.plan(({"w": weight}, ()), mesh=TWO).leaves
        assert leaf.spec == P("data", "tensor")


def nnx_loss(model, x):
    return jnp.mean(jnp.tanh(model(x)) ** 2)


def making(out_sharding):
    def make():
        init = nnx.with_partitioning(INIT, out_sharding) if out_sharding else INIT
        model = nnx.Linear(32, 64, kernel_init=init, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    return make


@pytest.mark.parametrize("form", ["function", "made"])
@pytest.mark.parametrize(
    ("out_sharding", "mesh", "stage", "rules", "spec"),
    [
        (Format(Layout((0, 1)), OVER), TWO, 0, (), P(None, "tensor")),
        ((None, "model"), ONE, 3, (), P("data")),
        (P("data", "tensor"), TWO, 2, (), P(None, "tensor")),
        (("embed", "mlp"), TWO, 3, RULES, P("data", "tensor")),
    ],
    ids=["format", "absent", "spec", "rules"],
)
def test_nnx_models_are_placed_as_they_say(form, out_sharding, mesh, stage, rules, spec):
    make = making(out_sharding)
    # Flax places what is made outside of zerojax at once: over a mesh, which must have the axes.
    under = jax.set_mesh if mesh is TWO and not isinstance(out_sharding, Format) else nullcontext
    with nn.logical_axis_rules(rules):
        source = (make,)
        if form == "made":
            with nnx.use_eager_sharding(mesh is TWO), under(TWO):
                source = make()
        model, optimizer = zerojax.nnx.shard(*source, stage=stage, mesh=mesh)
        assert model.kernel.get_raw_value().sharding.spec == spec
        plan = zerojax.plan(zerojax.nnx.state(model, optimizer), mesh=mesh)
        if form == "function":
            before = zerojax.plan(lambda: zerojax.nnx.state(*make()), stage=stage, mesh=mesh)
            assert before == zerojax.nnx.state(model, optimizer).tx.plan
        assert plan._absent == ({"model"} if mesh is ONE else set())
        if (form, stage) == ("made", 3):
            loss = zerojax.nnx.train_step(nnx_loss)(model, optimizer, BATCH)["loss"]
            assert float(loss) == pytest.approx(float(nnx_loss(making(None)()[0], BATCH)), rel=1e-5)


def test_an_annotated_nnx_model_is_kept_in_other_dtypes():
    stored = zerojax.Precision(param="bfloat16", master="split", moments="int8")
    make = making((None, "tensor"))
    adam = lambda: (model := make()[0], nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param))
    model, optimizer = zerojax.nnx.shard(adam, mesh=TWO, precision=stored)
    metadata = model.kernel.get_metadata() | {}
    step, losses = zerojax.nnx.train_step(nnx_loss), []
    for _ in range(2):
        losses.append(float(step(model, optimizer, BATCH)["loss"]))
    assert losses[0] == pytest.approx(float(nnx_loss(making(None)()[0], BATCH)), rel=1e-2)
    assert losses[1] < losses[0] and model.kernel.get_raw_value().sharding.spec[1] == "tensor"
    assert model.kernel.get_metadata() == metadata
