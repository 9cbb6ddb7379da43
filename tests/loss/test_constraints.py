"""Models that constrain their activations over the data axis, as under plain `jax.jit`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import zerojax
import zerojax.nnx
from tests.conftest import make_mesh
from zerojax import _compat

BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
MESH = make_mesh()


def params():
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "in": jax.random.normal(keys[0], (8, 16)),
        "stack": 0.2 * jax.random.normal(keys[1], (3, 16, 16)),
    }


constrain = lax.with_sharding_constraint
bare = lambda x: constrain(x, P("data"))
pair = lambda x: constrain((x, x), (P("data", None), P(None, "data")))[0]
named = lambda x: constrain(x, NamedSharding(MESH, P(P.UNCONSTRAINED, "data")))
logical = lambda x: nn.with_logical_constraint(
    x, ("batch", "mlp"), rules=[("batch", "data"), ("mlp", None)]
)


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


def loss_of(model, act):
    return lambda p, x: jnp.mean(model(p, x, act) ** 2)


def one_device(model):
    return jax.value_and_grad(loss_of(model, lambda x: x))(params(), BATCH)


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, wanted)


def specs(traced):
    eqns = _compat.every_eqn(traced.jaxpr.jaxpr)
    return {e.params["sharding"].spec for e in eqns if e.primitive.name == "sharding_constraint"}


@pytest.mark.parametrize("stage", [0, 3])
def test_at_every_depth(stage, mesh):
    plan = zerojax.plan((params(), ()), stage=stage, mesh=mesh)
    models = (at_the_top, in_a_scan, in_calls)
    total = lambda act: lambda p, x: sum(loss_of(m, act)(p, x) for m in models)
    with jax.set_mesh(mesh):
        got = jax.jit(zerojax.value_and_grad(total(bare), plan))(
            plan.place((params(), ()))[0], BATCH
        )
    close(got, jax.value_and_grad(total(lambda x: x))(params(), BATCH))


@pytest.mark.parametrize(
    "act", [bare, pair, named, logical], ids=["bare", "pair", "named", "logical"]
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_however_it_is_written(act, kind, mesh):
    plan = zerojax.plan((params(), ()), stage=0, mesh=mesh)
    loss_and_grads = jax.jit(zerojax.value_and_grad(loss_of(in_a_scan, act), plan))
    with jax.set_mesh(MESH):
        written = specs(jax.jit(loss_of(in_a_scan, act)).trace(params(), BATCH))
    assert [spec for spec in written if "data" in spec]
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))):
        found = specs(loss_and_grads.trace(params(), BATCH))
    assert not [spec for spec in found if "data" in spec]


def test_in_derivatives_and_beside_collectives(mesh):
    plan = zerojax.plan((params(), ()), stage=3, mesh=mesh)
    placed = plan.place((params(), ()))[0]
    models = (in_derivatives, beside_collectives)
    total = lambda act: lambda p, x: sum(loss_of(m, act)(p, x) for m in models)
    constrained = jax.jit(zerojax.value_and_grad(total(bare), plan))(placed, BATCH)
    loss, grads = jax.jit(zerojax.value_and_grad(total(lambda x: x), plan))(placed, BATCH)
    close(constrained, (loss, grads))
    assert float(loss) > 1 and np.any(grads["in"])


def test_beside_what_the_loss_closes_over(mesh):
    """An array, and a tracer of the function around."""
    plan = zerojax.plan((params(), ()), stage=3, mesh=mesh)
    table = jnp.arange(16.0)

    def total(scale, act):
        return lambda p, x: jnp.mean(jax.jit(act)(x @ p["in"] + table) * act(scale))

    @jax.jit
    def constrained(scale, p, x):
        return zerojax.value_and_grad(total(scale, bare), plan)(p, x)

    scale = jnp.arange(16.0) - 3
    wanted = jax.value_and_grad(total(scale, lambda x: x))(params(), BATCH)
    close(constrained(scale, plan.place((params(), ()))[0], BATCH), wanted)


class WithSums(TrainState):
    sums: object = None


def test_steps_that_accumulate_verify_and_evaluate_on_explicit_axes(mesh):
    def loss(p, x, sums):
        h = nn.with_logical_constraint(in_a_scan(p, x, bare), ("batch", "mlp"))
        return jnp.mean(h**2), {"sums": sums + bare(h).mean(0)}

    make = lambda: WithSums.create(
        apply_fn=None, params=params(), tx=optax.sgd(0.1), sums=jnp.zeros(16)
    )
    explicit = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(explicit), nn.logical_axis_rules([("batch", "data"), ("mlp", None)]):
        state = zerojax.shard_train_state(make, stage=3, mesh=mesh)
        step = zerojax.train_step(loss, mutable="sums", accumulate=2)
        zerojax.verify(step, state, BATCH).raise_if_wrong()
        evaluated = zerojax.eval_step(loss, mutable="sums")(state, BATCH)["loss"]
        state, metrics = step(state, BATCH)
    close((metrics["loss"], evaluated), (one_device(in_a_scan)[0],) * 2)
    assert state.params["stack"].sharding.spec == P(None, "data")


def test_other_axes_stay_constrained():
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    act = lambda x: constrain(x, P("data", "tensor"))
    state = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(0.1))
    state = zerojax.shard_train_state(state, stage=3, mesh=mesh, axis="data")
    step = zerojax.train_step(loss_of(in_a_scan, act))
    with jax.set_mesh(mesh):
        zerojax.verify(step, state, BATCH).raise_if_wrong()
        found = specs(step.trace(state, BATCH))
        metrics = step(state, BATCH)[1]
    assert P(None, "tensor") in found and not [s for s in found if {*s} >= {"data", "tensor"}]
    close(metrics["loss"], one_device(in_a_scan)[0])


def test_an_error_of_the_loss_stays_what_it_is(mesh):
    def loss(p, x):
        raise ValueError("no such activation")

    plan = zerojax.plan((params(), ()), stage=3, mesh=mesh)
    with pytest.raises(ValueError, match="no such activation"):
        zerojax.value_and_grad(loss, plan)(params(), BATCH)


def test_nnx_models(mesh):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, act):
            self.linear, self.act = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), act

        def __call__(self, x):
            return self.act(nnx.relu(self.linear(x)))

    def losses(act):
        model = Model(act)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        zerojax.nnx.shard(model, optimizer, stage=3, mesh=mesh)
        step = zerojax.nnx.train_step(lambda model, x: jnp.mean(model(x) ** 2))
        return [step(model, optimizer, BATCH)["loss"] for _ in range(2)]

    assert losses(bare) == losses(lambda x: x)


def test_an_error_of_the_loss_is_told_though_tracing_it_again_fails_otherwise():
    tries = []

    def loss(p, x):
        tries.append(x)
        raise ValueError("the user's own") if len(tries) == 1 else RuntimeError("another")

    plan = zerojax.plan({"params": params()}, mesh=MESH)
    with pytest.raises(ValueError, match="the user's own"):
        zerojax.value_and_grad(loss, plan)(params(), BATCH)
    assert len(tries) == 2


def error_of(loss):
    plan = zerojax.plan({"params": params()}, mesh=MESH)
    with pytest.raises(Exception) as raised:
        zerojax.value_and_grad(loss, plan)(params(), BATCH)
    return raised.value


def test_an_error_behind_a_constraint_is_the_one_that_is_told():
    wrong = error_of(lambda p, x: jnp.mean(bare(x @ p["in"]) @ jnp.ones((3, 3))))
    assert isinstance(wrong, TypeError) and "dot_general" in str(wrong)
    mistaken = str(error_of(lambda p, x: jnp.mean(constrain(x @ p["in"], P("data", None, None)))))
    assert "rank" in mistaken and "Manual" not in mistaken


def test_a_constraint_over_an_axis_that_nothing_is_annotated_with_is_an_error():
    wrong = str(error_of(lambda p, x: jnp.mean(constrain(bare(x @ p["in"]), P("dat")))))
    assert "has no axis 'dat'" in wrong and "zerojax.mesh(data=8, dat=1)" in wrong


@pytest.mark.parametrize("act", [bare, logical])
def test_flops_are_counted_under_constraints(act):
    state = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(0.1))
    state = zerojax.shard_train_state(state, mesh=MESH)
    step = zerojax.train_step(lambda p, x: jnp.mean(in_a_scan(p, x, act)))
    assert zerojax.step_flops(step, state, BATCH) == 3 * 2 * 16 * (8 * 16 + 3 * 16 * 16)
