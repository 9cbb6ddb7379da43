"""Each argument of each public function gets values of wrong types: zerojax says what to pass."""

import inspect
import pathlib
import traceback

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import zerojax
import zerojax.aot
import zerojax.nnx
from tests.support.linear import BATCH, STEP, loss, made, placed
from tests.test_surface import NAMED

WRONG = {"None": None, "int": 3, "str": "x", "list": [1], "object": object()}
PACKAGE = str(pathlib.Path(zerojax.__file__).parent)
IN_NNX = "eval_step merge quantized shard state train_step update"
OF_MODULES = {f"nnx.{name}": getattr(zerojax.nnx, name) for name in IN_NNX.split()}
OF_MODULES |= {f"aot.{n}": getattr(zerojax.aot, n) for n in ("batch", "install_command", "mesh")}
# What users do not make, what takes anything, and numbers of a table.
NONE_OF_THEM = {"Plan", "checkpoint.Extras", "checkpoint.Preempted", "manual.ModuleState"}
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
    right |= {"every": 100}
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
    if name == "quantized":
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
    monkeypatch.setattr(zerojax.aot, "check_packages", reached)  # before a compile for GPUs
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
