"""Forecasts: the formula, the compiler's memory, modelled times, and the case that wins."""

import dataclasses
import functools
import inspect
import json
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
import zerojax.nnx
from tests import audits, nnx_models
from zerojax._forecast import forecast as _progress
from zerojax._forecast.forecast import Forecast
from zerojax._loss.order import ORDERS

N = 8
PSI = audits.LAYERS * (audits.DIM**2 + audits.DIM) + 2 * audits.DIM**2
ROWS, LENGTH = 32, 16
BATCH = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
# So many tokens that the embedding is gathered for them, in microbatches too.
MANY = jax.ShapeDtypeStruct((8 * ROWS, LENGTH), jnp.int32)
# A row's token meets every layer's weight: two FLOPs each, and twice that in backward.
NEEDED = 3 * 2 * ROWS * LENGTH * audits.LAYERS * audits.DIM**2


@pytest.fixture(scope="module")
def made(gpu_code):
    return zerojax.forecast(audits.loss, audits.make_state, BATCH, gpus="8xH100", stages=(0, 2, 3))


def test_bytes_are_the_formulas(made):
    """fp32 Adam: 4 of parameter, 8 of moments, 4 of gradient; two counters of 4 bytes."""
    assert [case.stage for case in made.cases] == [0, 2, 3]
    zero, two, three = made.cases
    assert zero.formula == 16 * PSI + 8
    assert two.formula == 4 * PSI + 12 * PSI // N + 8
    assert three.formula == 16 * PSI // N + 8
    assert (zero.parameters, two.parameters, three.parameters) == (4 * PSI, 4 * PSI, PSI // 2)
    assert (zero.optimizer, two.optimizer) == (8 * PSI + 4, PSI + 4)


def test_peaks_are_the_compilers(made):
    for case in made.cases:
        memory = case.report.memory
        assert case.peak == memory.peak > case.parameters + case.optimizer
        assert case.activations == memory.activations + memory.gathered
        assert case.gradients == memory.gradients
        assert case.fits and case.spare == made.gpu.usable - case.peak


def test_traffic_stays_on_the_host(made):
    for case in made.cases:
        assert case.network_bytes == 0
        assert case.wire_bytes == case.link_bytes == case.report.wire_bytes
    zero, two, three = made.cases
    stack = audits.LAYERS * audits.DIM**2  # reduced in its loop, as computed: in bfloat16
    reduced = 2 * 7 / 8 * (2 * stack + 4 * (PSI - stack))
    assert zero.report.totals["all-reduce"] == pytest.approx(reduced, rel=1e-3)
    assert two.report.totals["all-gather"] == 4 * PSI * 7 / 8
    narrow = 2 * PSI * 7 / 8  # reduced as computed
    assert three.report.totals["reduce-scatter"] == pytest.approx(narrow, rel=0.01)


def test_speed_follows_from_the_modelled_step(made):
    for case in made.cases:
        step = case.step_seconds
        assert step == case.report.step_seconds
        assert step == pytest.approx(case.compute_seconds + case.exposed_seconds)
        assert case.examples_per_second == ROWS / step
        assert case.tokens_per_second == ROWS * LENGTH / step
        assert case.mfu == pytest.approx(NEEDED / N / (step * 989e12))
        assert case.compile_seconds > 0


@pytest.mark.gpu_code
@pytest.mark.parametrize(("layers", "said"), [(8, "the model has 8 layers"), (4, "^$")])
def test_layers_in_a_python_loop_are_told_of_while_they_compile(monkeypatch, layers, said):
    def stop(hint):
        raise RuntimeError(hint)

    monkeypatch.setattr(_progress, "hinting", stop)
    make_state = lambda: {"params": {f"block_{i}": jnp.zeros((64, 64)) for i in range(layers)}}
    loss = lambda params, batch: jnp.mean(sum(jnp.tanh(batch @ w) for w in params.values()))
    batch = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with pytest.raises(RuntimeError, match=said):
        zerojax.forecast(loss, make_state, batch, gpus="8xH100", tx=optax.sgd(1.0))


@pytest.mark.gpu_code
def test_the_title_says_that_a_gpu_lacks_the_models_dtype():
    made = zerojax.forecast(audits.loss, audits.make_state, BATCH, gpus="8xT4", stages=3)
    lacks = "written in bfloat16, which a T4 does not have: compute in float16"
    text, (case,) = " ".join(str(made).split()), made.cases
    assert f"; matmuls in float32 ({lacks}); bytes per GPU" in text
    assert lacks in made._repr_html_() and lacks in str(case.report).replace("\n  ", " ")
    assert (case.matmuls, case.wide_matmuls) == (("float32",), lacks)


def test_the_fastest_that_fits_wins(made):
    gpu, (zero, two, three) = made.gpu, made.cases
    cases = tuple(
        dataclasses.replace(case, step_seconds=seconds, fits=fits)
        for case, seconds, fits in ((zero, 1.0, False), (two, 3.0, True), (three, 2.0, True))
    )
    found = Forecast("8xH100", gpu, cases)
    assert found.best is cases[2]
    assert "Fastest that fits: stage=3, 2.0 s a step" in str(found)
    assert found.to_dict()["best"] == 2


def test_nothing_fits(made):
    cases = tuple(dataclasses.replace(case, fits=False) for case in made.cases)
    found = Forecast("8xH100", made.gpu, cases)
    assert found.best is None and found.to_dict()["best"] is None
    least = min(case.peak for case in cases)
    stage = next(case.stage for case in cases if case.peak == least)
    assert f"at stage {stage}: use more GPUs, more microbatches" in str(found)
    assert "Nothing fits. The least is " in str(found)


def test_it_prints_and_exports(made):
    lines = str(made).splitlines()
    assert lines[0].startswith("8xH100, 72.8 GiB usable of 79.1 GiB each; matmuls in bfloat16; ")
    assert lines[1].split()[:3] == ["stage", "accumulate", "remat"]
    assert len(lines) == 3 + len(made.cases) + 1 and lines[-1].startswith("Fastest that fits")
    found = json.loads(json.dumps(made.to_dict()))
    assert found["usable_bytes"] == made.gpu.usable
    assert [case["formula"] for case in found["cases"]] == [c.formula for c in made.cases]
    assert "report" not in found["cases"][0]


@pytest.mark.gpu_code
def test_hosts_microbatches_variants_rates_and_tokens():
    rates = zerojax.Rates(flops=1e15, memory=1e13, link=1e12, network=1e6)
    losses = {"remat": audits.loss}
    found = zerojax.forecast(
        losses, audits.make_state, MANY, gpus="8xH100", stages=[3], accumulate=[2],
        rates=rates, per_host=4, tokens=7,
    )  # fmt: skip
    (case,) = found.cases
    assert (case.variant, case.accumulate, case.stage) == ("remat", 2, 3)
    assert case.report.accumulate == 2 and case.report.findings() == []
    # Rings over the four cards of a host: each sends a quarter of what its GPU sends.
    assert case.network_bytes == case.report.wire_bytes / 4 == case.link_bytes / 3
    # The cards, of 1 MB/s each, are all that takes time.
    assert case.step_seconds == pytest.approx(case.network_bytes / 1e6, rel=0.01)
    assert case.tokens_per_second == 7 / case.step_seconds
    assert "accumulate=2, remat 'remat'" in str(found)


HSDP = dict.fromkeys(("params", "grads", "opt_state"), "gpu")
AMSP = HSDP | {"opt_state": ("gpu", "node")}


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("groups", "accumulate", "resting", "near"), [(HSDP, (1, 4), 4, 0), (AMSP, (1, 4), 8, 4)]
)
def test_groups_send_between_hosts_what_the_guide_says(groups, accumulate, resting, near):
    """Two hosts of four: parameters and gradients of 2 bytes, over the GPUs of a host."""
    narrow = zerojax.Precision(param="bfloat16", compute="bfloat16")
    found = zerojax.forecast(
        audits.loss, audits.make_state, MANY, gpus="8xH100", per_host=4, groups=groups,
        accumulate=accumulate, precision=narrow,
    )  # fmt: skip
    assert [(case.stage, case.accumulate) for case in found.cases] == [(3, m) for m in accumulate]
    for case in found.cases:
        kept = 2 * PSI / near if near else 0  # of parameters, in the node
        assert case.formula == 2 * PSI / 4 + (2 + 4) * PSI / resting + kept + 8
        # Once in a step, however many microbatches: an all-reduce of shards between two hosts, or
        # a reduce-scatter of gradients and an all-gather of parameters.
        # A loop that prefetches brings its last layer into the node twice.
        again = (audits.DIM**2 + audits.DIM) / 4 if near and case.accumulate == 1 else 0
        sent = 2 * (2 * PSI / 4) / 2 + again
        assert case.network_bytes == pytest.approx(sent, rel=1e-3)
        # All layers but the last are gathered twice, the embedding once; three quarters are sent.
        stack = PSI - 2 * audits.DIM**2
        passes = stack * (3 - 1 / audits.LAYERS) + 2 * (PSI - stack)
        assert case.link_bytes == pytest.approx(case.accumulate * 2 * passes * 3 / 4, rel=0.01)
        assert case.report.findings() == []
    assert found.cases[0].groups.startswith("params over gpu, grads over gpu, opt_state over gpu")
    assert f"; {found.cases[0].groups}; bytes per GPU" in " ".join(str(found).split())
    assert json.loads(json.dumps(found.to_dict()))["cases"][0]["groups"] == found.cases[0].groups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": "64xV1"}, "no facts about a GPU 'V1'. Name one of T4"),
        ({"gpus": "0xH100"}, "does not say how many of which GPU"),
        ({"stages": ()}, "nothing to try: stages="),
        ({"accumulate": []}, "nothing to try: .*accumulate="),
        ({"loss_fn": {}}, "nothing to try: "),
        pytest.param({"stages": [7]}, "stage", marks=pytest.mark.gpu_code),
        ({"batch": {}}, "the batch has no arrays"),
        pytest.param({"groups": {"params": "data"}}, "no axis 'data'", marks=pytest.mark.gpu_code),
    ],
)
def test_bad_input(options, message):
    arguments = {"loss_fn": audits.loss, "make_state": audits.make_state, "batch": BATCH,
                 "gpus": "8xH100"} | options  # fmt: skip
    with pytest.raises(ValueError, match=message):
        zerojax.forecast(**arguments)


@pytest.mark.gpu_code
def test_a_ready_step_brings_what_it_was_made_of():
    step = zerojax.train_step(audits.loss, stage=3, accumulate=2)
    found = zerojax.forecast(step, audits.make_state, BATCH, gpus="8xH100")
    assert [(case.stage, case.accumulate) for case in found.cases] == [(3, 2)]
    assert found.cases[0].report.accumulate == 2


@pytest.mark.gpu_code
def test_orders_stand_side_by_side():
    rates = zerojax.Rates(flops=1e15, memory=1e13, link=1e12, network=1e9)
    found = zerojax.forecast(
        audits.loss, audits.make_state, BATCH, gpus="16xH100", stages=3, accumulate=2,
        order=("microbatches", "layers"), rates=rates,
    )  # fmt: skip
    in_turn, layers = found.cases
    assert [case.report.accumulate for case in found.cases] == [2, 1]
    # All but the embedding, which is gathered and reduced for each microbatch, is sent once.
    assert layers.network_bytes < 0.7 * in_turn.network_bytes
    assert found.best is layers and layers.report.findings() == []
    text = str(found)
    assert "2, layers" in text and "accumulate=2, order='layers'" in " ".join(text.split())
    step = zerojax.train_step(audits.loss, stage=3, accumulate=2, order="auto")
    (chosen,) = zerojax.forecast(step, audits.make_state, BATCH, gpus="16xH100").cases
    assert chosen.order in ("microbatches", "layers")
    assert chosen.report.accumulate == (2 if chosen.order == "microbatches" else 1)


@pytest.mark.gpu_code
@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {"donate": False}])
def test_a_ready_step_is_forecast_with_all_its_options(options):
    step = zerojax.train_step(audits.loss, stage=2, **options)
    (case,) = zerojax.forecast(step, audits.make_state, BATCH, gpus="8xH100").cases
    plan = zerojax.plan(audits.make_state, stage=2, mesh=zerojax.aot.mesh("8xH100"))
    batch = zerojax.aot.batch(BATCH, plan)
    report = zerojax.audit(step, plan.abstract(), batch, plan=plan)
    assert (case.peak, case.step_seconds) == (report.memory.peak, report.step_seconds)


@pytest.mark.parametrize("name", ["audit", "verify", "forecast", "choose"])
def test_the_key_comes_after_the_batch_as_in_a_call_of_the_step(name):
    given = inspect.signature(getattr(zerojax, name)).bind_partial("step", "state", "batch", "rng")
    assert (given.arguments["batch"], given.arguments["rng"]) == ("batch", "rng")


# -- what is compiled


def test_what_compiles_twice_compiles_once(monkeypatch):
    def stop(choices, doing):
        raise StopIteration([(*choice[1], doing(choice)) for choice in choices])

    monkeypatch.setattr("zerojax._forecast.forecast.progress", stop)
    monkeypatch.setattr("zerojax._forecast.forecast.aot.mesh", lambda *_, **__: None)
    tried = functools.partial(zerojax.forecast, audits.loss, audits.make_state, BATCH)
    with pytest.raises(StopIteration) as stopped:
        tried(gpus="8xH100", stages=[3, 3], accumulate=[1, 1])
    in_turn, layers = ORDERS[:2]
    assert stopped.value.value == [(3, 1, in_turn, "compiling stage 3 for 8xH100")]
    with pytest.raises(StopIteration) as stopped:
        tried(gpus="8xH100", stages=3, accumulate=[1, 2], order=[layers, in_turn, layers])
    # One microbatch has no order.
    assert [way for *way, _ in stopped.value.value] == [
        [3, 1, layers], [3, 2, layers], [3, 2, in_turn],
    ]  # fmt: skip
    with pytest.raises(StopIteration) as stopped:
        tried(gpus="8xH100")
    assert [stage for stage, *_ in stopped.value.value] == [0, 1, 2, 3]


def test_groups_are_compiled_at_stage_3_unless_told_otherwise(monkeypatch):
    def stop(choices, doing):
        raise StopIteration([stage for _, (stage, *_) in choices])

    monkeypatch.setattr("zerojax._forecast.forecast.progress", stop)
    mesh = types.SimpleNamespace(axis_names=("node", "gpu"))
    monkeypatch.setattr("zerojax._forecast.forecast.mesh_of", lambda *_: mesh)
    for options, stages in (({}, [3]), ({"stages": [1, 3]}, [1, 3])):
        with pytest.raises(StopIteration) as stopped:
            zerojax.forecast(
                audits.loss, audits.make_state, BATCH, gpus="8xH100", groups=HSDP, **options
            )
        assert stopped.value.value == stages


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("options", "precision"),
    [({"regather": "gpu"}, {}), ({}, {"gather": "int8", "reduce": "int8"})],
)
def test_a_step_that_names_levels_is_compiled_for_hosts_and_their_gpus(options, precision):
    step = zerojax.train_step(audits.loss, stage=3, **options)
    given = {"gpus": "16xH100", "precision": zerojax.Precision(**precision)}
    (case,) = zerojax.forecast(step, audits.make_state, BATCH, **given).cases
    (flat,) = zerojax.forecast(
        zerojax.train_step(audits.loss, stage=3), audits.make_state, BATCH, gpus="16xH100"
    ).cases
    assert 0 < case.network_bytes < 0.9 * flat.network_bytes


@pytest.mark.gpu_code
def test_a_step_of_nnx_is_forecast_with_the_function_that_makes_its_model():
    """Dropout's stream is given a key; the batch statistics are updated."""
    make = functools.partial(nnx_models.make, rate=0.1)
    step = zerojax.nnx.train_step(nnx_models.loss_fn)
    batch = jax.ShapeDtypeStruct(nnx_models.BATCH.shape, jnp.float32)
    (case,) = zerojax.forecast(step, make, batch, gpus="8xH100", stages=3).cases
    case.report.check()
    model, optimizer = zerojax.nnx.shard(make, stage=3)
    plan = zerojax.nnx.state(model, optimizer).tx.plan
    assert case.parameters == plan.bytes_per_device()["params"]


def test_the_title_has_what_the_cases_share():
    known = zerojax._hlo.known.GPUS["H100"]
    precision = zerojax.Precision(compute="bfloat16", gather="int8", reduce="int4")
    given = {"regather": ("gpu",), "update": "auto", "offload": "opt_state", "tx": None}
    given["activations"] = ()  # as a step has it that was given none
    assert _progress._settings(known, given | {"precision": precision}) == (
        "regather=('gpu',)", "offload='opt_state'", "gather int8", "reduce int4",
    )  # fmt: skip
    slow = dataclasses.replace(known, given_rates=dataclasses.replace(known.rates, network=6e9))
    assert _progress._settings(slow, {"regather": True}) == ("network cards of 6 GB/s",)
    found = Forecast("64xH100", slow, (), ("regather=False",))
    assert "; regather=False; bytes per GPU" in found._title()
    assert found.to_dict()["settings"] == ["regather=False"]
