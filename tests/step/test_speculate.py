"""Updates in backward with an optimizer that clips: a step guesses that it does not, and looks."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

import zerojax
from tests.conftest import make_mesh, shared_with_ci
from tests.step import stacks
from tests.step.stacks import ALL, BATCH, is_on_host
from tests.support.reference import assert_close, assert_equal_bits
from tests.support.schedules import train_step

ADAM = stacks.adam()
CLIPPED_PARTS = optax.clip_by_global_norm(1.0), ADAM
CLIPPED = optax.chain(*CLIPPED_PARTS)
QUIET, LOUD = 1.0, 1e6  # the loss times that has a gradient below and above the norm
FINDS = jax.__version_info__ >= (0, 11)  # whether XLA finds layers in host memory
SPECS = {"tokens": PartitionSpec("data"), "times": PartitionSpec()}


def loss(params, batch):
    return batch["times"] * stacks.loss(params, batch["tokens"])


def batch(times):
    return {"tokens": BATCH, "times": jnp.float32(times)}


def stepped(tx, update, placed, times, loss=loss, **options):
    """The state after a step for each of `times`, its norms, the step, and the last old state."""
    place = {"mesh": make_mesh(2), **placed}
    state = zerojax.shard_train_state(lambda: stacks.stacks(tx), **place)
    step = train_step(loss, batch_specs=SPECS, **({"update": update} | options))
    norms, old = [], state
    for each in times:
        old, (state, metrics) = state, step(state, batch(each))
        norms.append(float(metrics["grad_norm"]))
    return state, norms, step, old


def both(state):
    return state.params, state.opt_state


def assert_near(ours, wanted):
    """In parts of each leaf's largest element."""
    for a, b in zip(*map(jax.tree.leaves, (both(ours), both(wanted))), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.max(np.abs(b)))


PLACED = {
    "whole weights": ({"stage": 1}, {}),
    "whole weights, prefetch": ({"stage": 2, "offload": ALL}, {"prefetch": 1}),
    "host": ({"stage": 3, "offload": ALL}, {"prefetch": 1}),
    "all of it": ({"stage": 3, "offload": zerojax.Offload(params=True, min_bytes=0)}, {}),
    "microbatches": ({"stage": 3}, {"accumulate": 2, "order": "layers"}),
}
QUICK = ("whole weights", "host")


# Before 0.11, XLA:CPU rounds a product and a sum once or twice, as it fuses them. On an instruction
# set that cannot round once (--xla_cpu_max_isa=AVX), all bits are equal there, too.
CONTRACTS = jax.__version_info__ < (0, 11)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name not in QUICK)) for name in PLACED]
)
def test_it_is_the_update_of_a_clip(name):
    """Bit for bit that of no clip until one fires, then and later that of one after backward."""
    placed, options = PLACED[name]
    plain, *_ = stepped(ADAM, "backward", placed, [QUIET] * 2, **options)
    ours, norms, *_ = stepped(CLIPPED, "backward", placed, [QUIET] * 2, **options)
    assert max(norms) < 1
    # XLA:CPU fuses, and rounds, the layers outside of a loop with prefetch in another way.
    fuses = "prefetch" in options or (CONTRACTS and "order" in options)
    assert_near(ours, plain) if fuses else assert_equal_bits(both(ours), both(plain))
    times = [QUIET, LOUD, QUIET]
    ours, norms, *_ = stepped(CLIPPED, "backward", placed, times, **options)
    after, *_ = stepped(CLIPPED, "after", placed, times, **options)
    assert norms[1] > 100 and norms[0] < 1
    assert_near(ours, after)


def test_old_moments_in_host_memory_stay_until_the_new_ones_are_right():
    placed = {"stage": 3, "offload": ALL}
    state, _, step, old = stepped(CLIPPED, "backward", placed, [QUIET])
    moments = jax.tree.leaves((old.opt_state[1][0].mu["blocks"], old.opt_state[1][0].nu["blocks"]))
    given = [each.donated for each in jax.tree.leaves(step.lower(state, batch(QUIET)).args_info)]
    kept = {id(x) for x in moments}
    leaves_of = jax.tree.leaves(old)
    assert given[: len(leaves_of)] == [id(leaf) not in kept for leaf in leaves_of]
    # The step has read them, and then they are gone too.
    assert all(leaf.is_deleted() for leaf in leaves_of)
    assert all(is_on_host(x) for x in jax.tree.leaves(state.opt_state) if x.ndim)
    compiled = step.lower(state, batch(QUIET)).compile()
    again, _ = compiled(state, batch(QUIET))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    twice, *_ = stepped(CLIPPED, "backward", placed, [QUIET] * 2)
    assert_equal_bits(both(again), both(twice))


def test_other_clips():
    """A factor that is 1 as a rule, and a step on which the norm is not a number."""

    def by_factor(updates, state, params=None):
        norm = optax.tree.norm(updates)
        factor = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
        return jax.tree.map(lambda x: factor * x, updates), state

    clip = optax.GradientTransformation(lambda params: optax.EmptyState(), by_factor)
    tx = optax.chain(clip, optax.sgd(0.1, momentum=0.9))
    ours, *_ = stepped(tx, "backward", {"stage": 3}, [QUIET, LOUD])
    assert_near(ours, stepped(tx, "after", {"stage": 3}, [QUIET, LOUD])[0])
    ours, *_ = stepped(CLIPPED, "backward", {"stage": 3}, [float("inf")])
    assert all(np.isnan(x).all() for x in jax.tree.leaves(jax.device_get(ours.params["blocks"])))


CLIP, BY_ADAM = optax.clip_by_global_norm(1.0), optax.scale_by_adam(eps=stacks.EPS)
DECAY, DESCENT = optax.add_decayed_weights(0.1), optax.scale(-1e-3)


def rows_of_a_mean(updates, state, params=None):
    """Clips by a mean, whose divisor depends on the number of layers."""
    mean = sum(jnp.mean(x**2) for x in jax.tree.leaves(updates))
    return jax.tree.map(lambda x: jnp.where(mean < 1e-4, x, x / mean), updates), state


def without_nans(updates, state, params=None):
    """Skips a step that has a NaN anywhere."""
    has_nan = jnp.any(jnp.array([jnp.isnan(x).any() for x in jax.tree.leaves(updates)]))
    return jax.tree.map(lambda x: jnp.where(has_nan, 0, x), updates), state


def with_norm(updates, state, params=None):
    return updates, optax.tree.norm(updates)


def alone(update, state=()):
    return optax.GradientTransformation(lambda params: state, update)


def spoiled(params, batch):
    """The loss with gradients of NaN for scales that are 1, as they are at first."""

    def layer(x, p):
        scale = p["norm"] + 0 * jnp.sqrt(jnp.abs(p["norm"] - 1))
        return x + jnp.tanh((x * scale) @ p["w"]), None

    x, table = params["embed"][batch["tokens"]], params["embed"].T
    x = jax.lax.scan(jax.checkpoint(layer), x, params["blocks"])[0]
    return batch["times"] * jnp.mean((x @ table) ** 2)


AROUND = {
    "clip of elements": (optax.clip(0.1), CLIP, ADAM),
    "scale": (optax.scale(2.0), CLIP, ADAM),
    "decay after": (CLIP, DECAY, ADAM),
    "decay before": (DECAY, CLIP, ADAM),
    "momentum before": (optax.trace(0.9), CLIP, DESCENT),
    # The norm of these updates is 2 in the first step and 30 in the second.
    "clip of updates": (BY_ADAM, optax.clip_by_global_norm(10.0), DECAY, DESCENT),
    # In the second step both clips act: what the second one reads follows from the first.
    "second clip": (CLIP, optax.trace(0.9), optax.clip_by_global_norm(0.5), DESCENT),
    "mean": (alone(rows_of_a_mean), ADAM),
}
OF_NANS = {
    "zero_nans": (optax.zero_nans(), CLIP, ADAM),
    "clip of NaNs": (CLIP, optax.zero_nans(), ADAM),
    "skipped steps": (alone(without_nans), ADAM),
}


@pytest.mark.parametrize("name", shared_with_ci(AROUND | OF_NANS))
def test_transforms_around_a_clip(name):
    """In the step that clips too, which runs twice."""
    tx = optax.chain(*(AROUND | OF_NANS)[name])
    run = (spoiled, [QUIET, LOUD, QUIET]) if name in OF_NANS else (loss, [QUIET, LOUD])
    after, norms, *_ = stepped(tx, "after", {}, *run[::-1])
    backward, same, step, _ = stepped(tx, "backward", {}, *run[::-1])
    assert same == pytest.approx(norms, rel=1e-5, nan_ok=True)
    assert_close(both(backward), both(after), 1e-4)
    assert "pmax" in str(step.trace(backward, batch(QUIET)).jaxpr), "it guesses"


@pytest.mark.parametrize(
    ("first", "loss"),
    [(optax.zero_nans(), spoiled), (alone(with_norm, jnp.zeros(())), loss)],
    ids=["zero_nans", "norm"],
)
def test_a_sum_that_no_layer_reads_needs_no_guess(first, loss):
    """Nor a second state in host memory."""
    tx, placed = optax.chain(first, ADAM), {"stage": 3, "offload": ALL}
    after, *_ = stepped(tx, "after", placed, [QUIET, LOUD], loss)
    backward, _, step, _ = stepped(tx, "backward", placed, [QUIET, LOUD], loss)
    assert_close(both(backward), both(after), 1e-5)
    donated = [each.donated for each in jax.tree.leaves(step.lower(backward, batch(1.0)).args_info)]
    assert all(donated[: len(jax.tree.leaves(backward))])


def test_a_sum_over_what_was_clipped_before():
    """A layer does not know by how much."""
    twice = optax.chain(optax.clip_by_global_norm(1.0), optax.clip_by_global_norm(0.5), ADAM)
    labels = {"blocks": {"w": "twice", "norm": "once"}, "embed": "once"}
    tx = optax.multi_transform({"twice": twice, "once": ADAM}, labels)
    ours, after = (
        stepped(tx, way, {"stage": 3}, [QUIET, LOUD])[0] for way in ("backward", "after")
    )
    assert_near(ours, after)


def in_one_array(updates, state, params=None):
    """A clip by the norm of all gradients, flattened and put together."""
    norm = jnp.linalg.norm(ravel_pytree(updates)[0])
    return jax.tree.map(lambda x: jnp.where(norm < 1, x, x / norm), updates), state


def largest(updates, state, params=None):
    return updates, jax.tree.reduce(jnp.maximum, jax.tree.map(jnp.max, updates))


@pytest.mark.parametrize(
    ("update", "why"),
    [(in_one_array, "reads it with other leaves"), (largest, "of other leaves reads its gradient")],
)
def test_gradients_that_another_update_reads_whole(update, why):
    tx = optax.chain(alone(update, jnp.zeros(())), ADAM)
    with pytest.raises(ValueError, match=rf"params/blocks/w: the update {why}"):
        stepped(tx, "backward", {"stage": 3}, [QUIET])


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    "tx", [CLIPPED, optax.chain(ADAM, CLIP)], ids=["clip of gradients", "clip of updates"]
)
def test_on_gpus_nothing_is_copied_within_host_memory(tx):
    """Nor by kernels: the audit would find it."""
    make = functools.partial(stacks.stacks, tx, dim=512, layers=24)
    plan = zerojax.plan(make, stage=3, mesh=zerojax.aot.mesh("8xH100"), offload="opt_state")
    tokens = zerojax.aot.batch(jax.ShapeDtypeStruct((64,), "int32"), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an older JAX
        step = train_step(stacks.loss, update="backward" if FINDS else "auto")
        report = zerojax.audit(step, plan.abstract(), tokens)
    report.check()
    assert not FINDS or report.memory.host_kept > report.memory.on_host
