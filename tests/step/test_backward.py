"""Updates inside backward: the numbers of an update after it, without a tree of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import make_mesh
from tests.step import stacks
from tests.step.stacks import BATCH, adam, is_on_host, loop, loss, on_gpus
from tests.support import steps
from tests.support.collectives import every_equation
from tests.support.reference import assert_close, train_state
from tests.support.schedules import train_step

LAYERS, DIM = 5, 32  # of three, prefetching leaves a loop of one turn, which is none on CPUs
OWN, PART = (LAYERS, DIM, DIM), (LAYERS, DIM // 2, DIM)
STACKS = functools.partial(stacks.stacks, layers=LAYERS)


def carried_by_updates(jaxpr):
    """The shapes of what loops over layers carry that update some: they take Adam's root."""
    shapes = []
    for eqn in every_equation(jaxpr):
        if eqn.primitive.name == "scan":
            body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
            if any(each.primitive.name == "sqrt" for each in every_equation(body)):
                pairs = zip(eqn.outvars, body.outvars, strict=True)
                shapes += [v.aval.shape for v, inner in pairs if v.aval.shape == inner.aval.shape]
    return shapes


def carried(make=STACKS, loss=loss, stage=3, update="backward", **options):
    plan = zerojax.plan(make, stage=stage, mesh=make_mesh(2))
    step = train_step(loss, **({"update": update} | options))
    return carried_by_updates(step.trace(plan.abstract(), BATCH).jaxpr)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(
    ("stage", "shapes"), [(0, [OWN] * 3), (2, [OWN, PART, PART]), (3, [PART] * 3)]
)
def test_the_loop_carries_the_state_and_no_gradients(stage, shapes, prefetch):
    """Each stack with its moments, in place of a stack of gradients."""
    stages = {"stage": stage, "prefetch": prefetch}
    assert sorted(s for s in carried(**stages) if s in (OWN, PART)) == sorted(shapes)
    assert not carried(update="after", **stages)


def test_a_stack_that_is_read_twice_is_updated_after():
    def twice(params, batch):
        return loss(params, batch) + 0.1 * jnp.sum(params["blocks"]["w"] ** 2)

    shapes = carried(loss=twice)
    assert PART not in shapes and (LAYERS, DIM // 2) in shapes, "the norms alone are updated there"


# -- numbers


class Averaged(TrainState):
    """With an average of the parameters."""

    ema: dict

    def apply_gradients(self, *, grads, **fields):
        new = super().apply_gradients(grads=grads, **fields)
        ema = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, self.ema, new.params)
        return new.replace(ema=ema)


def averaged():
    params = STACKS().params
    ema = jax.tree.map(jnp.copy, params)
    return Averaged.create(apply_fn=None, params=params, tx=adam(), ema=ema)


def with_a_teacher():
    params = {**STACKS().params, "teacher": STACKS().params["blocks"]}
    return train_state(params, adam())


def probed(params, batch):
    """Of the teacher there is an aux alone."""
    x = params["embed"][batch]
    probe = jnp.argmax(loop(x, params["teacher"]), -1)
    return jnp.mean(loop(x, params["blocks"]) ** 2), {"probe": jnp.mean(probe)}


def floored(params, batch):
    """The teacher's stack is scanned with the other one, and has no gradient there."""

    def layer(x, both):
        p, q = both
        return x + jnp.tanh((x * p["norm"]) @ p["w"]) + jnp.floor(x @ q["w"]), None

    pairs = params["blocks"], params["teacher"]
    return jnp.mean(jax.lax.scan(layer, params["embed"][batch], pairs)[0] ** 2)


from_the_last = functools.partial(loss, reverse=True)
WHOLE = {"stage": 1, "mesh": steps.row("regather").mesh, "groups": {"opt_state": ("gpu", "node")}}


@pytest.mark.parametrize(
    ("make", "loss", "placing", "prefetch"),
    [
        pytest.param(STACKS, loss, WHOLE, 0, id="whole weights"),
        pytest.param(STACKS, from_the_last, {}, 0, id="reverse"),
        pytest.param(STACKS, from_the_last, {}, 1, id="reverse and prefetch"),
        pytest.param(averaged, loss, {}, 0, id="an average goes along"),
        # JAX takes zeros for the gradients of the teacher, which are no new parameters.
        pytest.param(with_a_teacher, probed, {}, 1, id="an aux"),
        pytest.param(with_a_teacher, floored, {}, 0, id="no gradient"),
    ],
)
def test_a_step_gives_what_one_device_gives(make, loss, placing, prefetch):
    options = {"update": "backward", "prefetch": prefetch}
    step, state, metrics = stacks.trained(make, loss, placing, **options)
    assert carried_by_updates(step.trace(state, BATCH).jaxpr)
    stacks.check(state, metrics, make, loss)
    step(state, BATCH)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def normed():
    def with_norm(updates, state, params=None):
        return updates, optax.tree.norm(updates)

    norm = optax.GradientTransformation(lambda params: jnp.zeros(()), with_norm)
    return STACKS(optax.chain(norm, adam()))


def without_nans():
    return STACKS(optax.chain(optax.zero_nans(), adam()))


def spoiled(params, batch):
    """Scales that are 1, as they are at first, have gradients of NaN."""

    def layer(x, p):
        scale = p["norm"] + 0 * jnp.sqrt(jnp.abs(p["norm"] - 1))
        return x + jnp.tanh((x * scale) @ p["w"]), None

    x = jax.lax.scan(jax.checkpoint(layer), params["embed"][batch], params["blocks"])[0]
    return jnp.mean((x @ params["embed"].T) ** 2)


@pytest.mark.parametrize(("make", "loss"), [(normed, loss), (without_nans, spoiled)])
def test_a_sum_that_no_layer_reads(make, loss):
    placing = {"offload": stacks.ALL}
    step, state, metrics = stacks.trained(make, loss, placing, update="backward")
    assert carried_by_updates(step.trace(state, BATCH).jaxpr)
    stacks.check(state, metrics, make, loss)


def test_beside_a_tensor_axis():
    tensor = steps.row("tensor")
    placed = {**tensor.placed, "stage": 1}
    row = steps.Row("tensor", tensor.mesh_of, placed, {"update": "backward"})
    wanted, _, norm = row.reference
    assert_close(jax.device_get(row.result.state.params), wanted.params)
    np.testing.assert_allclose(row.result.metrics["grad_norm"], norm, rtol=1e-5)


def test_a_pair_and_its_optimizer():
    """Parameters and a state in host memory, which are no state of Flax."""
    tx, params = adam(), STACKS().params
    pair = (params, tx.init(params))
    plan = zerojax.plan(pair, tx=tx, mesh=make_mesh(2), offload=stacks.ALL)
    step = train_step(loss, plan=plan, tx=tx, update="backward")
    state, _ = step(plan.place(pair), BATCH)
    wanted, _ = stacks.on_one_device(STACKS)
    assert_close(jax.device_get(state), (wanted.params, wanted.opt_state))
    assert all(is_on_host(x) for x in jax.tree.leaves(state[1]) if x.ndim)


# -- compiled for GPUs

in_backward = functools.partial(on_gpus, update="backward", layers=24)
after = functools.partial(on_gpus, update="after", layers=24)


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("gpus", "stage", "offload"),
    [("8xH100", 3, None), ("1xH100", 0, None), ("8xH100", 3, "opt_state")],
)
def test_on_gpus_no_stack_of_gradients_is_kept(gpus, stage, offload):
    plan, _, report = in_backward(gpus, stage, offload=offload)
    report.check()
    least = 0 if offload else 0.5 * 4 * 24 * 512**2 // plan.size  # what travels is there, too
    if not offload or jax.__version_info__ >= (0, 11):
        assert report.memory.peak < after(gpus, stage, offload=offload)[2].memory.peak - least


@pytest.mark.gpu_code
def test_on_gpus_updated_weights_are_gathered_in_the_loop():
    """At stage 2, each layer's beside the compute of another."""
    size = 4 * 512**2  # of one layer, float32

    def gathers(report):
        return [one for one in report.replay.collectives
                if one.kind == "all-gather" and one.wire_bytes >= size * 7 / 8]  # fmt: skip

    ours, others = (gathers(compiled("8xH100", 2)[2]) for compiled in (in_backward, after))
    in_loop = [one for one in ours if one.trips > 1]
    assert in_loop and all(one.asynchronous and one.between for one in in_loop)
    sent, wanted = (sum(one.wire_bytes * one.trips for one in each) for each in (ours, others))
    assert sent == pytest.approx(wanted, rel=0.01)
