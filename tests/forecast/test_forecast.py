"""Forecasts: the formula, the compiler's memory, modelled times, and what hosts send each other.

Most are of programs for CPU devices that stand for GPUs; what GPUs' programs have is marked.
"""

import dataclasses
import inspect
from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
import zerojax.nnx
from tests.forecast import fakes
from tests.support import audits, nnx_models
from tests.support.schedules import scheduled

N = 8
PSI = audits.LAYERS * (audits.DIM**2 + audits.DIM) + 2 * audits.DIM**2
ROWS, LENGTH = 32, 16
BATCH = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
SMALL = fakes.batch(32)
# A row's token meets every layer's weight: two FLOPs each, and twice that in backward.
NEEDED = 3 * 2 * ROWS * LENGTH * audits.LAYERS * audits.DIM**2


@pytest.fixture(scope="module")
def made():
    given = {"gpus": "8xH100", "stages": (0, 2, 3)}
    with fakes.cpus_for_gpus():
        return zerojax.forecast(audits.loss, audits.make_state, BATCH, **scheduled(given))


def linear(loss=fakes.loss, make_state=fakes.make_state, batch=SMALL, **options):
    """The forecast of the smallest model."""
    return zerojax.forecast(loss, make_state, batch, **scheduled({"gpus": "2xH100"} | options))


def test_stages_share_traces(cpus):
    """Each traces the loss for its step, and one more trace counts the FLOPs that all need. The
    state is made once to see whether it is a model of Flax nnx, and once for all plans."""
    calls = Counter()

    def loss(params, batch):
        calls["loss"] += 1
        return fakes.loss(params, batch)

    def make_state():
        calls["state"] += 1
        return fakes.make_state()

    linear(loss, make_state, stages=(0, 3))
    assert calls == {"loss": 3, "state": 2}


def test_a_model_of_nnx_is_made_once(cpus):
    """For all that a forecast asks: whether it is one, its keys, and its shapes."""
    calls = Counter()

    def loss(model, batch):
        calls["loss"] += 1
        return nnx_models.loss_fn(model, batch)

    def make():
        calls["model"] += 1
        return nnx_models.make()

    step = zerojax.nnx.train_step(loss)
    for loss_fn in (step, {"one": loss, "other": loss}):
        calls.clear()
        linear(loss_fn, make, nnx_models.BATCH, stages=3)
        losses = len(loss_fn) if isinstance(loss_fn, dict) else 1
        assert calls == {"loss": 2 * losses, "model": 1}


def test_bytes_are_the_formulas_peaks_the_compilers_and_speed_the_modelled(made):
    """fp32 Adam: 4 of parameter, 8 of moments, 4 of gradient; two counters of 4 bytes."""
    assert [case.stage for case in made.cases] == [0, 2, 3]
    zero, two, three = made.cases
    assert zero.formula == 16 * PSI + 8
    assert two.formula == 4 * PSI + 12 * PSI // N + 8
    assert three.formula == 16 * PSI // N + 8
    assert (zero.parameters, two.parameters, three.parameters) == (4 * PSI, 4 * PSI, PSI // 2)
    assert (zero.optimizer, two.optimizer) == (8 * PSI + 4, PSI + 4)
    for case in made.cases:
        memory = case.report.memory
        assert case.peak == memory.peak > case.parameters + case.optimizer
        assert case.activations == memory.activations + memory.gathered
        assert case.gradients == memory.gradients
        assert case.fits and case.spare == made.gpu.usable - case.peak
        assert case.wire_bytes == case.link_bytes == case.report.wire_bytes > 0
        assert case.report.findings() == []
        step = case.step_seconds
        assert step == case.report.step_seconds
        assert step == pytest.approx(case.compute_seconds + case.exposed_seconds)
        assert case.examples_per_second == ROWS / step
        assert case.tokens_per_second == ROWS * LENGTH / step
        assert case.mfu == pytest.approx(NEEDED / N / (step * 989e12))


ORDERS = [zerojax.Schedule(), zerojax.Schedule(order="layers")]


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({}, [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 1, 0)]),
        ({"stages": [3, 3], "accumulate": [1, 1]}, [(3, 1, 0)]),
        # One microbatch has no order.
        (
            {"stages": 3, "accumulate": [1, 2], "schedule": [*ORDERS[::-1], ORDERS[1]]},
            [(3, 1, 0), (3, 2, 1), (3, 2, 0)],
        ),
        ({"groups": {"params": "gpu"}}, [(3, 1, 0)]),
    ],
)
def test_what_compiles_twice_compiles_once(options, ways, cpus):
    found = linear(**options).cases
    in_layers = lambda case: case.order == "layers"
    assert [(case.stage, case.accumulate, in_layers(case)) for case in found] == ways


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2, "donate": False}, {"accumulate": 2, "order": "layers", "regather": False}],
    ids=str,
)
def test_a_ready_step_is_forecast_with_all_that_it_was_made_of(options, cpus):
    step = zerojax.train_step(fakes.loss, **scheduled(options))
    (case,) = linear(step, stages=2).cases
    stage, count = 2, options.get("accumulate", 1)
    order = options.get("order", "microbatches")
    assert (case.stage, case.accumulate, case.order) == (stage, count, order)
    plan = zerojax.plan(fakes.make_state, stage=stage, mesh=zerojax.aot.mesh("2xH100"))
    batch = zerojax.aot.batch(SMALL, plan)
    report = zerojax.audit(step, plan.abstract(), batch, plan=plan, gpu="H100")
    assert (case.peak, case.step_seconds) == (report.memory.peak, report.step_seconds)
    assert case.report.to_dict() == report.to_dict()


def test_schedules_stand_side_by_side(cpus):
    rates = zerojax.tools.rates_of("H100", link=1e6)
    schedules = [*ORDERS, zerojax.Schedule(regather=False)]
    found = linear(stages=3, accumulate=2, schedule=schedules, rates=rates)
    in_turn, layers, once = found.cases
    assert [case.report.accumulate for case in found.cases] == [2, 1, 2]
    assert layers.wire_bytes < 0.6 * in_turn.wire_bytes, "what is sent once, but for the loss"
    assert once.wire_bytes < in_turn.wire_bytes and found.best is layers
    assert [case.schedule for case in found.cases] == schedules
    assert all(str(schedule) in str(found) for schedule in schedules)


def test_an_option_of_a_schedule_replaces_that_of_a_step(cpus):
    kept = zerojax.Schedule(regather=False, keep_layers=1, roll=False)
    step = zerojax.train_step(fakes.loss, accumulate=2, schedule=kept)
    (case,) = linear(step, stages=3, schedule=ORDERS[1]).cases
    assert case.schedule == dataclasses.replace(kept, order="layers")
    (case,) = linear(step, stages=3).cases
    assert case.schedule == kept


def test_what_is_given_is_in_the_title_and_in_the_cases(cpus):
    large = lambda: fakes.make_state(width=256, optimizer=optax.adam)
    precision = zerojax.Precision(compute="bfloat16", gather={"w": "int8"}, reduce="int4")
    given = {"precision": precision, "regather": ("gpu",), "activations": (), "tokens": 7}
    given |= {"rates": zerojax.tools.rates_of("H100", network=6e9), "offload": "opt_state"}
    found = linear({"mine": fakes.loss}, large, fakes.batch(32, 256), stages=3, **given)
    dtypes = 'zerojax.Precision(compute="bfloat16", reduce="int4", gather={"w": "int8"})'
    wanted = {f"precision={dtypes}", 'schedule=zerojax.Schedule(regather="gpu")'}
    assert {*found.settings} == wanted | {"offload='opt_state'", "network cards of 6 GB/s"}
    (case,) = found.cases
    assert case.variant == "mine" and case.tokens_per_second == 7 / case.step_seconds


def test_gpus_share_sequences(cpus):
    """As neighbours; the state is sharded over all of them."""
    given = {"gpus": "8xH100", "stages": 3, "sequence": 4}
    with mock.patch.object(zerojax.aot, "mesh", wraps=zerojax.aot.mesh) as meshes:
        result = zerojax.forecast(audits.loss, audits.make_state, BATCH, **given)
    assert meshes.call_args.args == ("8xH100", (2, 4), ("data", "sequence"))
    (case,) = result.cases
    assert (case.share, case.rows, case.tokens) == (4, ROWS // 2, ROWS * LENGTH)
    assert case.formula == 16 * PSI // N + 8
    assert "sequence=4" in str(result)
    batch = lambda rows: jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)
    models = {"mine": (audits.loss, audits.make_state, batch)}
    study = zerojax.tools.study(models, gpus="8xH100", stages=3, rows=4, sequence=4, cache=False)
    assert [(case.rows, case.examples) for case in study.cases] == [(4, 8)]


def test_a_step_of_nnx_is_forecast_with_the_function_that_makes_its_model(cpus):
    """Dropout's stream is given a key; the batch statistics are updated."""
    make = lambda: nnx_models.make(rate=0.1)
    step = zerojax.nnx.train_step(nnx_models.loss_fn)
    batch = jax.ShapeDtypeStruct(nnx_models.BATCH.shape, jnp.float32)
    (case,) = linear(step, make, batch, stages=3).cases
    case.report.check()
    matrices, vectors = 2 * 16 * 32, 16 + 2 * 32  # which are too small to be sharded
    assert case.parameters == 4 * (matrices // 2 + vectors)
    loss = lambda *args: nnx_models.loss_fn(*args)  # which says of no argument that it needs it
    same = (loss, make), (step, lambda: zerojax.nnx.state(*make()))
    for given in same:  # the plain loss, and the state that a plan takes
        (other,) = linear(*given, batch, stages=3).cases
        assert other.report.to_dict() == case.report.to_dict()


def own_step(model, optimizer, batch):
    raise AssertionError("it is not called")


NNX_STEP = zerojax.nnx.train_step(nnx_models.loss_fn)
BOTH = r"Pass the loss, loss_fn\(model, batch\).* def make\(\): .* return model, nnx.Opt.*the batch"


@pytest.mark.parametrize(
    ("loss", "make", "message"),
    [
        *(
            (loss, make, f"{what}, .*{BOTH}")
            for loss in (nnx_models.loss_fn, NNX_STEP)
            for make, what in (
                (nnx_models.make()[0], "you passed Net"),
                (nnx_models.Net, "you passed the class Net"),
                (nnx_models.own_model, "own_model returns Net"),
                (lambda: nnx_models.make()[::-1], "<lambda> returns Optimizer and Net"),
            )
        ),
        (NNX_STEP, lambda rngs: nnx_models.make(), f"takes arguments, .*{BOTH}"),
        (*nnx_models.make(), f"the loss comes first, and you passed Net. {BOTH}"),
        (nnx_models.make, nnx_models.loss_fn, f"the loss comes first, and you passed make. {BOTH}"),
        (zerojax.train_step(fakes.loss), nnx_models.make, f"step trains states, .*{BOTH}"),
        (own_step, nnx_models.make, r"with \(model, batch\): .*'batch'. The loss is loss_fn\(mode"),
    ],
)
def test_what_is_passed_for_nnx_by_mistake_is_named(loss, make, message, cpus):
    with pytest.raises(TypeError, match=message):
        linear(loss, make, jax.ShapeDtypeStruct(nnx_models.BATCH.shape, jnp.float32), stages=3)


STEP = zerojax.train_step(fakes.loss)
SEVERAL = r"'a' is a step. Pass a step by itself, and make one call"
TRAINS_NOTHING = r"a step of eval_step trains nothing.*Pass the loss, or a step of train_s"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stages": ()}, ValueError, "nothing to try: stages="),
        ({"batch": {}}, ValueError, "the batch has no arrays with rows. Pass the global batch"),
        ({"groups": {"params": "data"}}, ValueError, "no axis 'data'"),
        ({"sequence": 0}, ValueError, "sequence=0 must be positive: how many GPUs share"),
        ({"sequence": "cp"}, ValueError, "sequence='cp' must name an axis of mesh=, as"),
        ({"sequence": (2, 0.2, 1)}, ValueError, r"such as 8, or \(8, 0.2\) with the most_gathered"),
        ({"sequence": (2, -1)}, ValueError, r"Sequences\(most_gathered=-1\) must be a share"),
        ({"sequence": 3}, ValueError, "sequence=3 GPUs .* divide the 2 GPUs of the mesh. Pass a"),
        ({"loss": {"a": STEP, "b": STEP}}, TypeError, SEVERAL),
        ({"loss": zerojax.eval_step(fakes.loss)}, TypeError, TRAINS_NOTHING),
    ],
)
def test_bad_input(options, error, message, cpus):
    with pytest.raises(error, match=message):
        linear(**options)


# -- two hosts of four

HSDP = dict.fromkeys(("params", "grads", "opt_state"), "gpu")
AMSP = HSDP | {"opt_state": ("gpu", "node")}
MANY = jax.ShapeDtypeStruct((8 * ROWS, LENGTH), jnp.int32)
NARROW = zerojax.Precision(param="bfloat16", compute="bfloat16")


def hosts(loss=audits.loss, precision=NARROW, **options):
    given = {"gpus": "8xH100", "per_host": 4, "stages": 3, "precision": precision} | options
    (case,) = zerojax.forecast(loss, audits.make_state, MANY, **scheduled(given)).cases
    assert case.report.findings() == []
    return case


@pytest.fixture(scope="module")
def flat(gpu_code):
    """Over all eight; network cards of 1 MB/s each are all that takes time."""
    return hosts(accumulate=2, rates=zerojax.tools.rates_of("H100", network=1e6))


def test_a_card_carries_a_quarter_of_what_its_gpu_sends(flat):
    assert flat.network_bytes == flat.wire_bytes / 4 == flat.link_bytes / 3
    assert flat.step_seconds == pytest.approx(flat.network_bytes / 1e6, rel=0.01)


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("groups", "accumulate", "resting", "near"), [(HSDP, 4, 4, 0), (AMSP, 1, 8, 4), (AMSP, 4, 8, 4)]
)
def test_groups_send_between_hosts_what_the_guide_says(groups, accumulate, resting, near):
    """Parameters and gradients of 2 bytes, over the GPUs of a host."""
    case = hosts(groups=groups, accumulate=accumulate)
    kept = 2 * PSI / near if near else 0  # of parameters, in the node
    assert case.formula == 2 * PSI / 4 + (2 + 4) * PSI / resting + kept + 8
    # Once in a step, however many microbatches: an all-reduce of shards between two hosts, or a
    # reduce-scatter of gradients and an all-gather of parameters. A loop that prefetches brings its
    # last layer into the node twice.
    again = (audits.DIM**2 + audits.DIM) / 4 if near and accumulate == 1 else 0
    assert case.network_bytes == pytest.approx(2 * (2 * PSI / 4) / 2 + again, rel=1e-3)
    # All layers but the last are gathered twice, the embedding once; three quarters are sent.
    stack = PSI - 2 * audits.DIM**2
    passes = stack * (3 - 1 / audits.LAYERS) + 2 * (PSI - stack)
    assert case.link_bytes == pytest.approx(accumulate * 2 * passes * 3 / 4, rel=0.01)


def test_an_option_of_a_plan_or_a_step_is_one_of_forecasts_and_studies(run):
    """Without another line; one that is declared with a flag has it on the command line."""
    made_here = {"stage", "mesh", "plan"}
    for function in (zerojax.plan, zerojax.train_step):
        fields = {field.name: field for field in dataclasses.fields(function.options)}
        for tool in (zerojax.forecast, zerojax.tools.study):
            assert fields.keys() - made_here <= inspect.signature(tool).parameters.keys()
        fields |= {field.name: field for field in dataclasses.fields(zerojax.Schedule)}
        flagged = [name for name, field in fields.items() if field.metadata["flag"]]
        flags = {f"--{name.replace('_', '-')}" for name in flagged}
        for command in ("forecast", "study", "audit"):
            assert all(flag in run(command, "--help")[1] for flag in flags)
    assert flags >= {"--accumulate", "--update"}


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("gpus", "asked", "runs"),
    [("1xT4", "bfloat16", "float32"), ("1xT4", "float16", ""), ("1xL4", "bfloat16", "")],
)
def test_bfloat16_is_said_to_run_as_what_it_runs(gpu_code, gpus, asked, runs):
    precision = zerojax.Precision(compute=asked)
    forecast = linear(gpus=gpus, stages=0, precision=precision)
    (case,) = forecast.cases
    told = f"You ask for bfloat16, which a T4 does not have: your matmuls run in {runs}. Ask for fl"
    assert case.matmuls == ((runs or asked),)
    assert (told in case.lacks and told in " ".join(str(forecast).split())) == bool(runs)
    assert bool(case.lacks) == ("You ask" in str(case.report)) == bool(runs)
