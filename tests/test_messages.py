"""Bad arguments and their messages: the leaf, the value and the remedy. Nothing compiles."""

import jax
import numpy as np
import pytest

import zerojax
from tests.support.linear import BATCH, STEP, loss, made, placed
from tests.support.schedules import train_step
from tests.support.stored import stored

PLAN = zerojax.plan(made())
SHAPES = PLAN.abstract()
PROGRAM = stored("step3-8xH100-jax0.12")
NO_MAKER = (
    r"^loss takes arguments, but a function that makes the state takes none.*lambda: make_state"
)


def case(function, *args, **options):
    return lambda: function(*args, **options)


def train(**options):
    return lambda: train_step(loss, **options)


def audit(**options):
    return case(zerojax.audit, PROGRAM, **options)


def check(**limits):
    return lambda: zerojax.audit(PROGRAM, gpu="H100").findings(**limits)


def forecast(batch=BATCH, **options):
    return case(zerojax.forecast, loss, made, batch, **{"gpus": "8xH100"} | options)


def verify(batch=BATCH, *args, **options):
    return lambda: zerojax.verify(STEP, placed(), batch, *args, **options)


def rows(batch, **options):
    return case(zerojax.shard_batch, batch, **options)


SAID = [
    (train(mutable=3), r"mutable=3 does not name fields.*batch_stats"),
    (train(mutable="params"), r"names 'params', which the optimizer updates"),
    (
        train(stage=3),
        r"unexpected keyword argument 'stage'\. stage= is an option of plan and shard",
    ),
    (train(keep_layers=0), r"keep_layers=0 must be an integer of 1 or more: the number of"),
    (train(donate=None), r"donate=None must be True or False"),
    (train(skip_nonfinite=3), r"skip_nonfinite=3 must be True or False"),
    (train(compiler_options=[]), r"compiler_options=\[\] must be a dict of XLA's"),
    (case(zerojax.Precision, param_dtype="bfloat16"), r"no param_dtype=. Pass compute= \(FSDP2's"),
    (case(zerojax.eval_step, loss, mutable=None), r"mutable=None does not name"),
    (case(zerojax.value_and_grad, loss, PLAN, has_aux=1), r"has_aux=1 must be True"),
    (case(zerojax.full_params, "a"), r"the state is a str, which JAX does"),
    (case(zerojax.full_params, PLAN), r"the state is a Plan, which JAX does"),
    (case(zerojax.full_params, SHAPES), r"leaf step is a ShapeDtypeStruct, which"),
    (case(zerojax.shard_train_state, loss), NO_MAKER),
    (case(zerojax.forecast, made, loss, BATCH, gpus="8xT4"), r"The loss comes first, zerojax.fo"),
    (rows({"n": "a"}), r"batch leaf n is a str.*leave it"),
    (rows(np.array([None] * 8)), r"ndarray of object"),
    (rows(jax.ShapeDtypeStruct((8, 3), "float32")), r"a ShapeDtypeStruct"),
    (rows(BATCH, batch_specs=0), r"has 0 for the batch.*Use"),
    (case(zerojax.run.process_slice, 8.0), r"8.0 rows.*Use a multiple of 8"),
    (audit(gpu=3), r"gpu=3 names no GPU. Name one of T4"),
    (audit(accumulate=0), r"accumulate=0 must be a positive integer"),
    (case(zerojax.audit, b"HloModule"), r"something compiled.*got a bytes"),
    (lambda: zerojax.audit(STEP.lower(placed(), BATCH)), r"Pass lowered.compile\(\)"),
    (check(max_peak_bytes="1GB"), r"max_peak_bytes='1GB' must be a number of"),
    (check(min_overlap=90), r"min_overlap=90 must be.*between 0 and 1, a share"),
    (forecast(3), r"the batch has no arrays with rows. Pass the global batch"),
    (forecast(tokens="x"), r"tokens='x' must be positive"),
    (forecast(rates=3), r"rates=3 must be a zerojax.tools.Rates"),
    (forecast(per_host="8"), r"hosts of '8'. Pass a multiple, or per_host="),
    (case(zerojax.run.Watchdog, "600"), r"'600'\): pass a positive number of sec"),
    (lambda: zerojax.stream(placed(), dtype="bf16"), r"dtype='bf16' is not a dtype of floats"),
    (lambda: zerojax.stream(lambda: 0), r"^the state is a function, and zerojax.stream takes"),
    (case(zerojax.mean, None), r"takes an array, got a NoneType. Pass one array"),
    (case(zerojax.mean, {"a": BATCH}), r"takes an array, got a dict. Pass one"),
    (verify(whole_batch=3), r"whole_batch=3 must be True or False"),
    (verify(tolerance="x"), r"tolerance='x' must be a number from 0"),
    (case(zerojax.tools.step_flops, None, made(), BATCH), r"got a NoneType: step"),
    (case(zerojax.tools.step_flops, made(), STEP, BATCH), r"got a TrainState: step_"),
]


@pytest.mark.parametrize("use, message", SAID)
def test_what_is_said_of_bad_arguments(use, message):
    with pytest.raises((TypeError, ValueError), match=message):
        use()
