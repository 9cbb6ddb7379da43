"""Updates inside backward: the numbers of an update after it, without a tree of gradients."""

import functools
import itertools
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.conftest import make_mesh, mostly_slow
from tests.models import EPS, OPTIMIZERS
from tests.reference import assert_close
from tests.step import tensor
from tests.step.test_stream import ALL, BATCH, is_on_host, loss, stacks
from zerojax import _compat
from zerojax._hlo.transfers import TO_DEVICE, TO_HOST
from zerojax._step import backward as _backward, grad as _grad

LAYERS, DIM = 4, 128
MIXED = {"adafactor", "lamb", "clip_schedule", "multi_steps", "novograd"}  # not layer by layer
adam = functools.partial(optax.adamw, 1e-3, eps=EPS)


def run(update, make=stacks, *, stage=3, devices=8, steps=3, loss=loss, batch=BATCH, **options):
    """A state after steps, the last metrics, and the step."""
    placing = {
        k: options.pop(k) for k in ("offload", "mesh", "groups", "precision") if k in options
    }
    placing = {"mesh": make_mesh(devices), **placing}
    state = zerojax.shard_train_state(make, stage, **placing)
    step = zerojax.train_step(loss, update=update, **options)
    for _ in range(steps):
        state, metrics = jax.block_until_ready(step(state, batch))
    assert step._cache_size() == 1, "compiled more than once"
    return state, metrics, step


def same(*args, tolerance=1e-6, **options):
    """Runs a step that updates in backward beside one that does after; returns the first's end."""
    state, metrics, step = run("backward", *args, **options)
    wanted, wanted_metrics, _ = run("after", *args, **options)
    for got, want in ((state, wanted), (metrics, wanted_metrics)):
        got, want = jax.device_get((got, want))
        assert_close(jax.tree.leaves(got), jax.tree.leaves(want), tolerance)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert got.sharding == want.sharding
    return state, metrics, step


def carried_by_loops(step, *args):
    """The shapes of what is carried by the loops over layers that update some: of the scans that
    have as many layers, those that take a square root (Adam's)."""
    jaxpr = step.trace(*args).jaxpr.jaxpr
    shapes = []
    for eqn in _compat.every_eqn(jaxpr):
        if eqn.primitive.name != "scan":
            continue
        inner, _ = _compat.inner_jaxpr(eqn)
        if any(e.primitive.name == "sqrt" for e in _compat.every_eqn(inner)):
            consts, carry = _compat.scan_counts(eqn.params)
            shapes += [v.aval.shape for v in eqn.invars[consts : consts + carry]]
    return shapes


CASES = list(itertools.product(sorted(OPTIMIZERS.keys() - MIXED), (0, 1, 2, 3), (0, 1)))
QUICK = {("adamw", 3, 1), ("inject_hyperparams", 1, 0)}


@pytest.mark.parametrize(
    ("optimizer", "stage", "prefetch"), mostly_slow(CASES, lambda *case: case in QUICK)
)
def test_the_numbers_are_those_of_updates_after_backward(optimizer, stage, prefetch):
    make = functools.partial(stacks, OPTIMIZERS[optimizer]())
    same(lambda: make(), stage=stage, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_loop_carries_the_state_and_no_gradients(stage, prefetch):
    """Each stack with its moments, in place of a stack of gradients."""
    state, _, step = run("backward", stage=stage, prefetch=prefetch, steps=1)
    found = carried_by_loops(step, state, BATCH)
    own, part = (LAYERS, DIM, DIM), (LAYERS, DIM // 8, DIM) if stage else (LAYERS, DIM, DIM)
    if part != own and stage == 2:  # the parameter is whole
        assert found.count(own) == 1 and found.count(part) == 2
    else:
        assert found.count(part) == 3
    after = zerojax.train_step(loss, update="after", prefetch=prefetch)
    assert not carried_by_loops(after, state, BATCH)


def test_one_device():
    same(devices=1, stage=0)


@pytest.mark.parametrize("stage", mostly_slow([1, 3], lambda stage: stage == 3))
def test_state_in_host_memory(stage):
    state, *_ = same(stage=stage, offload=ALL, prefetch=1)
    assert all(map(is_on_host, jax.tree.leaves(state.opt_state[0].mu)))


def test_the_old_state_is_donated():
    state, _, step = run("backward", steps=1)
    step(state, BATCH)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_the_norm_of_gradients_counts_those_that_are_gone():
    _, metrics, _ = run("backward", steps=1)
    state = stacks()
    wanted = optax.tree.norm(jax.grad(loss)(state.params, BATCH))
    np.testing.assert_allclose(metrics["grad_norm"], wanted, rtol=1e-5)


@pytest.mark.parametrize("devices", [3, 8])
def test_a_mean_over_any_number_of_devices(devices):
    """Of three the mean has a factor that is no power of two, and the stacks are padded."""
    batch = np.arange(8 * devices) % 200
    if devices == 3:
        with pytest.raises(ValueError, match="update='backward', and no parameter can be"):
            run("backward", devices=3, batch=batch)
        same(lambda: stacks(dim=96), devices=3, batch=batch)
    else:
        same(batch=batch)


def test_masters_and_narrow_parameters():
    precision = zerojax.Precision(param="bfloat16", master="float32")
    state, *_ = same(precision=precision)
    assert state.params["blocks"]["w"].dtype == jnp.bfloat16


def test_dtypes_to_compute_and_to_reduce_in():
    same(precision=zerojax.Precision(compute="bfloat16", reduce="float32"), stage=2, prefetch=1)


def test_groups():
    mesh = zerojax.mesh(node=2, gpu=4)
    same(mesh=mesh, groups={"params": "gpu"}, prefetch=1)
    same(mesh=mesh, groups={"params": "gpu", "grads": "gpu", "opt_state": "gpu"})
    # Weights rest whole: each device updates the shard that is its own by both axes.
    same(mesh=mesh, groups={"opt_state": ("gpu", "node")}, stage=1)


@pytest.mark.parametrize("stage", mostly_slow([1, 3], lambda stage: stage == 3))
def test_a_tensor_axis(stage):
    mesh = tensor.cpu_mesh()
    ends = []
    for update in ("backward", "after"):
        state = tensor.placed(mesh, stage)
        step = zerojax.train_step(tensor.scanned, update=update)
        for _ in range(2):
            state, metrics = jax.block_until_ready(step(state, tensor.BATCH))
        ends.append((jax.tree.leaves(state), metrics))
    assert_close(*jax.device_get(ends), 1e-6)
    for got, want in zip(ends[0][0], ends[1][0], strict=True):
        assert got.sharding == want.sharding


def test_frozen_leaves():
    label = lambda params: {"blocks": {"w": "trained", "norm": "frozen"}, "embed": "frozen"}
    tx = optax.multi_transform({"trained": adam(), "frozen": optax.set_to_zero()}, label)
    state, _, step = same(lambda: stacks(tx))
    assert carried_by_loops(step, state, BATCH).count((LAYERS, DIM // 8, DIM)) == 3


class Averaged(TrainState):
    """With an average of the parameters."""

    ema: dict

    def apply_gradients(self, *, grads, **fields):
        new = super().apply_gradients(grads=grads, **fields)
        ema = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, self.ema, new.params)
        return new.replace(ema=ema)


def test_an_average_of_the_parameters_goes_with_them():
    def make():
        params = stacks().params
        ema = jax.tree.map(jnp.copy, params)
        return Averaged.create(apply_fn=None, params=params, tx=adam(), ema=ema)

    same(make)


def test_a_loop_from_the_last_layer_to_the_first():
    def backwards(params, batch):
        layer = jax.checkpoint(lambda x, p: (x + jnp.tanh((x * p["norm"]) @ p["w"]), None))
        x, _ = jax.lax.scan(layer, params["embed"][batch], params["blocks"], reverse=True)
        return jnp.mean((x @ params["embed"].T) ** 2)

    for prefetch in (0, 1):
        same(loss=backwards, prefetch=prefetch)


def test_a_loop_in_a_checkpoint():
    """The loop is not at the top: its weights are updated after backward, like the others."""
    outer = lambda params, batch: jax.checkpoint(loss)(params, batch)
    unread = "its only reader must be a scan over its layers, in no other loop or checkpoint"
    with pytest.raises(ValueError, match=f"params/blocks/w: {unread}"):
        run("backward", loss=outer)


def test_a_stack_that_is_read_twice_is_updated_after():
    def twice(params, batch):
        return loss(params, batch) + 0.1 * jnp.sum(params["blocks"]["w"] ** 2)

    state, _, step = same(loss=twice)
    assert (LAYERS, DIM // 8, DIM) not in carried_by_loops(step, state, BATCH)
    assert (LAYERS, DIM) in carried_by_loops(step, state, BATCH)  # the norms are


def with_a_teacher():
    params = {**stacks().params, "teacher": stacks().params["blocks"]}
    return TrainState.create(apply_fn=None, params=params, tx=adam())


def blocks(x, p):
    layer = lambda x, p: (x + jnp.tanh((x * p["norm"]) @ p["w"]), None)
    return jax.lax.scan(jax.checkpoint(layer), x, p)[0]


def distilled(params, batch):
    x = params["embed"][batch]
    teacher = jax.lax.stop_gradient(blocks(x, params["teacher"]))
    return jnp.mean((blocks(x, params["blocks"]) - teacher) ** 2)


def probed(params, batch):
    x = params["embed"][batch]
    probe = jnp.argmax(blocks(x, params["teacher"]), -1)
    return jnp.mean(blocks(x, params["blocks"]) ** 2), {"probe": jnp.mean(probe)}


def floored(params, batch):
    """The teacher's stack is scanned with the other one, and has no gradient there."""

    def layer(x, both):
        p, q = both
        return x + jnp.tanh((x * p["norm"]) @ p["w"]) + jnp.floor(x @ q["w"]), None

    pairs = params["blocks"], params["teacher"]
    return jnp.mean(jax.lax.scan(layer, params["embed"][batch], pairs)[0] ** 2)


@pytest.mark.parametrize(
    ("loss", "prefetch"),
    mostly_slow(
        itertools.product((distilled, probed, floored), (0, 1)),
        lambda loss, prefetch: loss is not distilled and prefetch == (loss is probed),
    ),
)
def test_stacks_that_no_gradient_leads_to(loss, prefetch):
    """JAX takes zeros for their gradients, which are no new parameters."""
    state, _, _ = same(with_a_teacher, loss=loss, prefetch=prefetch)
    old = with_a_teacher().params["teacher"]
    got = jax.device_get(state.params["teacher"])
    for name, leaf in jax.device_get(old).items():  # weight decay, and no more
        np.testing.assert_allclose(got[name], leaf, rtol=1e-4)


def test_one_that_no_gradient_leads_to_is_named():
    def frozen(params, batch):
        kept = jax.lax.stop_gradient(blocks(params["embed"][batch], params["blocks"]))
        return jnp.mean(kept) + jnp.mean(params["embed"] ** 2)

    with pytest.raises(ValueError, match="params/blocks/w: it has no gradient"):
        run("backward", loss=frozen, steps=1)


def test_why_not_is_told():
    params = {"w": stacks().params["blocks"]["w"]}  # alone, its shape does not show a stack
    alone = lambda: TrainState.create(apply_fn=None, params=params, tx=adam())
    scanned = lambda params, batch: jnp.mean(tanh_of(params, batch) ** 2)
    tanh_of = lambda params, batch: jax.lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), jnp.ones((len(batch), DIM)), params["w"]
    )[0]
    with pytest.raises(ValueError, match=r"params/w: the plan does not take it .*stacked= names"):
        run("backward", alone, loss=scanned, steps=1)
    padded = r"params/blocks/w: it is padded \(pad=False replicates it\)"
    with pytest.raises(ValueError, match=padded) as info:
        run("backward", lambda: stacks(dim=DIM + 1), steps=1)
    assert "stacked=" not in str(info.value)


def test_fields_and_streams_of_a_loss():
    """Fields that the loss updates, an aux and a key."""

    class WithCount(TrainState):
        seen: jax.Array

    def make():
        state = stacks()
        return WithCount.create(apply_fn=None, params=state.params, tx=adam(), seen=jnp.float32(0))

    def counted(params, batch, seen):
        return loss(params, batch), {"seen": seen + 1, "rows": jnp.mean(batch * 1.0)}

    state, metrics, _ = same(make, loss=counted, mutable=("seen",))
    assert state.seen == 3 and metrics["aux"]["rows"] == np.mean(BATCH)


def test_verify_and_audit():
    state, _, step = run("backward", steps=1, prefetch=1)
    assert zerojax.verify(step, state, BATCH).ok
    zerojax.audit(step, state, BATCH).check()


def test_a_pair_and_its_optimizer():
    tx, params = adam(), stacks().params
    pair = (params, tx.init(params))
    plan = zerojax.plan(pair, tx=tx)
    ends = []
    for update in ("backward", "after"):
        step = zerojax.train_step(loss, plan=plan, tx=tx, update=update)
        ends.append(step(plan.place(pair), BATCH))
    assert_close(*jax.device_get([jax.tree.leaves(end) for end in ends]), 1e-6)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"accumulate": 2}, "accumulate=2 needs all gradients first"),
        ({"regather": False}, "regather=False needs"),
        ({"skip_nonfinite": True}, "a step that skips what is not finite needs"),
    ],
)
def test_what_needs_all_gradients_first(options, what):
    with pytest.raises(ValueError, match=what):
        zerojax.train_step(loss, update="backward", **options)
    run("auto", steps=1, **options)


def on_gpu(
    gradients=3.7e9, axes=("data",), kind="NVIDIA H100 80GB HBM3", devices=8, params=0, tensor=1
):
    """Stands for a plan of GPUs that are not here: the moments of 7.5B, in 8 parts."""
    device = types.SimpleNamespace(device_kind=kind, process_index=0, slice_index=0)
    return types.SimpleNamespace(
        mesh=types.SimpleNamespace(devices=np.array([device] * devices), size=devices),
        size=devices // tensor,
        groups=types.SimpleNamespace(opt_state=("data",), params=axes),
        host_bytes_per_device=lambda: {"opt_state": 7.5e9, "params": params},
        gradient_bytes=lambda: gradients,
    )


@pytest.mark.parametrize(
    ("plan", "slow"),
    [
        (on_gpu(), [1, 2]),  # eight of them share 28 GB/s
        (on_gpu(devices=1), [1]),  # one has 50 GB/s
        (on_gpu(tensor=2), [1, 2, 3, 4]),  # each computes half as much
        (on_gpu(gradients=20e9), []),  # a quarter of the memory
        (on_gpu(axes=()), []),  # at stage 2 updated weights are all-gathered as well
        (on_gpu(params=3.7e9), []),  # who sends parameters there, too, lacks memory
        (on_gpu(kind="cpu"), []),
    ],
)
def test_which_is_faster(plan, slow):
    """The time of one way, against backward's for some sequences of 1024 tokens."""
    sequence = 2 * 7.5e9 * 1024  # FLOPs of forward
    found = [n for n in (1, 2, 3, 4) if _backward.is_better_after(plan, n * sequence)]
    assert found == slow


@pytest.mark.parametrize("slow", [False, True])
def test_auto_takes_the_faster_one(slow, monkeypatch):
    monkeypatch.setattr(_backward, "is_wanted", lambda *_: True)
    flops = []
    monkeypatch.setattr(_grad, "is_better_after", lambda _, count: flops.append(count) or slow)
    state, _, step = run("auto", steps=1)
    assert bool(carried_by_loops(step, state, BATCH)) == (not slow)
    rows = len(BATCH) // 8
    assert set(flops) == {2 * rows * DIM * (LAYERS * DIM + 2 * DIM)}


def test_what_is_not_known():
    with pytest.raises(ValueError, match="must be 'backward', 'after' or 'auto', got 'later'"):
        zerojax.train_step(loss, update="later")


@pytest.mark.parametrize(
    "optimizer", mostly_slow(sorted(MIXED), lambda name: name in ("adafactor", "clip_schedule"))
)
def test_optimizers_that_mix_layers_are_refused(optimizer):
    make = functools.partial(stacks, OPTIMIZERS[optimizer]())
    with pytest.raises(ValueError, match=r"no parameter can be updated there \(params/blocks/"):
        run("backward", lambda: make(), steps=1)
    run("auto", lambda: make(), steps=1)


# -- compiled for GPUs


@functools.cache
def on_gpus(gpus, stage, update, offload=None):
    """A plan, and the audit of a step for it; older JAX warns."""
    mesh = zerojax.aot.mesh(gpus)
    make = functools.partial(stacks, dim=512, layers=24)
    plan = zerojax.plan(make, stage=stage, mesh=mesh, offload=offload)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((64,), "int32"), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = zerojax.train_step(loss, plan=plan, update=update)
        compiled = step.lower(plan.abstract(), batch).compile()
    return plan, compiled, zerojax.audit(compiled, plan=plan)


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("gpus", "stage"),
    mostly_slow([("8xH100", 3), ("8xH100", 2), ("1xH100", 0)], lambda _, stage: stage != 2),
)
def test_on_gpus_no_stack_of_gradients_is_kept(gpus, stage):
    plan, _, report = on_gpus(gpus, stage, "backward")
    _, _, after = on_gpus(gpus, stage, "after")
    report.check()
    stack = 4 * 24 * 512**2 // plan.size
    assert report.memory.peak < after.memory.peak - 0.5 * stack


@pytest.mark.gpu_code
def test_on_gpus_updated_weights_are_gathered_in_the_loop():
    """At stage 2, each layer's beside the compute of another."""
    _, _, report = on_gpus("8xH100", 2, "backward")
    _, _, after = on_gpus("8xH100", 2, "after")
    size = 4 * 512**2  # of one layer, float32

    def gathers(report):
        return [one for one in report.replay.collectives if one.instruction.base == "all-gather"
                and one.wire >= size * 7 / 8]  # fmt: skip

    in_loop = [one for one in gathers(report) if one.trips > 1]
    assert in_loop and all(one.asynchronous and one.between for one in in_loop)
    assert sum(one.wire * one.trips for one in gathers(report)) == pytest.approx(
        sum(one.wire * one.trips for one in gathers(after)), rel=0.01
    )


@pytest.mark.gpu_code
@pytest.mark.parametrize("gpus", ["1xH100", "8xH100"])
def test_on_gpus_state_travels_inside_backward(gpus):
    """Where XLA finds the slices; elsewhere it is fetched after backward."""
    plan, compiled, report = on_gpus(gpus, 3, "backward", "opt_state")
    planned = sum(plan.host_bytes_per_device().values())
    assert report.host_bytes(TO_DEVICE) == report.host_bytes(TO_HOST) == planned
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == planned
    assert memory.host_temp_size_in_bytes == 0
    report.check()
    in_loops = [one for one in report.replay.transfers if one.trips > 1]
    assert in_loops and all(one.by_engine and one.asynchronous for one in in_loops)
    after = on_gpus(gpus, 3, "after", "opt_state")[2]
    if jax.__version_info__ >= (0, 11):
        assert report.memory.peak < after.memory.peak


@pytest.mark.gpu_code
def test_on_gpus_state_that_travels_for_long_is_updated_after():
    """Moments of 25 MB, and a backward of microseconds."""
    reports = [on_gpus("1xH100", 3, update, "opt_state")[2] for update in _backward.WHEN]
    in_backward, after, auto = (report.memory.peak for report in reports)
    assert auto == after != in_backward
