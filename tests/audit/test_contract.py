"""The contract of each stage: what breaks it, and how a report says so. `tests/test_steps.py` has
every row of the table of steps keep it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

import zerojax
from tests.support import audits, steps
from tests.support.audits import DIM, LAYERS, loss

PATH = "params/layers/w"


def broken(report, pattern, **limits):
    """The one finding that matches."""
    lines = report.findings(**limits)
    hits = [line for line in lines if re.search(pattern, line)]
    assert len(hits) == 1, "\n".join(lines) or "nothing is wrong"
    return hits[0]


def of_params(params, **options):
    """The plan at stage 3 of a state that SGD trains."""
    make = lambda: TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    return zerojax.plan(make, stage=3, **options)


# -- by mistake


def mistaken(params, tokens):
    """Scales a stack before its loop. Its own collectives are no mistakes."""
    x = params["embed"].astype(jnp.bfloat16)[tokens].astype(jnp.float32)
    columns = jax.lax.all_to_all(jnp.tile(x, (1, 3)), "data", 1, 0, tiled=True)
    moved = jax.lax.ppermute(jnp.sin(x), "data", [(0, 1), (1, 2), (2, 0)])
    everywhere = jax.lax.psum(jnp.tanh(jnp.tile(x, (1, 16))), "data")
    whole = params["layers"] | {"w": params["layers"]["w"] * params["layers"]["w"].mean()}
    scanned = loss(params | {"layers": whole}, tokens)
    return scanned + sum(jnp.mean(jnp.tanh(each) ** 2) for each in (columns, moved, everywhere))


@pytest.fixture(scope="module")
def mistakes():
    """Of a step on padded weights, which is not donated its state, and gets a moment unsharded."""
    row = steps.row("padded3")
    whole = NamedSharding(row.mesh, P())

    def unsharded(path, leaf):
        is_moment = jax.tree_util.keystr(path, simple=True, separator="/").endswith("mu/embed")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole) if is_moment else leaf

    state = jax.tree_util.tree_map_with_path(unsharded, row.plan.abstract())
    return audits.audited(row.plan, mistaken, state=state, donate=False)


SAID = [
    r"gathers all 4 layers of params/layers/w at once \(f32\[4,43,128\].* outside of the loop over "
    r"them. Scan over the stack itself.*zerojax.plan\(..., stacked=",
    # step; norm, w and embed; adam's count and two moments of each
    r"^11 leaves of the state are not donated \(step, params/embed, params/.*and 8 more.*donate",
    r"^opt_state/0/mu/embed reaches the step as .*f32\[4098,128\] per device of \[4096, 128\] "
    r"padded to \[4098, 128\], not as the.*zerojax.shard_train_state or plan.place",
]


def test_mistakes_are_told_at_once_and_each_with_its_remedy(mistakes):
    with pytest.raises(AssertionError) as raised:
        mistakes.check(max_peak_bytes=1)
    first, *lines = str(raised.value).splitlines()
    assert first.endswith(" breaks what stage 3 promises and the limits of this check:")
    assert {line[:4] for line in lines} == {"  - "}
    for pattern in (*SAID, "the peak is"):
        assert any(re.search(pattern, line[4:]) for line in lines), (pattern, lines)
    assert all(any(re.search(one, line) for one in SAID) for line in mistakes.findings())
    kinds = {"all-to-all", "collective-permute", "all-reduce"}
    assert {one.kind for one in mistakes.traffic if one.wire_bytes > 4096} > kinds
    assert zerojax.audit(mistakes.module.text).findings() == []


def test_activations_whose_layout_xla_changes():
    plan = of_params({"w": jnp.ones((128, 128))})
    columns = NamedSharding(plan.mesh, P(None, "data"))

    def mistaken(params, x):
        return jnp.mean((jax.lax.with_sharding_constraint(jnp.tanh(x), columns) @ params["w"]) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x):
        return plan.constrain(state.apply_gradients(grads=jax.grad(mistaken)(state.params, x)))

    x = zerojax.aot.batch(jnp.zeros((1024, 128)), plan)
    report = zerojax.audit(step, plan.abstract(), x, plan=plan)
    sums = r"^all-reduce \S+ sums f32\[1024,128\], 512.0 KiB.* larger than any statistic.*activ"
    broken(report, sums)
    for each in (report, zerojax.audit(report.module.text)):
        broken(each, "^all-to-all.* no stage needs one, so activations or weights.*with_sharding")


def test_involuntary_full_rematerialization():
    """XLA says it on standard error while it compiles, and nowhere else."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, columns = (NamedSharding(mesh, spec) for spec in (P(("a", "b")), P(None, "b")))
    step = jax.jit(lambda x, batch: jax.lax.with_sharding_constraint(jnp.sin(x), columns) * batch)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)
    report = zerojax.audit(step, x, jax.ShapeDtypeStruct((), jnp.float32))
    line = broken(report, "XLA gathers a full array to change its sharding: Involuntary full re")
    assert "The compiler cannot go from sharding" in line and "with_sharding_constraint" in line
    assert "warning: Involuntary full rematerialization" in str(report)


def test_parameters_gathered_too_often():
    """In a loop that should not have them: four microbatches where one was promised."""
    row = steps.row("microbatches3")
    assert row.report.accumulate == 4, "a step says itself how many it has"
    assert zerojax.audit(row.compiled, plan=row.plan, accumulate=4).findings() == []
    # Twice for each microbatch; promised are two gathers and a prefetching loop's two layers.
    line = broken(zerojax.audit(row.compiled, plan=row.plan), "params/layers/w is gathered [678]")
    assert "times a step; stage 3 promises at most 2.5. Look for uses in several jax.ch" in line
    assert "or a gather inside a loop that does not need it there" in line


def by_species(params, batch):
    """NequIP has a matrix for each species of atoms."""
    x = jnp.einsum("na,nab->nb", batch["x"], params["w"][batch["kind"]])
    return jnp.mean((x + params["b"][batch["kind"]]) ** 2)


def recurrent(params, batch):
    """An RNN has a matrix for each gate, and a loop over time carries them all."""

    def cell(h, x):
        gates = jnp.einsum("nd,gde->gne", h, params["w"]) + params["b"][:, None]
        return jnp.tanh(gates[0] + x) * gates[1:].sum(0), None

    h, _ = jax.lax.scan(cell, batch["x"], jnp.stack([batch["x"]] * 3))
    return jnp.mean(h**2)


@pytest.mark.parametrize("stacked", [None, (), "."])
@pytest.mark.parametrize("run", [by_species, recurrent])
def test_what_no_loop_reads_layer_by_layer_counts_no_layers(run, stacked):
    plan = of_params({"w": jnp.ones((5, 32, 32)), "b": jnp.ones((5, 32))}, stacked=stacked)
    assert {leaf.stacked for leaf in plan.params} == {stacked != ()}
    batch = {"x": jnp.ones((16, 32)), "kind": jnp.arange(16) % 5}
    step = zerojax.train_step(run)
    report = zerojax.audit(step, plan.abstract(), zerojax.aot.batch(batch, plan))
    assert report.findings() == [] and "params/w" in {one.serves for one in report.traffic}


def test_layers_that_are_alike_share_a_finding():
    """Layers in a Python loop have weights of their own, and as many lines would hide the rest."""
    plan = of_params({"h": [jnp.zeros((64, 64))] * 3})
    rows = zerojax.aot.batch(jnp.zeros((1024, 64)), plan)
    run = lambda params, x: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), params["h"], x))

    @functools.partial(jax.jit, donate_argnums=0)
    def annotated(state, x):
        return plan.constrain(state.apply_gradients(grads=jax.grad(run)(state.params, x)))

    report = zerojax.audit(annotated, plan.abstract(), rows, plan=plan)
    broken(report, r"the full gradient of params/h/\{0..2\} \(f32\[64,64\]\)")
    assert "params/h/{0..2}" in {sent.serves for sent in report.traffic}
    step = zerojax.train_step(run, accumulate=4)
    report = zerojax.audit(step, plan.abstract(), rows, plan=plan, accumulate=1)
    broken(report, r"^params/h/\{\d..2\} is gathered \d times a step")


def test_a_state_that_cannot_be_recognized():
    row = steps.row("stage3")
    text = row.text.replace("state.params", "given[0].params")
    broken(zerojax.audit(text, plan=row.plan), "Let the step take the state as one argument")


# -- steps that users write without train_step


def by_hand(plan, reduce):
    """Gradients of whole parameters on each device, reduced or not, and the update of shards."""

    def summed(params, tokens):
        return reduce(jax.value_and_grad(loss)(params, tokens))

    def step(state, tokens):
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        grad = jax.shard_map(summed, mesh=plan.mesh, **specs, check_vma=False)
        value, grads = grad(state.params, tokens)
        # Whole until the update, as a clip by global norm may keep them.
        grads = jax.lax.optimization_barrier(grads)
        return plan.constrain(plan.scatter(state).apply_gradients(grads=grads), into=state), value

    return jax.jit(step, donate_argnums=0)


@pytest.mark.parametrize(
    ("where", "reduces"),
    [
        ("6xcpu", True),
        ("cpu", False),
        pytest.param("8xH100", True, marks=pytest.mark.gpu_code),
        pytest.param("v5e:2x4", True, marks=pytest.mark.tpu_code),
    ],
)
def test_gradients_all_reduced_instead_of_scattered_or_not_at_all(where, reduces):
    """Data parallelism by hand: every device sums whole gradients, then keeps its part."""
    plan = audits.planned(where, 1)
    reduce = lambda grads: jax.lax.pmean(grads, "data") if reduces else grads
    report = audits.audited(plan, step=by_hand(plan, reduce))
    if reduces:
        # XLA:TPU reduces and scatters a matrix at once; a vector it sums.
        leaf = "norm" if where == "v5e:2x4" else "w"
        line = broken(report, f"full gradient of params/layers/{leaf} .*promises a reduce-scatter")
        assert re.match(r"all-reduce \S+ sums", line) and "no psum or pmean of gradients" in line
    else:
        broken(report, "no collective reduces the gradient of params/")
        leaves = tuple(dataclasses.replace(leaf, frozen=True) for leaf in plan.leaves)
        frozen = dataclasses.replace(report, plan=dataclasses.replace(plan, leaves=leaves))
        assert not any("no collective" in line for line in frozen.findings())


# -- all-reduces that are allowed, and those that are not


def summed(report, elements, *paths):
    """The findings if the step's one collective summed an array of so many elements."""
    one = report.traffic[0]
    part = dataclasses.replace(one.parts[0], dtype="f32", paths=paths, dims=(elements,))
    one = dataclasses.replace(one, kind="all-reduce", parts=(part,), axes=("data",), scope="")
    return dataclasses.replace(report, traffic=(one,)).findings()


def test_a_full_gradient_is_known_with_its_padding_and_without():
    """[4, 128, 128] rests as [4, 129, 128]; so do the gradients of a loss of padded weights."""
    report = steps.row("padded3").report
    known = {
        (rows, count)
        for rows in (127, 128, 129, 130)
        for count in (1, LAYERS)
        if "full gradient of params/layers/w" in summed(report, count * rows * DIM, PATH)[0]
    }
    # What is larger than it has the joined gradients of several parameters.
    assert known == {(128, 1), (129, 1), *((rows, LAYERS) for rows in (128, 129, 130))}


def test_statistics_of_wide_batch_norms_may_be_reduced():
    """What the README advises: flax's `axis_name` for the statistics of the whole batch."""
    state = {"params": {"w": jnp.ones((64, 64))}, "batch_stats": {"mean": jnp.zeros(4096)}}
    mesh = steps.row("stage3").mesh
    report = dataclasses.replace(steps.row("stage3").report, plan=zerojax.plan(state, mesh=mesh))
    said = "larger than any statistic"
    assert not any(said in line for line in summed(report, 8192))
    assert any(said in line for line in summed(report, 8193))


# -- limits of a check


def test_limits_of_memory_and_overlap():
    report = steps.row("stage3").report
    assert report.findings(max_peak_bytes=report.memory.peak) == []
    line = broken(report, "the peak is", max_peak_bytes=report.memory.peak - 1)
    assert "per device, above max_peak_bytes=" in line and "higher stage" not in line
    assert line.endswith("accumulate=, the host's memory (offload=), or more devices.")
    broken(steps.row("stage2").report, "the peak is.*Use a higher stage", max_peak_bytes=1)
    with pytest.raises(AssertionError, match=r"^the compiled program breaks the limits of this ch"):
        report.check(max_peak_bytes=1)
    broken(report, "needs modelled times.*Pass gpu='H100' to audit", min_overlap=0.5)


# -- programs for GPUs


@pytest.mark.gpu_code
@pytest.mark.parametrize("name", steps.GPUS)
def test_programs_for_gpus_keep_the_contract(name):
    row = steps.row(name)
    report = row.report.check(min_overlap=row.report.overlap)
    assert report.backend == "gpu"
    assert all(leaf.update.padding for leaf in row.plan.params) == name.startswith("6x")
    if name.startswith("16x"):
        assert {(t.group, t.on_host) for t in report.traffic} == {(16, 8)}
    line = broken(report, r"below min_overlap=0.999", min_overlap=0.999)
    assert line.startswith(f"compute is {report.overlap:.3f} of the modelled step")


@pytest.mark.gpu_code
def test_fp32_gathers_where_bf16_was_meant():
    """The layer casts x up instead of its weight down; 0.9 of the matmuls stay narrow."""

    def wide(x, p):
        gathered = p["w"] + jnp.zeros((), jnp.float32)  # used in fp32: gathered in fp32
        return jnp.tanh(x @ (gathered * jnp.cos(gathered)).astype(x.dtype)), None

    def wide_loss(params, tokens):
        x = params["embed"].astype(jnp.bfloat16)[tokens]
        x, _ = jax.lax.scan(jax.checkpoint(wide), x, params["layers"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    report = audits.audited(audits.planned("8xH100", 3), wide_loss)
    lines = report.findings()
    assert lines
    for line in lines:
        assert re.search(r"all-gather \S+ moves params/layers/w in f32, twice the bytes", line)
        assert "precision=Precision(compute='bfloat16')" in line


@pytest.mark.parametrize("where", ["cpu", pytest.param("8xH100", marks=pytest.mark.gpu_code)])
def test_weights_kept_for_backward(where):
    save = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
    saving = functools.partial(loss, wrap=save)
    report = audits.audited(audits.planned(where, 3), saving, regather=False)
    line, *_ = [line for line in report.findings() if "params/layers/w are kept for backw" in line]
    assert f"[{LAYERS},{DIM},{DIM}]" in line and "Leave Schedule(regather=True)" in line


@pytest.mark.parametrize("waits", [True, False])
def test_gradients_that_wait_for_each_other(waits):
    """Nine layers of 64 MiB, in a Python loop, whose gradients are scaled by the sum of all."""
    scaled = lambda grads: jax.tree.map(lambda g: g * sum(map(jnp.sum, grads)), grads)
    same = jax.custom_vjp(lambda params: params)
    same.defvjp(lambda params: (params, None), lambda _, grads: (scaled(grads),))
    plan = of_params([jnp.zeros((4096, 4096))] * 9)

    def train(params, x):
        for w in same(params) if waits else params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    x = zerojax.aot.batch(jax.ShapeDtypeStruct((64, 4096), jnp.float32), plan)
    report = zerojax.audit(zerojax.train_step(train), plan.abstract(), x)
    wait = "the gradients of 9 parameters (params/*), 576.0 MiB of each device, wait for each other"
    lines = [line for line in report.findings() if "wait" in line]
    assert [line.startswith(wait) for line in lines] == [True] * waits
    remedy = "Let layers run as a loop: a scan, or Schedule(roll=True)."
    assert all(remedy in line for line in lines)


def test_a_gather_in_a_loop_that_nothing_hides():
    report = dataclasses.replace(steps.row("stage3").report, backend="gpu")
    one = next(t for t in report.traffic if t.kind == "all-gather" and t.loops)
    slow = dataclasses.replace(one, asynchronous=False, wire_bytes=2**20 + 1)
    with_it = lambda what: dataclasses.replace(report, traffic=(what,))
    line = broken(with_it(slow), "is synchronous inside a loop over layers: nothing hides its time")
    assert line.startswith(f"all-gather {one.name} (params/blocks/")
    assert "Use Schedule(prefetch=True) and" in line
    sent = {"parts": [dataclasses.replace(part, sends="the loss") for part in one.parts]}
    for fine in ({"asynchronous": True}, {"wire_bytes": 2**20}, {"loops": ()}, sent):
        lines = with_it(dataclasses.replace(slow, **fine)).findings()
        assert not any("synchronous" in line for line in lines)
    first = dataclasses.replace(with_it(slow), accumulate=2)
    assert not any("synchronous" in line for line in first.findings()), "of each microbatch"


def test_a_small_step_that_donates_nothing_reduces_its_gradients():
    """Nothing says which output is which parameter, and its collectives are of few bytes."""
    params = {"w": jnp.ones((16, 8))}
    state = params, optax.sgd(0.1).init(params)
    plan = zerojax.plan(state, stage=3, tx=optax.sgd(0.1))
    loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    step = zerojax.train_step(loss, plan=plan, tx=optax.sgd(0.1), donate=False)
    report = zerojax.audit(step, plan.abstract(), jnp.ones((8, 16)), plan=plan)
    assert [line for line in report.findings() if "not donated" not in line] == []
    nothing = dataclasses.replace(report, traffic=[])
    broken(nothing, "no collective reduces the gradient of 0/w")
