"""Each argument of each public function gets values of wrong types: zerojax says what to pass."""

import inspect
import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.aot
import zerojax.nnx
from tests.support.linear import BATCH, STEP, loss, made, placed
from tests.support.schedules import train_step
from tests.support.stored import stored
from tests.test_surface import NAMED

WRONG = {"None": None, "int": 3, "str": "x", "list": [1], "object": object()}
PACKAGE = str(pathlib.Path(zerojax.__file__).parent)
IN_NNX = "eval_step merge quantize shard state train_step update"
OF_MODULES = {f"nnx.{name}": getattr(zerojax.nnx, name) for name in IN_NNX.split()}
OF_MODULES |= {f"aot.{name}": getattr(zerojax.aot, name) for name in ("batch", "mesh")}
# What users do not make, what takes anything, and numbers of a table.
NONE_OF_THEM = {"Plan", "checkpoint.Extras", "checkpoint.Preempted", "ModuleState"}
NONE_OF_THEM |= {"run.log", "tools.Rates", "tools.ReplayError", "tools.Report"}
NONE_OF_THEM |= {"tools.Verification"}
FUNCTIONS = {name: f for name, f in {**NAMED, **OF_MODULES}.items() if name not in NONE_OF_THEM}
# Trees that only the user's own function, or JAX in its place, can take for wrong.
TREES = {"manual.scan": {"init", "xs"}, "tools.step_flops": {"batch"}, "verify": {"batch"}}
TREES |= {"audit": {"batch"}, "initialize": {"elastic"}}  # which sets a flag of JAX
LEGAL = {("run.Watchdog", "int")}  # it would end this process


class ReachedError(Exception):
    """What a function does with arguments that are right."""


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """Something right for each argument that a function must have."""
    state, there = placed(), tmp_path_factory.mktemp("there")
    zerojax.save(there / "state", state)
    zerojax.checkpoint.export_safetensors(there / "weights", state)
    right = {"state": state, "state_or_fn": state, "like": state, "params": state.params}
    right |= {"plan": state.tx.plan, "tree": state.params, "shapes": BATCH, "batch": BATCH}
    right |= {"loss_fn": loss, "make_state": made, "step": STEP, "tx": optax.sgd(0.1)}
    right |= {"values": BATCH, "where": BATCH > 0, "rows": 16, "steps": 3, "seconds": 1e6}
    right |= {"every": 100, "axis": "expert", "pattern": "experts"}
    right |= {"gpu": "H100", "gpus": "8xH100", "models": "124m", "train": lambda: 1}
    right |= {"body": lambda carry, x: (carry, x), "init": 1.0, "xs": jnp.ones(3)}
    return right, there


def arguments(name, function, values, folder):
    right, there = values
    parameters = inspect.signature(function).parameters.values()
    right = {**right, "path": folder / "new", "directory": folder / "loop"}
    if name in ("restore", "checkpoint.read_extras"):
        right["path"] = there / "state"
    if name == "checkpoint.import_safetensors":
        right["path"] = there / "weights"
    if name.startswith("nnx."):
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        state = zerojax.nnx.state(model, optimizer)
        right |= {"model": model, "optimizer": optimizer, "state": state, "params": state.params}
    needed = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    needed += {"nnx.shard": ["optimizer"], "audit": ["state", "batch"]}.get(name, [])
    needed += ["xs"] if name == "manual.scan" else []
    if name == "quantize":
        right["state"] = made()
    return {each: right[each] for each in needed if each in right}


def says_what(error, name, value):
    """Whether zerojax raised an error that names an argument, or the value that it got."""
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    names = {name, name.split("_")[0], name.rstrip("s")}
    names |= {repr(value), type(value).__name__, f"/{value}"}
    is_own = file.startswith(PACKAGE) and isinstance(error, TypeError | ValueError | OSError)
    return is_own and any(each.lower() in str(error).lower() for each in names)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.filterwarnings("ignore")
def test_arguments_of_wrong_types_are_named(name, values, tmp_path, monkeypatch):
    def reached(*args, **named):
        raise ReachedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zerojax.aot, "_check_packages", reached)  # before a compile for GPUs
    monkeypatch.setattr(jax.distributed, "initialize", reached)
    function, left = FUNCTIONS[name], []
    parameters = inspect.signature(function).parameters.values()
    for p in parameters:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.name in TREES.get(name, ()):
            continue
        for kind, value in WRONG.items():
            folder = tmp_path / f"{p.name}_{kind}"
            folder.mkdir()
            if (name, kind) in LEGAL:
                continue
            try:
                result = function(**arguments(name, function, values, folder) | {p.name: value})
                if name == "Checkpoints":
                    result.close()
            except ReachedError:
                pass
            except Exception as error:
                if not says_what(error, p.name, value):
                    left.append(f"{p.name}={kind}: {type(error).__name__}: {error}")
    assert not left, "\n".join(left)


def test_each_size_of_a_mesh_is_an_argument():
    with pytest.raises(TypeError, match=r"gpu='four' must be an integer\."):
        zerojax.mesh(node=2, gpu="four")


# -- bad values: the leaf, the value and the remedy

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


def sharded(batch, **options):
    return case(zerojax.shard_batch, batch, **options)


SAID = [
    (train(mutable=3), r"mutable=3 does not name fields.*batch_stats"),
    (train(mutable="params"), r"names 'params', which the optimizer updates"),
    (
        train(stage=3),
        r"unexpected keyword argument 'stage'\. stage= is an option of plan and shard",
    ),
    (train(keep_layers=0), r"keep_layers=0 must be a positive integer: the number of"),
    (train(donate=None), r"donate=None must be True or False"),
    (train(skip_nonfinite=3), r"skip_nonfinite=3 must be True or False"),
    (train(compiler_options=[]), r"compiler_options=\[\] must be a dict of XLA's"),
    (case(zerojax.Precision, param_dtype="bfloat16"), r"no param_dtype=. Pass compute= \(FSDP2's"),
    (case(zerojax.eval_step, loss, mutable=None), r"mutable=None does not name"),
    (case(zerojax.value_and_grad, loss, PLAN, has_aux=1), r"has_aux=1 must be True"),
    (case(zerojax.gather_params, "a"), r"the state is a str, which JAX does"),
    (case(zerojax.gather_params, PLAN), r"the state is a Plan, which JAX does"),
    (case(zerojax.gather_params, SHAPES), r"leaf step is a ShapeDtypeStruct, which"),
    (case(zerojax.shard_train_state, loss), NO_MAKER),
    (case(zerojax.forecast, made, loss, BATCH, gpus="8xT4"), r"The loss comes first, zerojax.fo"),
    (sharded({"n": "a"}), r"batch leaf n is a str.*leave it"),
    (sharded(np.array([None] * 8)), r"ndarray of object"),
    (sharded(jax.ShapeDtypeStruct((8, 3), "float32")), r"a ShapeDtypeStruct"),
    (sharded(BATCH, batch_specs=0), r"has 0 for the batch.*Use"),
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
    (forecast(per_host="8"), r"per_host='8' must be an integer"),
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
