"""The contract of each stage: `report.check()` passes where it is kept, and names who breaks it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import zerojax
from tests import audits
from tests.audits import DIM, LAYERS, audited, loss, planned
from tests.conftest import mostly_slow
from tests.models import MODELS
from tests.reference import make_state as model_state
from zerojax._audit import contract as _contract
from zerojax._audit.measured import Part

P = PartitionSpec
WHERE = ("cpu", pytest.param("8xH100", marks=pytest.mark.gpu_code))
FAST = ("convnet", 3)


def user_step(plan, loss_fn=loss, donate=True, constrain=True, change_grads=None, **options):
    """What a user who writes the step without train_step writes, with room for mistakes."""
    grad = zerojax.value_and_grad(loss_fn, plan, **options)

    def step(state, batch):
        value, grads = grad(state.params, batch)
        grads = change_grads(grads) if change_grads else grads
        new = plan.scatter(state).apply_gradients(grads=grads)
        return (plan.constrain(new, into=state) if constrain else new), value

    return jax.jit(step, donate_argnums=(0,) if donate else ())


def broken(report, *patterns, **limits):
    """The one finding that matches every pattern."""
    found = report.findings(**limits)
    hits = [line for line in found if all(re.search(p, line) for p in patterns)]
    assert len(hits) == 1, "\n".join(found) or "nothing found"
    with pytest.raises(AssertionError) as raised:
        report.check(**limits)
    assert hits[0] in str(raised.value)
    return hits[0]


# -- kept


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", (*WHERE, "6xcpu"))
def test_layers_keep_the_contract(where, stage):
    report = audits.plain(where, stage)
    assert report.check(max_peak_bytes=2**30) is report
    assert report.backend == ("cpu" if "cpu" in where else "gpu")
    assert report.plan.pads == (where == "6xcpu")


@pytest.mark.gpu_code
@pytest.mark.parametrize("stage", mostly_slow((1, 3), lambda stage: stage == 3))
def test_padded_layers_keep_the_contract_on_gpus(stage):
    report = audits.plain("6xH100", stage)
    assert all(leaf.update.padding for leaf in report.plan.params)
    assert report.findings() == []


@pytest.mark.parametrize(
    "groups", [("gpu", "gpu"), ("gpu", ("gpu", "node")), ((), ("gpu", "node"))]
)
def test_padded_groups_keep_the_contract(groups):
    shards, opt_state = groups
    over = {"params": shards, "grads": shards, "opt_state": opt_state}
    devices = audits.mesh_of("6xcpu").devices.reshape(2, 3)
    mesh = Mesh(devices, ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    report = audited(zerojax.plan(audits.make_state, mesh=mesh, groups=over))
    assert report.plan.pads and report.findings() == []


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        # Those of mlp and gpt are audited in test_audit.py.
        pytest.param(model, stage, marks=() if (model, stage) == FAST else pytest.mark.slow)
        for model in ("transformer", "convnet")
        for stage in (1, 2, 3)
    ],
)
def test_models_keep_the_contract_on_cpu(model, stage):
    made = MODELS[model](True)
    tx = optax.sgd(0.1)
    plan = zerojax.plan(lambda: model_state(made, tx), stage=stage, mesh=audits.mesh_of("cpu"))
    batch, rng = zerojax.aot.batch((made.batch, made.rng), plan)
    step = zerojax.train_step(made.loss, mutable=tuple(made.fields))
    assert zerojax.audit(step, plan.abstract(), batch, rng).findings() == []


def test_microbatches_keep_the_contract():
    """A step says itself how many it has."""
    report = audited(planned("cpu", 3), accumulate=2)
    assert report.accumulate == 2 and report.findings() == []


@pytest.mark.gpu_code
def test_two_hosts_keep_the_contract():
    report = audited(planned("16xH100", 3))
    assert report.findings() == []
    assert {(t.group, t.on_host) for t in report.traffic} == {(16, 8)}


@pytest.mark.parametrize("where", WHERE)
def test_rows_of_a_table_keep_the_contract(where):
    """They are known by their scope, whatever else a step sends in all-to-alls is a finding."""
    report = audits.plain(where, 3)
    exchanges = [t for t in report.traffic if t.kind == "all-to-all"]
    assert [t.serves for t in exchanges] == ["params/embed"] * 4
    assert sum(t.wire_bytes for t in exchanges) > 4 * _contract.SMALL and not report.findings()
    assert "params/embed" not in {t.serves for t in report.traffic if t.kind == "all-gather"}


def test_rows_alone_are_a_reduction():
    make_state = lambda: audits.TrainState.create(
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
        return audits.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

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


@pytest.mark.parametrize("where", ["cpu", "6xcpu"])
def test_user_written_steps_keep_the_contract(where):
    plan = planned(where, 2)
    assert audited(plan, step=user_step(plan)).findings() == []


# -- broken


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

    report = audited(planned("8xH100", 3), wide_loss)
    for line in report.findings():
        assert re.search(r"all-gather \S+ moves params/layers/w in f32, twice the bytes", line)
        assert "precision=Precision(compute='bfloat16')" in line
    assert report.findings()


@pytest.mark.parametrize(("where", "part"), [("cpu", "4,16,128"), ("6xcpu", "4,22,128")])
def test_a_stack_gathered_at_once_outside_its_loop(where, part):
    def hoisted(params, tokens):
        whole = params["layers"] | {"w": params["layers"]["w"] * params["layers"]["w"].mean()}
        return loss(params | {"layers": whole}, tokens)

    report = audited(planned(where, 3), hoisted)
    found = [line for line in report.findings() if "gathers all 4 layers" in line]
    assert found and all(f"params/layers/w at once (f32[{part}]" in line for line in found)
    assert all("zerojax.plan(..., stacked=" in line for line in found)
    assert "outside of the loop over them. Scan over the stack itself" in found[0]


@pytest.mark.parametrize("where", (*WHERE, "6xcpu"))
def test_gradients_all_reduced_instead_of_scattered(where):
    """Data parallelism by hand: every device sums whole gradients, then keeps its part."""
    plan = planned(where, 1)

    def summed(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.lax.pmean(value, "data"), jax.lax.pmean(grads, "data")

    def step(state, tokens):
        grad = jax.shard_map(
            summed, mesh=plan.mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
        value, grads = grad(state.params, tokens)
        # Whole until the update, as a clip by global norm may keep them.
        grads = jax.lax.optimization_barrier(grads)
        return plan.constrain(plan.scatter(state).apply_gradients(grads=grads), into=state), value

    report = audited(plan, step=jax.jit(step, donate_argnums=0))
    line = broken(report, "full gradient of params/layers/w ", "promises a reduce-scatter")
    assert re.match(r"all-reduce \S+ sums", line) and "no psum or pmean of gradients" in line


@pytest.mark.gpu_code
@pytest.mark.parametrize("where", mostly_slow(("8xH100", "6xH100"), lambda gpus: gpus[0] == "8"))
def test_weights_kept_for_backward(where):
    save = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
    report = audited(planned(where, 3), functools.partial(loss, wrap=save), regather=False)
    line = broken(report, "gathered weights of params/layers/w are kept for backward")
    assert f"[{LAYERS},{DIM},{DIM}]" in line and "regather=True" in line


def test_a_full_gradient_is_known_with_its_padding_and_without():
    """[4, 128, 128] rests as [4, 132, 128]; so do the gradients of a loss of padded weights."""
    promised = _contract.promises(planned("6xcpu", 3), 1)
    path = "params/layers/w"
    found = {}
    for rows in (127, 128, 129, 132, 133):
        for layers in (1, LAYERS):
            part = Part("", "f32", layers * rows * DIM, 0.0, (path,))
            found[rows, layers] = _contract._gradient_in(part, promised) is not None
    known = [rows for (rows, layers), is_full in found.items() if is_full and layers == 1]
    assert known == [128, 132]
    # What is larger than it has the joined gradients of several parameters.
    known = [rows for (rows, layers), is_full in found.items() if is_full and layers == LAYERS]
    assert known == [128, 129, 132, 133]


def test_a_state_that_is_not_donated():
    line = broken(audited(planned("cpu", 3), donate=False), "leaves of the state are not donated")
    # step; norm, w and embed; adam's count and two moments of each
    assert line.startswith("11 leaves of the state are not donated (step, params/embed, params/")
    assert "and 8 more" in line and "donate_argnums=0" in line


@pytest.mark.parametrize(
    ("where", "rests"), [("cpu", "[256, 128]"), ("6xcpu", "[256, 128] padded to [258, 128]")]
)
def test_an_optimizer_leaf_that_is_replicated(where, rests):
    plan = planned(where, 3)
    state = plan.abstract()
    whole = NamedSharding(plan.mesh, P())

    def unsharded(path, leaf):
        hit = "mu" in jax.tree_util.keystr(path) and "embed" in jax.tree_util.keystr(path)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole) if hit else leaf

    state = jax.tree_util.tree_map_with_path(unsharded, state)
    line = broken(audited(plan, state=state), "opt_state/0/mu/embed reaches the step as")
    full = 258 if where == "6xcpu" else 256
    assert f"f32[{full},128] per device of {rests}, not as the plan shards it" in line
    assert "zerojax.shard_train_state or plan.place" in line


def test_activations_that_change_their_layout():
    def turned(params, tokens):
        x = params["embed"][tokens]
        x = jax.lax.all_to_all(x, "data", 1, 0, tiled=True)  # rows for columns
        return jnp.mean(jnp.tanh(x) ** 2)

    report = audited(planned("cpu", 3), turned)
    found = [line for line in report.findings() if "all-to-all" in line]
    assert found and "no stage needs one, so activations or weights change their" in found[0]
    assert "with_sharding_constraint" in found[0]


@pytest.mark.parametrize("where", ["cpu", "6xcpu"])
def test_parameters_gathered_too_often(where):
    """In a loop that should not have them: four microbatches where one was promised."""
    plan = planned(where, 3)
    step = zerojax.train_step(loss, accumulate=4)
    compiled = step.lower(plan.abstract(), audits.tokens(plan)).compile()
    assert zerojax.audit(compiled, plan=plan, accumulate=4).findings() == []
    # Twice for each microbatch; promised are two gathers and a prefetching loop's two layers.
    line = broken(zerojax.audit(compiled, plan=plan), "params/layers/w is gathered [678]")
    assert "times a step; stage 3 promises at most 2.5. Look for uses in several jax.ch" in line
    assert "or a gather inside a loop that does not need it there" in line


def test_a_big_all_reduce_of_activations():
    def pooled(params, tokens):
        x = params["embed"][tokens]
        everywhere = jax.lax.psum(jnp.tanh(jnp.tile(x, (1, 16))), "data")
        return jnp.mean(everywhere**2)

    report = audited(planned("cpu", 3), pooled)
    found = [line for line in report.findings() if "larger than any statistic" in line]
    assert found and re.match(r"all-reduce \S+ sums f32\[\d+,2048\], 256.0 KiB", found[0])
    assert "activations summed over the data axis" in found[0]


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


def test_a_peak_above_the_limit():
    report = audits.plain("cpu", 3)
    assert report.findings(max_peak_bytes=report.memory.peak) == []
    line = broken(report, "the peak is", max_peak_bytes=report.memory.peak - 1)
    assert "per device, above max_peak_bytes=" in line and "higher stage" not in line
    assert line.endswith("accumulate=, the host's memory (offload=), or more devices.")
    assert "Use a higher stage" in broken(audits.plain("cpu", 2), "the peak is", max_peak_bytes=1)
    with pytest.raises(AssertionError, match=r"^the compiled program breaks the limits of this ch"):
        report.check(max_peak_bytes=1)


@pytest.mark.gpu_code
def test_a_gather_in_a_loop_that_nothing_hides():
    report = audits.plain("8xH100", 3)
    one = next(t for t in report.traffic if t.kind == "all-gather" and t.loops)
    slow = dataclasses.replace(one, asynchronous=False, wire_bytes=_contract.BIG_GATHER + 1)
    with_it = lambda what: dataclasses.replace(report, traffic=(what,))
    line = broken(with_it(slow), "is synchronous inside a loop over layers: nothing hides its time")
    assert line.startswith(f"all-gather {one.name} (params/layers/") and "prefetch=1" in line
    for fine in ({"asynchronous": True}, {"wire_bytes": _contract.BIG_GATHER}, {"loops": ()}):
        found = with_it(dataclasses.replace(slow, **fine)).findings()
        assert not any("synchronous" in line for line in found)
    first = dataclasses.replace(with_it(slow), accumulate=2)
    assert not any("synchronous" in line for line in first.findings()), "of each microbatch"


@pytest.mark.gpu_code
def test_an_overlap_below_the_limit():
    report = audits.plain("8xH100", 3)
    assert report.findings(min_overlap=report.overlap) == []
    line = broken(report, r"below min_overlap=0.999", min_overlap=0.999)
    assert line.startswith(f"compute is {report.overlap:.3f} of the modelled step")
    assert "of communication are exposed" in line
    cpu = audits.plain("cpu", 3)
    assert "Pass gpu='H100' to audit" in broken(cpu, "needs modelled times", min_overlap=0.5)


def test_all_findings_are_told_at_once():
    report = audited(planned("cpu", 3), donate=False)
    with pytest.raises(AssertionError) as raised:
        report.check(max_peak_bytes=1)
    lines = str(raised.value).splitlines()
    assert lines[0].endswith(" breaks the contract of stage 3 and the limits of this check:")
    assert [line[:4] for line in lines[1:]] == ["  - ", "  - "]


def test_without_a_plan_only_what_no_stage_does_is_wrong():
    text = audited(planned("cpu", 3), donate=False).module.text
    assert zerojax.audit(text).findings() == []


def test_gradients_that_nobody_reduces():
    plan = planned("cpu", 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        grads = jax.shard_map(
            jax.grad(loss), mesh=plan.mesh, in_specs=(P(), P("data")), out_specs=P(),
            check_vma=False,
        )(state.params, batch)  # fmt: skip
        return plan.constrain(plan.scatter(state).apply_gradients(grads=grads))

    found = zerojax.audit(step, plan.abstract(), audits.tokens(plan)).findings()
    assert any("no collective reduces the gradient of params/" in line for line in found)


def test_a_state_that_cannot_be_recognized():
    plan = planned("cpu", 3)
    step = zerojax.train_step(loss)
    args = (plan.abstract(), audits.tokens(plan))
    found = zerojax.audit(jax.jit(lambda *given: step(*given)), *args).findings()
    assert any("Let the step take the state as one argument" in line for line in found)


def test_statistics_of_wide_batch_norms_may_be_reduced():
    """What the README advises: flax's `axis_name` for the statistics of the whole batch."""
    plan = zerojax.plan(
        {"params": {"w": jnp.ones((64, 64))}, "batch_stats": {"mean": jnp.zeros(4096)}}, stage=3
    )
    part = Part("f32[8192]", "f32", 8192, 4.0 * 8192, ())
    assert _contract._most_reduced(part, plan) == part.nbytes


def test_an_eval_step_has_no_gradients_to_reduce_and_no_state_to_donate():
    plan = planned("cpu", 3)
    batch = zerojax.aot.batch(jax.ShapeDtypeStruct((256,), jnp.int32), plan)
    report = zerojax.audit(zerojax.eval_step(audits.loss, plan=plan), plan.abstract(), batch)
    assert report.check().totals["all-gather"] > 0 and not report.trains
