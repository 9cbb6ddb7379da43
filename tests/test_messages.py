"""Bad arguments and their messages: the leaf, the value and the remedy. Nothing compiles."""

import jax
import numpy as np
import optax
import pytest

import zerojax
from tests.linear import BATCH, STEP, loss, made, placed
from tests.stored import stored

PLAN = zerojax.plan(made())
NEW = "no/such/directory"
PROGRAM = stored("step3-8xH100-jax0.12")


def train(**options):
    return lambda: zerojax.train_step(loss, **options)


def audit(**options):
    return lambda: zerojax.audit(PROGRAM, **options)


def check(**limits):
    return lambda: zerojax.audit(PROGRAM, gpu="H100").findings(**limits)


def forecast(batch=BATCH, **options):
    return lambda: zerojax.forecast(loss, made, batch, **{"gpus": "8xH100"} | options)


def table(params=7e9, devices=8, **options):
    return lambda: zerojax.memory_table(params, devices, **options)


def grads_of(*args):
    return lambda: zerojax.value_and_grad(loss, PLAN)(*args)


def export(params, **options):
    return lambda: zerojax.export_safetensors(NEW, params, **options)


def verify(**options):
    return lambda: zerojax.verify(STEP, placed(), BATCH, **options)


SAID = {
    "mutable, a number": (train(mutable=3), r"mutable=3 does not name fields.*batch_stats"),
    "mutable, None": (lambda: zerojax.eval_step(loss, mutable=None), r"mutable=None does not name"),
    "mutable, numbers": (train(mutable=[1]), r"mutable=\[1\] does not name fields"),
    "mutable, params": (train(mutable="params"), r"names 'params', which the optimizer updates"),
    "precision, FSDP2's": (
        lambda: zerojax.Precision(param_dtype="bfloat16"),
        r"has no param_dtype=. Pass compute= \(FSDP2's param_dtype, .* param= \(jmp's and Fl",
    ),
    "regather": (train(regather=0), r"regather=0 must be True or False, or name the mesh axes"),
    "donate": (train(donate=None), r"donate=None must be True or False"),
    "skip": (train(skip_nonfinite=3), r"skip_nonfinite=3 must be True or False"),
    "eval's plan": (lambda: zerojax.eval_step(loss, plan="p"), r"takes a plan, got 'p'. Make"),
    "grads of None": (lambda: zerojax.value_and_grad(None, PLAN), r"the loss is a NoneType. Pass"),
    "grads, string": (grads_of(PLAN.abstract().params, "x!"), r"batch leaf 0 is a str"),
    "grads, swapped": (lambda: zerojax.value_and_grad(PLAN, loss), r"takes a plan, got <function"),
    "gathered string": (lambda: zerojax.gather_params("a"), r"the state is a str, which JAX does"),
    "gathered plan": (lambda: zerojax.gather_params(PLAN), r"the state is a Plan, which JAX does"),
    "gathered shapes": (
        lambda: zerojax.gather_params(PLAN.abstract()), r"leaf step is a ShapeDtypeStruct, which"
    ),
    "placed, a loss": (
        lambda: zerojax.shard_train_state(loss), r"^loss takes arguments.*that makes the state tak"
    ),
    "placed by a plan, a loss": (lambda: PLAN.place(loss), r"^loss takes arguments.*make_state"),
    "planned, a loss": (lambda: zerojax.plan(loss), r"^loss takes arguments.*lambda: make_state"),
    "forecast, swapped": (
        lambda: zerojax.forecast(made, loss, BATCH, gpus="8xH100"),
        r"^loss takes arguments, and .* none. The loss comes first, zerojax.forecast\(loss_fn, m",
    ),
    "batch, string": (lambda: zerojax.shard_batch({"n": "a"}), r"batch leaf n is a str.*leave it"),
    "batch, strings": (lambda: zerojax.shard_batch(np.array(["a"] * 8)), r"a ndarray of <U1, whi"),
    "batch, objects": (lambda: zerojax.shard_batch(np.array([None] * 8)), r"ndarray of object"),
    "batch, shapes": (
        lambda: zerojax.shard_batch(jax.ShapeDtypeStruct((8, 3), "float32")), r"a ShapeDtypeStruct"
    ),
    "slice of 8.0": (lambda: zerojax.process_slice(8.0), r"8.0 rows.*Use a multiple of 8"),
    "slice of '8'": (lambda: zerojax.process_slice("8"), r"'8' rows.*Use a multiple of 8"),
    "slice of None": (lambda: zerojax.process_slice(None), r"None rows.*Use a multiple of 8"),
    "audit's gpu": (audit(gpu=3), r"gpu=3 names no GPU. Name one of T4"),
    "audit, accumulate": (audit(accumulate=0), r"accumulate=0 must be a positive integer"),
    "audit's plan": (audit(plan=3), r"takes a plan, got 3"),
    "audit of bytes": (lambda: zerojax.audit(b"HloModule"), r"something compiled.*got a bytes"),
    "audit of lowered": (
        lambda: zerojax.audit(STEP.lower(placed(), BATCH)), r"Pass lowered.compile\(\)"
    ),
    "limit, string": (check(max_peak_bytes="1GB"), r"max_peak_bytes='1GB' must be a number of"),
    "limit, negative": (check(max_peak_bytes=-1), r"max_peak_bytes=-1 must be a number of bytes"),
    "limit, percents": (check(min_overlap=90), r"min_overlap=90 must be.*between 0 and 1, a share"),
    "forecast, string": (forecast("a"), r"the batch is a str, which JAX does not accept"),
    "forecast, number": (forecast(3), r"the batch has no rows. Pass the global batch"),
    "forecast, tokens": (forecast(tokens="x"), r"tokens='x' must be positive"),
    "forecast, part of": (forecast(tokens=1.5), r"tokens=1.5 must be positive"),
    "forecast, rates": (forecast(rates=3), r"rates=3 are no rates. Pass zerojax.Rates"),
    "forecast, host": (forecast(per_host="8"), r"hosts of '8'. Pass a multiple, or per_host="),
    "table, words": (table("7b"), r"params=\['7', 'b'\] must be positive"),
    "table, nothing": (table(None), r"params=\[None\] must be positive"),
    "table, half": (table(devices=8.5), r"devices=\[8.5\] must be whole numbers"),
    "table, no stage": (table(stages=[]), r"stages=\[\] names none of \(0, 1, 2, 3\)"),
    "table, bytes": (table(param_bytes="2"), r"param_bytes='2' must not be negative"),
    "watchdog, word": (lambda: zerojax.Watchdog("600"), r"'600'\): give a positive number of sec"),
    "watchdog, None": (lambda: zerojax.Watchdog(None), r"None\): give a positive number"),
    "watchdog, ever": (lambda: zerojax.Watchdog(float("inf")), r"inf\): give a positive number"),
    "mean of None": (lambda: zerojax.mean(None), r"takes an array, got a NoneType. Pass one array"),
    "mean of dict": (lambda: zerojax.mean({"a": BATCH}), r"takes an array, got a dict. Pass one"),
    "shards, no plan": (lambda: zerojax.shards({}, 3), r"takes a plan, got 3. Make one"),
    "shards, swapped": (lambda: zerojax.shards(PLAN, {}), r"takes a plan, got a dict. Make one"),
    "specs of a state": (lambda: zerojax.param_specs(made()), r"takes a plan, got a TrainState"),
    "masters, uncalled": (
        lambda: zerojax.master_weights(optax.adam, "float32"), r"tx= is adam.*adam\(1e-3\)"
    ),
    "masters of int8": (
        lambda: zerojax.master_weights(optax.adam(1e-3), "int8"), r"not a float dtype. Use one such"
    ),
    "verify, swapped": (lambda: zerojax.verify(STEP, BATCH, placed()), r"in the other order. Call"),
    "groups, list": (lambda: zerojax.plan(made(), groups=[]), r"groups=\[\] is not a mapping. Pa"),
    "overrides, list": (
        lambda: zerojax.plan(made(), overrides=[]), r"overrides= must map .*, got \[\]. Pass a dict"
    ),
    "specs, zero": (lambda: zerojax.shard_batch(BATCH, batch_specs=0), r"has 0 for the batch.*Use"),
    "options, list": (train(compiler_options=[]), r"compiler_options=\[\] must be a dict of XLA's"),
    "has_aux": (lambda: zerojax.value_and_grad(loss, PLAN, has_aux=1), r"has_aux=1 must be True"),
    "saved key": (lambda: zerojax.save(NEW, made(), rng=3), r"rng=3 is no random key.*metadata="),
    "logical's plan": (lambda: zerojax.logical(placed(), 3), r"takes a plan, got 3"),
    "export of None": (export(None), r"a NoneType without parameters was passed.*Pass a state"),
    "export of nothing": (export([]), r"a list without parameters was passed.*Pass a state"),
    "export's names": (export(made(), names=[]), r"names= is a list. Pass a dict"),
    "export's size": (export(made(), max_file_bytes=3), r"max_file_bytes=3 must be .*5 GB"),
    "export's text": (export(made(), max_file_bytes="x"), r"max_file_bytes='x' must be .*5 GB"),
    "verify, whole": (verify(whole_batch=3), r"whole_batch=3 must be True or False"),
    "verify, word": (verify(tolerance="x"), r"tolerance='x' must be a number from 0"),
    "verify, negative": (verify(tolerance=-1), r"tolerance=-1 must be a number from 0"),
    "verify, key": (lambda: zerojax.verify(STEP, placed(), BATCH, "x"), r"the rng is a str, which"),
    "verify, string": (lambda: zerojax.verify(STEP, placed(), "x"), r"the batch is a str, which"),
    "flops of None": (lambda: zerojax.step_flops(None, made(), BATCH), r"got a NoneType: step"),
    "flops, swapped": (lambda: zerojax.step_flops(made(), STEP, BATCH), r"got a TrainState: step_"),
    "shapes on 3": (lambda: zerojax.aot.batch(BATCH, 3), r"takes a plan, got 3"),
    "shapes of a word": (lambda: zerojax.aot.batch("a", PLAN), r"the batch is a str, which JAX"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_is_said_of(case):
    use, message = SAID[case]
    with pytest.raises((TypeError, ValueError), match=message):
        use()
