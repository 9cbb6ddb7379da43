"""Optimizer state in host memory: the numbers of a step without, and where everything is."""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import FUSED_AS_USERS, make_mesh, mostly_slow
from tests.models import OPTIMIZERS, gpt, odd_gpt
from tests.reference import assert_close, assert_equal_bits, make_state
from zerojax._engine import residuals as _residuals
from zerojax._hlo.transfers import TO_DEVICE, TO_HOST
from zerojax._step import backward as _backward

ALL = zerojax.Offload(min_bytes=0)
BOTH = zerojax.Offload(params=True, min_bytes=0)
STEPS = 5
STATELESS = {"masked"}  # an sgd


def is_on_host(x):
    return x.sharding.memory_kind == "pinned_host"


def run(optimizer, stage, offload, accumulate=1, devices=8, steps=STEPS, **options):
    made = gpt(remat=True) if accumulate == 1 else odd_gpt(2 * devices * accumulate)
    state = zerojax.shard_train_state(
        make_state(made, OPTIMIZERS[optimizer]()), stage, mesh=make_mesh(devices), offload=offload
    )
    step = zerojax.train_step(made.loss, accumulate=accumulate, **options)
    for _ in range(steps):  # one at a time: emulated devices share few threads
        state, metrics = jax.block_until_ready(step(state, made.batch))
    assert step._cache_size() == 1, "compiled more than once"
    return state, metrics


@functools.cache
def on_device(*case):
    return run(case[0], case[1], None, *case[2:], update="after", prefetch=1)


KINDS = {"opt_state": ALL, "both": BOTH, "activations": BOTH}
CASES = [
    case for case in itertools.product(OPTIMIZERS, (0, 1, 2, 3), (1, 4), KINDS)
    if case[0] not in STATELESS or case[3] != "opt_state"
]  # fmt: skip
QUICK = {
    ("lamb", 1, 4, "both"), ("multi_steps", 0, 1, "opt_state"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "stage", "accumulate", "kinds"), mostly_slow(CASES, lambda *case: case in QUICK)
)
def test_the_numbers_are_those_of_state_on_the_devices(
    optimizer, stage, accumulate, kinds, monkeypatch
):
    """As GPUs run it: prefetched, and updated in backward where that can be, which is with one
    microbatch. With four there are padded parameters."""
    wanted, wanted_metrics = on_device(optimizer, stage, accumulate)
    monkeypatch.setattr(_residuals, "SMALL", 0)
    monkeypatch.setattr(_backward, "is_wanted", lambda plan, options, *_: options.accumulate == 1)
    options = {"prefetch": 1, "activations": "host" if kinds == "activations" else None}
    state, metrics = run(optimizer, stage, KINDS[kinds], accumulate, **options)
    assert metrics["loss"] == pytest.approx(float(wanted_metrics["loss"]), rel=1e-6)
    for name in ("params", "opt_state"):
        got, want = jax.device_get((getattr(state, name), getattr(wanted, name)))
        assert_close(got, want, 1e-6, what=name)
    arrays = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert bool(arrays) == (optimizer not in STATELESS)
    assert all(map(is_on_host, arrays))
    params = [x for x in jax.tree.leaves(state.params) if x.ndim]
    assert set(map(is_on_host, params)) == {kinds != "opt_state"} and not is_on_host(state.step)


def test_adam_gives_the_same_bits():
    options = {"update": "after", "compiler_options": FUSED_AS_USERS}
    (state, _), (wanted, _) = (run("adamw", 3, where, **options) for where in (ALL, None))
    assert_equal_bits((state.params, state.opt_state), (wanted.params, wanted.opt_state))


def test_one_device_has_a_host_too():
    (state, _), (wanted, _) = (run("adamw", 0, off, devices=1) for off in (ALL, None))
    for name in ("params", "opt_state"):
        assert_close(*jax.device_get((getattr(state, name), getattr(wanted, name))), 1e-6)
    assert all(is_on_host(x) for x in jax.tree.leaves(state.opt_state) if x.ndim)


def stacks(tx=None, dim=128, layers=4):
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape) / 16
    params = {
        "blocks": {"w": normal(keys[0], layers, dim, dim), "norm": jnp.ones((layers, dim))},
        "embed": normal(keys[1], 2 * dim, dim),
    }
    return TrainState.create(apply_fn=None, params=params, tx=tx or optax.adamw(1e-3))


def loss(params, batch):
    def layer(x, p):
        return x + jnp.tanh((x * p["norm"]) @ p["w"]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][batch], params["blocks"])
    return jnp.mean((x @ params["embed"].T) ** 2)


BATCH = np.arange(32) % 200


def trained(offload, tx=None, stage=3, options=(), **placing):
    state = zerojax.shard_train_state(lambda: stacks(tx), stage, offload=offload, **placing)
    step = zerojax.train_step(loss, **dict(options))
    return state, step


def same_after(steps, **case):
    """A state after steps with its optimizer state in host memory, and one without."""
    ends = []
    for offload in (ALL, None):
        state, step = trained(offload, **case)
        for _ in range(steps):
            state, metrics = jax.block_until_ready(step(state, BATCH))
        ends.append((state, metrics))
    (state, metrics), (wanted, wanted_metrics) = ends
    assert_close(*jax.device_get((state.params, wanted.params)), 1e-6)
    assert_close(*jax.device_get((state.opt_state, wanted.opt_state)), 1e-6)
    assert any(map(is_on_host, jax.tree.leaves(state.opt_state)))
    return metrics, wanted_metrics


def test_the_old_state_is_donated():
    state, step = trained(ALL)
    step(state, BATCH)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_state_is_born_there():
    state, _ = trained(ALL)
    plan = state.tx.plan
    kinds = {leaf.path: leaf.rest.memory for leaf in plan.leaves}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert is_on_host(x) == (kinds[name] == "pinned_host") == ("mu/" in name or "nu/" in name)


def test_updates_that_are_not_finite_are_skipped():
    state, step = trained(ALL, options={"skip_nonfinite": True})
    state, _ = step(state, BATCH)
    before = jax.device_get((state.params, state.opt_state))
    embed = state.params["embed"].at[0, 0].set(np.nan)
    state, metrics = step(state.replace(params={**state.params, "embed": embed}), BATCH)
    assert metrics["skipped"] == 1
    after = jax.device_get((state.params, state.opt_state))
    assert_equal_bits((after[0]["blocks"], after[1]), (before[0]["blocks"], before[1]))


def test_masters_rest_there():
    precision = zerojax.Precision(param="bfloat16", master="float32")
    state, _ = trained(ALL, precision=precision)
    masters = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert len(masters) == 9 and all(map(is_on_host, masters))
    same_after(2, precision=precision)


def test_frozen_leaves_have_none():
    label = lambda params: {"blocks": {"w": "trained", "norm": "frozen"}, "embed": "frozen"}
    tx = optax.multi_transform({"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}, label)
    metrics, wanted = same_after(2, tx=tx)
    assert metrics["loss"] == pytest.approx(float(wanted["loss"]), rel=1e-6)


def test_groups_and_the_host():
    same_after(2, mesh=zerojax.mesh(node=2, gpu=4), groups={"params": "gpu"})


def test_state_that_was_moved_to_the_devices_comes_back():
    state, step = trained(ALL)
    here = jax.device_put(state.opt_state, jax.memory.Space.Device)
    assert not any(map(is_on_host, jax.tree.leaves(here)))
    moved, _ = step(state.replace(opt_state=here), BATCH)
    state, _ = step(trained(ALL)[0], BATCH)
    assert [is_on_host(x) for x in jax.tree.leaves(moved)] == list(
        map(is_on_host, jax.tree.leaves(state))
    )
    assert_close(*jax.device_get((moved.params, state.params)), 1e-6)


def test_a_state_without_its_optimizer():
    """A pair; the plan is told the optimizer, or says that it was not."""
    tx = optax.adam(1e-3)
    params = stacks().params
    pair = (params, tx.init(params))
    text = str(zerojax.plan(pair, offload=ALL))
    assert "host, updated as tx= allows: the plan was given none" in text
    plan = zerojax.plan(pair, offload=ALL, tx=tx)
    assert "host, updated layer by layer" in str(plan)
    step = zerojax.train_step(loss, plan=plan, tx=tx)
    state, _ = step(plan.place(pair), BATCH)
    wanted, _ = zerojax.train_step(loss, plan=zerojax.plan(pair, tx=tx), tx=tx)(
        zerojax.plan(pair, tx=tx).place(pair), BATCH
    )
    assert_close(*jax.device_get((state, wanted)), 1e-6)
    assert all(is_on_host(x) for x in jax.tree.leaves(state[1]) if x.ndim)


def test_a_share_of_the_bytes():
    half = zerojax.Offload(opt_state=0.5, min_bytes=0)
    plan = zerojax.plan(stacks, offload=half)
    on_host = {leaf.path for leaf in plan.leaves if leaf.is_on_host}
    assert on_host == {"opt_state/0/mu/blocks/w", "opt_state/0/nu/blocks/w"}
    host, device = plan.host_bytes_per_device(), plan.bytes_per_device()
    assert host["opt_state"] > device["opt_state"] > host["params"] == 0
    ends = []
    for offload in (half, None):
        state, step = trained(offload)
        ends.append(step(state, BATCH)[0].params)
    assert_close(*jax.device_get(ends), 1e-6)


def test_a_loop_of_ones_own():
    """The optimizer that the state carries has its state on the devices while it runs."""
    state, _ = trained(ALL)
    plan = state.tx.plan
    value_and_grad = zerojax.value_and_grad(loss, plan)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        _, grads = value_and_grad(state.params, batch)
        return plan.constrain(state.apply_gradients(grads=grads))

    wanted, whole = trained(None)
    for _ in range(2):
        state, (wanted, _) = step(state, BATCH), whole(wanted, BATCH)
    assert_close(*jax.device_get((state.opt_state, wanted.opt_state)), 1e-6)
    assert all(is_on_host(x) for x in jax.tree.leaves(state.opt_state) if x.ndim)


def test_a_loop_of_ones_own_brings_parameters_to_the_devices():
    state, _ = trained(BOTH)
    plan = state.tx.plan
    value_and_grad = zerojax.value_and_grad(loss, plan)

    @functools.partial(jax.jit, static_argnums=2)
    def step(state, batch, bring=True):
        _, grads = value_and_grad(state.params, batch)
        if bring:
            params = jax.device_put(state.params, jax.memory.Space.Device)
            state = state.replace(params=params)
        return plan.constrain(state.apply_gradients(grads=grads))

    with pytest.raises(ValueError, match=r"are in host memory, where optax cannot .* bring all"):
        step(state, BATCH, False)
    wanted, whole = trained(None)
    state, (wanted, _) = step(state, BATCH), whole(wanted, BATCH)
    assert_close(*jax.device_get((state.params, wanted.params)), 1e-6)
    assert all(map(is_on_host, jax.tree.leaves(state.params)))
    with pytest.raises(ValueError, match=r"has some in host memory\. Leave 'params' out"):
        zerojax.shards(state.params, plan)


@pytest.mark.parametrize("offload", [ALL, BOTH])
def test_verify_passes(offload):
    state, step = trained(offload)
    assert zerojax.verify(step, state, BATCH).ok


@pytest.mark.parametrize("offload", [ALL, BOTH])
def test_audit_finds_nothing(offload):
    state, step = trained(offload)
    report = zerojax.audit(step, state, BATCH)
    report.check()


@pytest.mark.parametrize(("saved", "wanted"), [(ALL, None), (None, ALL), (BOTH, BOTH)])
def test_checkpoints_know_no_memory(tmp_path, saved, wanted):
    state, step = trained(saved)
    state, _ = step(state, BATCH)
    zerojax.save(tmp_path / "state", state)
    plan = zerojax.plan(stacks, offload=wanted)
    found = zerojax.restore(tmp_path / "state", like=plan)
    assert_equal_bits(found, state)
    arrays = [x for x in jax.tree.leaves(found.opt_state) if x.ndim]
    assert all(is_on_host(x) == (wanted is not None) for x in arrays)
    found, _ = step(found, BATCH)
    state, _ = step(state, BATCH)
    assert_close(*jax.device_get((found.params, state.params)), 1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_parameters_in_host_memory(stage, prefetch):
    """One layer at a time in forward and backward, and to evaluate."""
    (state, step), (wanted, whole) = (
        trained(offload, stage=stage, options={"prefetch": prefetch}) for offload in (BOTH, None)
    )
    evaluate = zerojax.eval_step(loss)
    for _ in range(2):
        state, metrics = jax.block_until_ready(step(state, BATCH))
        wanted, wanted_metrics = jax.block_until_ready(whole(wanted, BATCH))
    assert step._cache_size() == 1
    assert all(map(is_on_host, jax.tree.leaves(state.params)))
    assert metrics["grad_norm"] == pytest.approx(float(wanted_metrics["grad_norm"]), rel=1e-6)
    assert evaluate(state, BATCH)["loss"] == pytest.approx(
        float(evaluate(wanted, BATCH)["loss"]), rel=1e-6
    )
    assert_close(zerojax.gather_params(state), zerojax.gather_params(wanted), 1e-6)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_layers_that_xla_does_not_find_are_read_by_scanned_indices(monkeypatch, prefetch):
    """As with older JAX on GPUs, where a loop's counter finds the layer of its own turn alone."""
    texts, ends = [], []
    for found in (True, False):
        monkeypatch.setattr(
            "zerojax._step.host_slices.are_found", lambda device, found=found: found
        )
        state, step = trained(BOTH, options={"prefetch": prefetch})
        texts.append(step.lower(state, BATCH).as_text())
        ends.append(jax.device_get(step(state, BATCH)[0].params))
    assert_close(*ends, 1e-6)
    assert texts[0] != texts[1]


def test_parameters_in_host_memory_with_groups_masters_and_frozen_leaves():
    mesh = zerojax.mesh(node=2, gpu=4)
    label = lambda params: {"blocks": {"w": "trained", "norm": "frozen"}, "embed": "trained"}
    tx = optax.multi_transform({"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}, label)
    cases = (
        {"mesh": mesh, "groups": {"params": "gpu"}},
        {"mesh": mesh, "groups": {"params": "gpu"}, "options": {"accumulate": 2}},
        {"precision": zerojax.Precision(param="bfloat16", master="float32")},
        {"tx": tx},
    )
    for case in cases:
        state, step = trained(BOTH, **case)
        wanted, whole = trained(None, **case)
        for _ in range(2):
            state, _ = jax.block_until_ready(step(state, BATCH))
            wanted, _ = jax.block_until_ready(whole(wanted, BATCH))
        assert all(map(is_on_host, jax.tree.leaves(state.params)))
        assert_close(*jax.device_get((state.params, wanted.params)), 1e-6)


def test_parameters_alone():
    only = zerojax.Offload(opt_state=False, params=True, min_bytes=0)
    state, step = trained(only)
    wanted, whole = trained(None)
    for _ in range(2):
        state, wanted = step(state, BATCH)[0], whole(wanted, BATCH)[0]
    assert all(map(is_on_host, jax.tree.leaves(state.params)))
    assert not any(map(is_on_host, jax.tree.leaves(state.opt_state)))
    assert_close(*jax.device_get((state.params, wanted.params)), 1e-6)


def test_the_plan_says_where_and_how():
    lamb = zerojax.plan(lambda: stacks(optax.lamb(1e-3)), offload=ALL)
    text = str(lamb)
    assert "host, updated at once: reduce_sum mixes layers" in text
    assert "optimizer state in host memory" in text
    with pytest.warns(UserWarning, match="puts nothing in host memory"):
        text = str(zerojax.plan(stacks, offload="opt_state"))
    assert "device: smaller than 64.0 KiB" in text
    assert "memory" not in str(zerojax.plan(stacks))


@functools.cache
def on_gpus(devices, offload="opt_state", stage=3, update="after"):
    """A plan, and the audit of a step for it, compiled for GPUs; older JAX warns."""
    mesh = zerojax.aot.mesh(f"{devices}xH100")
    make = functools.partial(stacks, dim=512, layers=8)
    plan = zerojax.plan(make, stage=stage, mesh=mesh, offload=offload)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((64,), "int32"), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = zerojax.train_step(loss, plan=plan, update=update)
        compiled = step.lower(plan.abstract(), batch).compile()
    return plan, compiled, zerojax.audit(compiled, plan=plan)


@pytest.mark.gpu_code
@pytest.mark.parametrize("devices", [1, 8])
def test_on_gpus_each_byte_travels_once_each_way(devices):
    """In place, by the copy engines, beside the compute; and no copy is made in host memory."""
    plan, compiled, report = on_gpus(devices)
    planned = sum(plan.host_bytes_per_device().values())
    assert planned == 2 * 4 * (8 * 512**2 + 1024 * 512) // devices  # norms stay on the devices
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == planned
    assert memory.host_temp_size_in_bytes == 0
    assert report.host_bytes(TO_DEVICE) == report.host_bytes(TO_HOST) == planned
    report.check()
    in_loops = [one for one in report.replay.transfers if one.trips > 1]
    assert in_loops and all(one.by_engine and one.asynchronous for one in in_loops)
    assert report.memory.on_host == planned
    assert report.memory.optimizer == plan.bytes_per_device()["opt_state"]
    assert report.memory.peak < sum(plan.bytes_per_device().values()) + planned + 2**24
    text = str(report)
    assert "host memory" in text and "waiting for the host" in text


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("devices", "stage", "update"),
    [(1, 0, "auto"), (8, 3, "auto"), (8, 3, "after"), (8, 2, "after")],
)
def test_on_gpus_parameters_travel_beside_the_compute(devices, stage, update):
    plan, compiled, report = on_gpus(devices, ("opt_state", "params"), stage, update)
    planned = plan.host_bytes_per_device()
    memory = compiled.memory_analysis()
    nbytes = sum(planned.values())
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == nbytes
    assert memory.host_temp_size_in_bytes == 0
    assert report.host_bytes(TO_HOST) == nbytes
    times = (report.host_bytes(TO_DEVICE) - planned["opt_state"]) / planned["params"]
    assert 2 < times <= 3  # a layer that forward ended with is not fetched again
    in_loops = [one for one in report.replay.transfers if one.trips > 1]
    assert in_loops and all(one.asynchronous for one in in_loops)
    if jax.__version_info__ < (0, 11):  # addresses of forward's and backward's would be wrong
        assert all(one.by_engine == (one.trips == 8) for one in in_loops)
    else:
        assert all(one.by_engine for one in in_loops)
        report.check()


@pytest.mark.gpu_code
def test_on_gpus_slices_are_those_of_the_layer():
    """Of a doubled loop they are two layers apart; older XLA finds those of plain loops alone."""
    _, compiled, _ = on_gpus(1)
    found = set(re.findall(r'byte_offset":"(\d+)","byte_stride":"([1-9]\d*)"', compiled.as_text()))
    layer = 4 * 512**2
    addresses = {(int(a), int(b)) for a, b in found}
    if jax.__version_info__ < (0, 11):
        assert {(0, layer)} <= addresses and not {b for _, b in addresses} & {2 * layer}
    else:
        assert {(0, layer), (layer, layer)} <= addresses


@pytest.mark.gpu_code
def test_the_audit_draws_copies(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    (axes,) = on_gpus(8)[2].plot(str(tmp_path / "step.png")).axes
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels >= {TO_DEVICE, TO_HOST, "compute"}


@pytest.mark.gpu_code
def test_a_plan_with_less_in_host_memory_is_told():
    _, compiled, _ = on_gpus(8)
    other = zerojax.plan(
        functools.partial(stacks, dim=512, layers=8), stage=3, mesh=zerojax.aot.mesh("8xH100")
    )
    with pytest.raises(AssertionError, match=r"plan has 0 B there. Lower the step with plan\.abs"):
        zerojax.audit(compiled, plan=other).check()
