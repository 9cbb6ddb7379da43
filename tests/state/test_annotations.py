"""Models annotated with mesh axes: what a plan reads of that."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from zerojax._state.annotations import own_axes

ONE, TWO = make_mesh(), Mesh(make_mesh().devices.reshape(4, 2), ("data", "tensor"),
                             axis_types=(AxisType.Auto,) * 2)  # fmt: skip


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
