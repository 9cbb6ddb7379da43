"""Models annotated with mesh axes, as their authors have them: they train as on one device."""

from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from zerojax._state.annotations import own_axes

BATCH = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
INIT = nn.initializers.xavier_uniform()
ONE, TWO = make_mesh(), Mesh(make_mesh().devices.reshape(4, 2), ("data", "tensor"),
                             axis_types=(AxisType.Auto,) * 2)  # fmt: skip
RULES = [("embed", "data"), ("mlp", "tensor"), ("heads", "model"), ("batch", "data")]


class Attention(nn.Module):
    """The projections of an attention, as nanodo and lm1b have them."""

    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 16), kernel_init=self.kernel_init)(x)
        return nn.with_logical_constraint(jnp.tanh(x), ("batch", "heads", "mlp"))


class Wide(nn.Module):
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x):
        return nn.with_logical_constraint(
            nn.Dense(64, kernel_init=self.kernel_init)(x), ("batch", "mlp")
        )


named = lambda *names: nn.with_partitioning(INIT, names)
logical = lambda *names: nn.with_logical_partitioning(INIT, names)


@pytest.mark.parametrize(
    "model, mesh, stage, rules, spec, absent",
    [
        (Attention(named("data", None, None)), ONE, 3, (), P("data"), set()),
        (Attention(named(None, "tensor", "model")), TWO, 2, (), P(None, "tensor"), {"model"}),
        (Attention(logical("embed", "heads", "mlp")), TWO, 3, RULES,
         P("data", None, "tensor"), {"model"}),
        (Wide(named("fsdp", ("data", "model"))), ONE, 1, (), P(), {"fsdp", "model"}),
        (Wide(logical("embed", "mlp")), ONE, 3, RULES, P("data"), {"tensor"}),
        (Wide(logical("embed", "mlp")), TWO, 0, RULES, P(None, "tensor"), set()),
    ],
    ids=["nanodo", "general", "lm1b", "absent", "rules absent", "rules"],
)  # fmt: skip
def test_linen_models_train_as_on_one_device(model, mesh, stage, rules, spec, absent):
    def make():
        made = model.init(jax.random.key(0), BATCH)["params"]
        return TrainState.create(apply_fn=None, params=made, tx=optax.sgd(0.1))

    def loss(params, x):  # the devices have different numbers of true rows
        y = model.apply({"params": params}, x).reshape(len(x), -1)
        return zerojax.mean(y**2, where=x[:, :1] > 0)

    wanted = make()
    value, grads = jax.value_and_grad(loss)(wanted.params, BATCH)
    with nn.logical_axis_rules(rules):
        state = zerojax.shard_train_state(make, stage, mesh=mesh)
        plan = zerojax.plan(state, stage=stage, mesh=mesh)
        step = zerojax.train_step(loss, donate=False)
        assert zerojax.step_flops(step, state, BATCH) > 0
        if stage == 3:
            zerojax.verify(step, state, BATCH).check()
        new, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (new.params, wanted.apply_gradients(
            grads=grads).params)), strict=True):  # fmt: skip
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    (kernel,) = (leaf for leaf in plan.params if "kernel" in leaf.path)
    assert plan.absent == absent and kernel.spec == spec
    assert jax.tree.leaves(new.params)[-1].sharding.spec == spec


def test_a_plan_notes_axes_that_the_mesh_lacks(capsys):
    box = nn.Partitioned(jax.ShapeDtypeStruct((32, 64), "float32"), names=(None, "model"))
    plan = zerojax.plan(({"kernel": box, "bias": jnp.ones(8)}, ()), mesh=ONE)
    head, *rows = str(plan).splitlines()[1:]
    assert head.endswith("not in the mesh")
    assert [row.split()[0] for row in rows if row.endswith("model")] == ["0/kernel/value"]
    plan.show("0/kernel/value")
    assert "on each device, not over model: the mesh has no such axis" in capsys.readouterr().out
    assert "not in the mesh" not in str(zerojax.plan(({"bias": jnp.ones(8)}, ()), mesh=ONE))


def test_annotations_are_read_by_the_rules_and_arrays_by_their_place():
    value = jax.ShapeDtypeStruct((16, 16), "float32")
    placed = jax.device_put(jnp.ones((16, 16)), NamedSharding(TWO, P(None, "tensor")))
    names = ("mlp", P.UNCONSTRAINED)
    state = {
        "own rules": nn.LogicallyPartitioned(value, names=names, rules=[("mlp", "tensor")]),
        "no rules": nn.LogicallyPartitioned(value, names=("data", "mlp")),
        "placed": placed,
        "box of what is placed": nn.Partitioned(placed, names=("data", None)),
        "replicas": nn.Partitioned(value, names=("data", "tensor")),
    }
    found = dict(zip(sorted(state), own_axes(state, ["data"], TWO.axis_names), strict=True))
    assert found["own rules"] == (P("tensor", None), ())
    assert found["no rules"] == (P(), ("mlp",))
    assert found["placed"] == found["box of what is placed"] == (P(None, "tensor"), ())
    assert found["replicas"] == (P(None, "tensor"), ())
    with nn.logical_axis_rules([("mlp", ("model", "tensor")), ("data", None)]):
        (found,) = own_axes([state["no rules"]], ["data"], TWO.axis_names)
    assert found == (P(None, "tensor"), ("model",))


# -- Flax nnx


def nnx_loss(model, x):
    return jnp.mean(jnp.tanh(model(x)) ** 2)


def making(out_sharding):
    def make():
        init = nnx.with_partitioning(INIT, out_sharding) if out_sharding else INIT
        model = nnx.Linear(32, 64, kernel_init=init, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    return make


OVER = NamedSharding(TWO, P(None, "tensor"))


@pytest.mark.parametrize(
    "out_sharding, mesh, stage, rules, spec",
    [
        (OVER, TWO, 3, (), P("data", "tensor")),
        (Format(Layout((0, 1)), OVER), TWO, 0, (), P(None, "tensor")),
        ((None, "model"), ONE, 3, (), P("data")),
        (P("data", "tensor"), TWO, 2, (), P(None, "tensor")),
        (("embed", "mlp"), TWO, 3, RULES, P("data", "tensor")),
    ],
    ids=["sharding", "format", "absent", "spec", "rules"],
)
@pytest.mark.parametrize("form", ["function", "made"])
def test_nnx_models_train_as_on_one_device(form, out_sharding, mesh, stage, rules, spec):
    wanted, optimizer = making(None)()
    losses = []
    for _ in range(2):
        loss, grads = nnx.value_and_grad(nnx_loss)(wanted, BATCH)
        optimizer.update(wanted, grads)
        losses.append(float(loss))
    make = making(out_sharding)
    # Flax places what is made outside of zerojax at once: over a mesh, which must have the axes.
    has_mesh = isinstance(out_sharding, NamedSharding | Format)
    under = jax.set_mesh if mesh is TWO and not has_mesh else nullcontext
    with nn.logical_axis_rules(rules):
        given = (make,)
        if form == "made":
            with nnx.use_eager_sharding(mesh is TWO), under(TWO):
                given = make()
        model, optimizer = zerojax.nnx.shard(*given, stage=stage, mesh=mesh)
        step = zerojax.nnx.train_step(nnx_loss)
        assert model.kernel.get_raw_value().sharding.spec == spec
        if stage == 3:
            zerojax.verify(*step.pure(model, optimizer, BATCH)).check()
        found = [float(step(model, optimizer, BATCH)["loss"]) for _ in range(2)]
        plan = zerojax.plan(zerojax.nnx.state(model, optimizer), mesh=mesh)
    assert found == pytest.approx(losses, rel=1e-5)
    assert plan.absent == ({"model"} if mesh is ONE else set())
