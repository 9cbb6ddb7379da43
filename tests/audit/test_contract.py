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
from tests import audits, steps
from tests.audits import DIM, LAYERS, loss

PATH = "params/layers/w"


def broken(report, *patterns, **limits):
    """The one finding that matches every pattern."""
    found = report.findings(**limits)
    hits = [line for line in found if all(re.search(p, line) for p in patterns)]
    assert len(hits) == 1, "\n".join(found) or "nothing is found"
    with pytest.raises(AssertionError) as raised:
        report.check(**limits)
    assert hits[0] in str(raised.value)
    return hits[0]


def audited(row, loss_fn=loss, step=None, state=None, **options):
    """The audit of another step on a row's plan, compiled for shapes."""
    step = zerojax.train_step(loss_fn, **options) if step is None else step
    state = row.plan.abstract() if state is None else state
    return zerojax.audit(step, state, audits.tokens(row.plan), plan=row.plan)


# -- by mistake


def mistaken(params, tokens):
    """Reads the table's rows for columns, sums activations, and scales a stack before its loop."""
    x = params["embed"][tokens]
    columns = jax.lax.all_to_all(jnp.tile(x, (1, 3)), "data", 1, 0, tiled=True)
    everywhere = jax.lax.psum(jnp.tanh(jnp.tile(x, (1, 16))), "data")
    whole = params["layers"] | {"w": params["layers"]["w"] * params["layers"]["w"].mean()}
    scanned = loss(params | {"layers": whole}, tokens)
    return scanned + jnp.mean(jnp.tanh(columns) ** 2) + jnp.mean(everywhere**2)


@pytest.fixture(scope="module")
def mistakes():
    """Of a step on padded weights, which is not donated its state, and gets a moment unsharded."""
    row = steps.row("padded3")
    whole = NamedSharding(row.mesh, P())

    def unsharded(path, leaf):
        is_moment = jax.tree_util.keystr(path, simple=True, separator="/").endswith("mu/embed")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole) if is_moment else leaf

    state = jax.tree_util.tree_map_with_path(unsharded, row.plan.abstract())
    return audited(row, mistaken, state=state, donate=False)


def test_a_stack_gathered_at_once_outside_its_loop(mistakes):
    found = [line for line in mistakes.findings() if "gathers all 4 layers" in line]
    assert found and all("params/layers/w at once (f32[4,43,128]" in line for line in found)
    assert all("zerojax.plan(..., stacked=" in line for line in found)
    assert "outside of the loop over them. Scan over the stack itself" in found[0]


def test_activations_that_change_their_layout(mistakes):
    found = [line for line in mistakes.findings() if "all-to-all" in line]
    assert found and "no stage needs one, so activations or weights change their" in found[0]
    assert "with_sharding_constraint" in found[0]


def test_a_big_all_reduce_of_activations(mistakes):
    found = [line for line in mistakes.findings() if "larger than any statistic" in line]
    assert found and re.match(r"all-reduce \S+ sums f32\[\d+,2048\], 256.0 KiB", found[0])
    assert "activations summed over the data axis" in found[0]


def test_a_state_that_is_not_donated(mistakes):
    line = broken(mistakes, "leaves of the state are not donated")
    # step; norm, w and embed; adam's count and two moments of each
    assert line.startswith("11 leaves of the state are not donated (step, params/embed, params/")
    assert "and 8 more" in line and "donate_argnums=0" in line
    broken(steps.row("not_donated").report, r"leaves of the state are not donated")


def test_an_optimizer_leaf_that_is_replicated(mistakes):
    line = broken(mistakes, "opt_state/0/mu/embed reaches the step as")
    assert "f32[4098,128] per device of [4096, 128] padded to [4098, 128], not as the" in line
    assert "zerojax.shard_train_state or plan.place" in line


def test_all_findings_are_told_at_once(mistakes):
    with pytest.raises(AssertionError) as raised:
        mistakes.check(max_peak_bytes=1)
    lines = str(raised.value).splitlines()
    assert lines[0].endswith(" breaks the contract of stage 3 and the limits of this check:")
    assert {line[:4] for line in lines[1:]} == {"  - "} and len(lines) >= 7


def test_without_a_plan_only_what_no_stage_does_is_wrong(mistakes):
    (found,) = {line.split()[0] for line in zerojax.audit(mistakes.module.text).findings()}
    assert found == "all-to-all"


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


def test_a_state_that_cannot_be_recognized():
    row = steps.row("stage3")
    text = row.text.replace("state.params", "given[0].params")
    found = zerojax.audit(text, plan=row.plan).findings()
    assert any("Let the step take the state as one argument" in line for line in found)


# -- steps that users write without train_step


def by_hand(plan, reduce):
    """Gradients of whole parameters on each device, reduced or not, and the update of shards."""

    def summed(params, tokens):
        return reduce(jax.value_and_grad(loss)(params, tokens))

    def step(state, tokens):
        grad = jax.shard_map(
            summed, mesh=plan.mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
        value, grads = grad(state.params, tokens)
        # Whole until the update, as a clip by global norm may keep them.
        grads = jax.lax.optimization_barrier(grads)
        return plan.constrain(plan.scatter(state).apply_gradients(grads=grads), into=state), value

    return jax.jit(step, donate_argnums=0)


def planned(where, stage):
    return zerojax.plan(audits.make_state, stage=stage, mesh=audits.mesh_of(where))


def test_user_written_steps_keep_the_contract():
    row = steps.row("padded2")
    grad = zerojax.value_and_grad(loss, row.plan)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        value, grads = grad(state.params, batch)
        new = row.plan.scatter(state).apply_gradients(grads=grads)
        return row.plan.constrain(new, into=state), value

    assert audited(row, step=step).findings() == []


@pytest.mark.parametrize("where", ["6xcpu", pytest.param("8xH100", marks=pytest.mark.gpu_code)])
def test_gradients_all_reduced_instead_of_scattered(where):
    """Data parallelism by hand: every device sums whole gradients, then keeps its part."""
    plan = planned(where, 1)
    step = by_hand(plan, lambda found: jax.lax.pmean(found, "data"))
    report = zerojax.audit(step, plan.abstract(), audits.tokens(plan))
    line = broken(report, "full gradient of params/layers/w ", "promises a reduce-scatter")
    assert re.match(r"all-reduce \S+ sums", line) and "no psum or pmean of gradients" in line


def test_gradients_that_nobody_reduces():
    plan = planned("cpu", 1)
    report = zerojax.audit(by_hand(plan, lambda found: found), plan.abstract(), audits.tokens(plan))
    assert any("no collective reduces the gradient of params/" in x for x in report.findings())


# -- all-reduces that are allowed, and those that are not


def summed(report, elements, *paths):
    """The findings if the step's one collective summed an array of so many elements."""
    one = report.traffic[0]
    part = dataclasses.replace(
        one.parts[0], dtype="f32", elements=elements, nbytes=4.0 * elements, paths=paths
    )
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


def test_rows_alone_are_a_reduction():
    make_state = lambda: TrainState.create(
        apply_fn=None, params={"embed": jnp.ones((2**12, 64))}, tx=optax.sgd(0.1)
    )
    plan = zerojax.plan(make_state, mesh=audits.mesh_of("cpu"))
    step = zerojax.train_step(lambda params, tokens: jnp.mean(params["embed"][tokens] ** 2))
    report = zerojax.audit(step, plan.abstract(), audits.tokens(plan))
    assert "reduce-scatter" not in report.totals and report.findings() == []


@pytest.mark.gpu_code
def test_small_leaves_that_are_summed_in_one_piece_keep_the_contract():
    """XLA:GPU joins their gradients in an array larger than each of them."""

    def make_state():
        params = {f"bias{i}": jnp.zeros(3000) for i in range(4)} | {"w": jnp.zeros((DIM, DIM))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    def small(params, tokens):
        sums = sum(jnp.mean(jnp.sin(b * tokens[0])) for k, b in params.items() if k != "w")
        return sums + jnp.mean(jnp.tanh(tokens[:DIM, None] @ params["w"][:1]))

    mesh = audits.mesh_of("8xH100")
    plan = zerojax.plan(make_state, stage=2, mesh=mesh, min_shard_size=2**13)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((64,), jnp.float32), plan)
    report = zerojax.audit(zerojax.train_step(small, plan=plan), plan.abstract(), batch)
    sums = {t.parts[0].elements: len(t.paths) for t in report.traffic if t.kind == "all-reduce"}
    assert sums == {9000: 3, 3002: 1}, "three of them, and one with the loss and the norm"
    assert report.findings() == []


# -- limits


def test_a_peak_above_the_limit():
    report = steps.row("stage3").report
    assert report.findings(max_peak_bytes=report.memory.peak) == []
    line = broken(report, "the peak is", max_peak_bytes=report.memory.peak - 1)
    assert "per device, above max_peak_bytes=" in line and "higher stage" not in line
    assert line.endswith("accumulate=, the host's memory (offload=), or more devices.")
    stage2 = steps.row("stage2").report
    assert "Use a higher stage" in broken(stage2, "the peak is", max_peak_bytes=1)
    with pytest.raises(AssertionError, match=r"^the compiled program breaks the limits of this ch"):
        report.check(max_peak_bytes=1)
    assert "Pass gpu='H100' to audit" in broken(report, "needs modelled times", min_overlap=0.5)


@pytest.mark.gpu_code
def test_an_overlap_below_the_limit():
    report = steps.row("8xH100-stage3").report
    assert report.findings(min_overlap=report.overlap) == []
    line = broken(report, r"below min_overlap=0.999", min_overlap=0.999)
    assert line.startswith(f"compute is {report.overlap:.3f} of the modelled step")
    assert "of communication are exposed" in line


# -- programs for GPUs


@pytest.mark.gpu_code
@pytest.mark.parametrize("name", steps.GPUS)
def test_programs_for_gpus_keep_the_contract(name):
    row = steps.row(name)
    assert row.report.check().backend == "gpu"
    assert all(leaf.update.padding for leaf in row.plan.params) == name.startswith("6x")
    if name.startswith("16x"):
        assert {(t.group, t.on_host) for t in row.report.traffic} == {(16, 8)}


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

    report = audits.audited(planned("8xH100", 3), wide_loss)
    for line in report.findings():
        assert re.search(r"all-gather \S+ moves params/layers/w in f32, twice the bytes", line)
        assert "precision=Precision(compute='bfloat16')" in line
    assert report.findings()


@pytest.mark.gpu_code
def test_weights_kept_for_backward():
    save = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
    saving = functools.partial(loss, wrap=save)
    report = audits.audited(planned("8xH100", 3), saving, regather=False)
    line = broken(report, "gathered weights of params/layers/w are kept for backward")
    assert f"[{LAYERS},{DIM},{DIM}]" in line and "regather=True" in line


@pytest.mark.gpu_code
def test_a_gather_in_a_loop_that_nothing_hides():
    report = steps.row("8xH100-stage3").report
    one = next(t for t in report.traffic if t.kind == "all-gather" and t.loops)
    slow = dataclasses.replace(one, asynchronous=False, wire_bytes=2**20 + 1)
    with_it = lambda what: dataclasses.replace(report, traffic=(what,))
    line = broken(with_it(slow), "is synchronous inside a loop over layers: nothing hides its time")
    assert line.startswith(f"all-gather {one.name} (params/layers/") and "prefetch=1" in line
    for fine in ({"asynchronous": True}, {"wire_bytes": 2**20}, {"loops": ()}):
        found = with_it(dataclasses.replace(slow, **fine)).findings()
        assert not any("synchronous" in line for line in found)
    first = dataclasses.replace(with_it(slow), accumulate=2)
    assert not any("synchronous" in line for line in first.findings()), "of each microbatch"
