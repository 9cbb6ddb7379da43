"""ZeRO for JAX: the same training loop on many devices, each with 1/N of the training state.

state = zerojax.shard_train_state(state, stage=3)  # any flax TrainState
step = zerojax.train_step(loss_fn)                 # loss_fn(params, batch) -> loss
for batch in data:
    state, metrics = step(state, batch)
"""

import importlib
import sys
import typing

if typing.TYPE_CHECKING:
    from zerojax import (
        aot as aot,
        checkpoint as checkpoint,
        keras as keras,
        manual as manual,
        nnx as nnx,
        run as run,
        tools as tools,
    )
    from zerojax._checkpoint.loop import Checkpoints as Checkpoints
    from zerojax._checkpoint.save import restore as restore, save as save
    from zerojax._checkpoint.stream import stream as stream
    from zerojax._loss.batch import shard_batch as shard_batch
    from zerojax._loss.pad_batch import pad_batch as pad_batch
    from zerojax._passes.means import mean as mean
    from zerojax._plan.expert import Experts as Experts
    from zerojax._plan.mesh import mesh as mesh
    from zerojax._plan.offload import Offload as Offload
    from zerojax._plan.plan import Plan as Plan
    from zerojax._plan.planner import (
        gather_params as gather_params,
        plan as plan,
        shard_train_state as shard_train_state,
        unpad as unpad,
    )
    from zerojax._plan.precision import Precision as Precision
    from zerojax._plan.quantize import quantize as quantize
    from zerojax._plan.resharding import reshard as reshard
    from zerojax._plan.sequence import Sequences as Sequences
    from zerojax._run.processes import initialize as initialize
    from zerojax._state.module_state import ModuleState as ModuleState
    from zerojax._step.grad import value_and_grad as value_and_grad
    from zerojax._step.schedule import Schedule as Schedule
    from zerojax._step.step import eval_step as eval_step, train_step as train_step
    from zerojax._wire.codecs import QuantizedWire as QuantizedWire
    from zerojax.tools._audit.audit import audit as audit
    from zerojax.tools._forecast.forecast import forecast as forecast
    from zerojax.tools._verify.verify import verify as verify

__version__ = "0.1.0"

if (_jax := sys.modules.get("jax")) and _jax.__version_info__ < (0, 10, 2):
    raise ImportError(
        f"zerojax needs JAX 0.10.2 or newer, and {_jax.__version__} is in memory. Upgrade it, and "
        "restart the process: in a notebook, its session."
    )

# The same names, by the module that is imported when one of them is first used. With Orbax, the
# engine and the tools, `import zerojax` would cost half as much again as JAX, Flax and optax.
_EXPORTS = {
    "tools._audit.audit": ["audit"],
    "_checkpoint.loop": ["Checkpoints"],
    "_checkpoint.save": ["restore", "save"],
    "_checkpoint.stream": ["stream"],
    "_wire.codecs": ["QuantizedWire"],
    "tools._forecast.forecast": ["forecast"],
    "_loss.batch": ["shard_batch"],
    "_passes.means": ["mean"],
    "_loss.pad_batch": ["pad_batch"],
    "_plan.mesh": ["mesh"],
    "_plan.plan": ["Plan"],
    "_plan.planner": ["gather_params", "plan", "shard_train_state", "unpad"],
    "_plan.precision": ["Precision"],
    "_plan.quantize": ["quantize"],
    "_plan.resharding": ["reshard"],
    "_plan.expert": ["Experts"],
    "_plan.sequence": ["Sequences"],
    "_run.processes": ["initialize"],
    "_state.module_state": ["ModuleState"],
    "_step.grad": ["value_and_grad"],
    "_step.schedule": ["Schedule"],
    "_step.step": ["eval_step", "train_step"],
    "_plan.offload": ["Offload"],
    "tools._verify.verify": ["verify"],
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
_MODULES |= {name: name for name in ("aot", "checkpoint", "keras", "manual", "nnx", "run", "tools")}


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"zerojax.{_MODULES[name]}")
    globals()[name] = module if name == _MODULES[name] else getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
