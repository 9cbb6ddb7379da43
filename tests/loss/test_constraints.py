"""Models that constrain their activations over the data axis, as under plain `jax.jit`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from tests.support import draw
from tests.support.reference import assert_close

BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
PARAMS = {"in": draw.normal(0, 8, 16), "stack": 0.2 * draw.normal(1, 3, 16, 16)}
MESH = make_mesh(4)
PLAN = zerojax.plan({"params": PARAMS}, mesh=MESH)

constrain = lax.with_sharding_constraint
bare = lambda x: constrain(x, P("data"))
pair = lambda x: constrain((x, x), (P("data", None), P(None, "data")))[0]
named = lambda x: constrain(x, NamedSharding(MESH, P(P.UNCONSTRAINED, "data")))
logical = lambda x: nn.with_logical_constraint(
    x, ("batch", "mlp"), rules=[("batch", "data"), ("mlp", None)]
)
free = lambda x: x


def at_the_top(p, x, act):
    return act(jnp.tanh(x @ p["in"]))


def in_a_scan(p, x, act):
    body = lambda x, w: (act(jax.nn.relu(x @ w)), jnp.zeros(3))
    return lax.scan(jax.checkpoint(body), x @ p["in"], p["stack"])[0]


def in_calls(p, x, act):
    inner = jax.jit(lambda x: act(jax.nn.silu(x)) * jnp.ones(16))
    x = inner(inner(x @ p["in"]))
    x = lax.cond(x.sum() > 0, lambda x: act(x), lambda x: 2 * x, x)
    x = lax.fori_loop(0, 2, lambda i, x: act(x) * 0.5, lax.stop_gradient(x)) + x
    return x @ jax.checkpoint(act)(p["stack"][0])


@jax.custom_jvp
def cubed(x):
    return x**3


@cubed.defjvp
def cubed_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return bare(x) ** 3, 3 * bare(x) ** 2 * t


@jax.custom_vjp
def squared(x):
    return bare(x) ** 2


squared.defvjp(lambda x: (bare(x) ** 2, bare(x)), lambda x, ct: (2 * x * ct,))


def in_derivatives(p, x, act):
    return cubed(0.1 * act(x @ p["in"])) + squared(x @ p["in"])


def beside_collectives(p, x, act):
    x = act(x @ p["in"])
    return x - zerojax.mean(x, where=x > 0) + lax.pmean(x.mean(0), "data")


def loss_of(*models, act):
    return lambda p, x: sum(jnp.mean(model(p, x, act) ** 2) for model in models)


def specs(jaxpr):
    """Those of all constraints, at every depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            yield eqn.params["sharding"].spec
        for inner in jaxprs_in_params(eqn.params):
            yield from specs(inner)


def test_at_every_depth_beside_collectives_and_what_is_closed_over():
    """An array, and a tracer of the function around."""
    table, scale = jnp.arange(16.0), jnp.arange(16.0) - 3

    @jax.jit
    def value_and_grads(scale, p, x):
        def derived(act):
            closing = lambda p, x, act: jax.jit(act)(x @ p["in"] + table) * act(scale)
            models = at_the_top, in_a_scan, in_calls, in_derivatives, beside_collectives, closing
            return zerojax.value_and_grad(loss_of(*models, act=act), PLAN)(p, x)

        return derived(bare), derived(free)

    with jax.set_mesh(MESH):
        constrained, plain = value_and_grads(scale, PARAMS, BATCH)
    assert_close(constrained, plain, 2e-5)
    assert float(plain[0]) > 1 and np.any(plain[1]["in"])


@pytest.mark.parametrize("act", [bare, pair, named, logical])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_however_it_is_written(act, kind):
    loss = loss_of(in_a_scan, act=act)
    with jax.set_mesh(MESH):
        written = list(specs(jax.make_jaxpr(loss)(PARAMS, BATCH)))
    assert [spec for spec in written if "data" in spec]
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(kind,))):
        left = list(specs(jax.make_jaxpr(zerojax.value_and_grad(loss, PLAN))(PARAMS, BATCH)))
    assert not [spec for spec in left if "data" in spec]


def test_other_axes_stay_constrained():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    loss = loss_of(in_a_scan, act=lambda x: constrain(x, P("data", "tensor")))
    state = zerojax.ModuleState.create(PARAMS, optax.sgd(0.1))
    state = zerojax.shard_train_state(state, mesh=mesh, axis="data")
    step = zerojax.train_step(loss)
    with jax.set_mesh(mesh):
        zerojax.verify(step, state, BATCH).check()
        left = list(specs(step.trace(state, BATCH).jaxpr))
        metrics = step(state, BATCH)[1]
    assert P(None, "tensor") in left and not [s for s in left if {*s} >= {"data", "tensor"}]
    wanted = float(loss_of(in_a_scan, act=free)(PARAMS, BATCH))
    assert float(metrics["loss"]) == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("act", [bare, logical])
def test_flops_are_counted_under_constraints(act):
    state = zerojax.ModuleState.create(PARAMS, optax.sgd(0.1))
    state = zerojax.shard_train_state(state, mesh=MESH)
    step = zerojax.train_step(lambda p, x: jnp.mean(in_a_scan(p, x, act)))
    assert zerojax.tools.step_flops(step, state, BATCH) == 3 * 2 * 16 * (8 * 16 + 3 * 16 * 16)


# -- errors of a loss, which is traced again without its constraints where it fails with them


def error_of(loss):
    with pytest.raises(Exception) as raised:
        zerojax.value_and_grad(loss, PLAN)(PARAMS, BATCH)
    return raised.value


def test_an_error_of_the_loss_is_told_though_tracing_it_again_fails_otherwise():
    tries = []

    def loss(p, x):
        tries.append(x)
        raise ValueError("the user's own") if len(tries) == 1 else RuntimeError("another")

    assert str(error_of(loss)).startswith("the user's own")
    assert [len(x) for x in tries] == [4, 4, 16]  # the last, to see whether its rows are the cause


def test_an_error_behind_a_constraint_is_the_one_that_is_told():
    wrong = error_of(lambda p, x: jnp.mean(bare(x @ p["in"]) @ jnp.ones((3, 3))))
    assert isinstance(wrong, TypeError) and "dot_general" in str(wrong)
    mistaken = str(error_of(lambda p, x: jnp.mean(constrain(x @ p["in"], P("data", None, None)))))
    assert "rank" in mistaken and "Manual" not in mistaken
    unknown = str(error_of(lambda p, x: jnp.mean(constrain(bare(x @ p["in"]), P("dat")))))
    assert "has no axis 'dat'" in unknown and "zerojax.mesh(data=4, dat=1)" in unknown
