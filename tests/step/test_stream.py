"""State in host memory: where it rests, and that any part of it may."""

import functools

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.conftest import make_mesh
from tests.step import stacks
from tests.step.stacks import ALL, BATCH, is_on_host, loss, on_gpus
from tests.support import steps
from tests.support.reference import assert_close

BOTH = steps.BOTH
HALF = zerojax.Offload(opt_state=0.5, min_bytes=0)
PARAMS = zerojax.Offload(opt_state=False, params=True, min_bytes=0)
TWO = {"data": 2}


def planned(offload, make=stacks.stacks):
    return zerojax.plan(make, mesh=make_mesh(2), offload=offload)


def on_host(state):
    paths = jax.tree_util.tree_leaves_with_path(state)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path) for path, x in paths if is_on_host(x)}


@pytest.mark.parametrize(
    ("offload", "paths"),
    [
        (HALF, {"opt_state/0/mu/blocks/w", "opt_state/0/nu/blocks/w"}),
        (PARAMS, {"params/blocks/w", "params/blocks/norm", "params/embed"}),
    ],
)
def test_a_part_of_the_state_rests_there(offload, paths):
    plan = planned(offload)
    state = plan.place(stacks.stacks())
    assert on_host(state) == {leaf.path for leaf in plan.leaves if leaf.is_on_host} == paths
    _, state, metrics = stacks.trained(placing={"offload": offload})
    assert on_host(state) == paths
    stacks.check(state, metrics)


def test_bytes_are_those_of_one_memory():
    plan = planned(HALF)
    w, norm, embed = 3 * 32 * 32 * 4 // 2, 3 * 32 * 4, 64 * 32 * 4 // 2
    assert plan.host_bytes_per_device()["opt_state"] == 2 * w
    assert plan.host_bytes_per_device()["params"] == 0
    on_device = plan.bytes_per_device()
    assert on_device["params"] == w + norm + embed
    assert on_device["opt_state"] == 2 * (norm + embed) + 4


def test_state_that_was_moved_to_the_devices_comes_back():
    plan = planned(ALL)
    state = plan.place(stacks.stacks())
    here = jax.device_put(state.opt_state, jax.memory.Space.Device)
    assert not on_host(here)
    state, metrics = zerojax.train_step(loss)(state.replace(opt_state=here), BATCH)
    assert on_host(state) == {leaf.path for leaf in plan.leaves if leaf.is_on_host}
    stacks.check(state, metrics)


def test_a_loop_of_ones_own():
    """The optimizer that the state carries has its state on the devices while it runs."""
    plan = planned(BOTH)
    state = plan.place(stacks.stacks())
    value_and_grad = zerojax.value_and_grad(loss, plan)

    @functools.partial(jax.jit, static_argnums=2)
    def step(state, batch, brings=True):
        _, grads = value_and_grad(state.params, batch)
        if brings:
            params = jax.device_put(state.params, jax.memory.Space.Device)
            state = state.replace(params=params)
        return plan.constrain(state.apply_gradients(grads=grads))

    with pytest.raises(ValueError, match=r"are in host memory, where optax cannot .* bring all"):
        step(state, BATCH, False)
    new = step(state, BATCH)
    assert on_host(new) == on_host(state) != set()
    wanted, _ = stacks.on_one_device()
    assert_close(jax.device_get(new.params), wanted.params)
    assert_close(jax.device_get(new.opt_state), wanted.opt_state)


def test_parameters_there_are_evaluated():
    row = steps.Row("layers", TWO, {"offload": BOTH}, is_eval=True)
    np.testing.assert_allclose(row.result.metrics["loss"], row.reference[1], rtol=1e-5)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_layers_that_xla_does_not_find_are_read_by_scanned_indices(monkeypatch, prefetch):
    """As with older JAX on GPUs, where a loop's counter finds the layer of its own turn alone."""
    options = {"prefetch": prefetch, "activations": "host"}
    usual = steps.Row("layers", TWO, {"offload": BOTH}, options)
    text = usual.lowered.as_text()
    monkeypatch.setattr("zerojax._features.host_state.are_found", lambda device: False)
    row = steps.Row("layers", TWO, {"offload": BOTH}, options)
    assert row.lowered.as_text() != text
    assert_close(jax.device_get(row.result.state), row.reference[0])


def test_the_plan_says_where_and_how():
    lamb = str(planned(ALL, lambda: stacks.stacks(optax.lamb(1e-3))))
    assert "host, updated at once: reduce_sum mixes layers" in lamb
    assert "optimizer state in host memory" in lamb
    pair = (stacks.stacks().params, stacks.stacks().opt_state)
    without = planned(ALL, pair)
    assert "host, updated as tx= allows: this plan has no tx=" in str(without)
    plan = zerojax.plan(pair, mesh=make_mesh(2), offload=ALL, tx=stacks.adam())
    assert "host, updated layer by layer" in str(plan)
    assert plan == without, "both place the state alike"
    with pytest.warns(UserWarning, match="puts nothing in host memory"):
        assert "device: smaller than 64.0 KiB" in str(planned("opt_state"))
    assert "memory" not in str(planned(None))


# -- compiled for GPUs

OPT_STATE, EVERYTHING = "opt_state", ("opt_state", "params")


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("gpus", "stage", "update", "offload"),
    [
        ("1xH100", 3, "after", OPT_STATE),
        ("8xH100", 3, "after", OPT_STATE),
        ("1xH100", 3, "backward", OPT_STATE),
        ("8xH100", 3, "backward", OPT_STATE),
        ("1xH100", 0, "auto", EVERYTHING),
        ("8xH100", 3, "auto", EVERYTHING),
        ("8xH100", 2, "after", EVERYTHING),
    ],
)
def test_on_gpus_state_travels_beside_the_compute(gpus, stage, update, offload):
    """In place, by the copy engines; and no copy is made in host memory."""
    plan, compiled, report = on_gpus(gpus, stage, update, offload)
    planned, nbytes = plan.host_bytes_per_device(), sum(plan.host_bytes_per_device().values())
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == nbytes
    assert memory.host_temp_size_in_bytes == 0
    assert report.memory.on_host == report.host_bytes("to the host") == nbytes
    assert "waiting for the host" in str(report)
    in_loops = [one for one in report.replay.transfers if one.trips > 1]
    assert in_loops and all(one.asynchronous for one in in_loops)
    fetched = report.host_bytes("to the device") - planned["opt_state"]
    if offload == OPT_STATE:
        assert fetched == 0 and all(one.by_engine for one in in_loops)
        report.check()
        return
    # A layer that forward ended with is not fetched again.
    assert 2 < fetched / planned["params"] <= 3
    if jax.__version_info__ < (0, 11):  # addresses of forward's and backward's would be wrong
        assert all(one.by_engine == (one.trips == 8) for one in in_loops)
    else:
        assert all(one.by_engine for one in in_loops)
        report.check()


@pytest.mark.gpu_code
def test_an_audit_knows_parameters_of_which_none_is_on_the_device():
    report = on_gpus("1xH100", 3, "after", zerojax.Offload(params=True, min_bytes=0))[2]
    assert report.memory.parameters == 0 < report.memory.on_host and report.check()
