"""ZeRO for JAX: train on many devices with 1/N of the memory and the same numbers.

state = zerojax.shard_train_state(state, stage=3)  # any flax TrainState
step = zerojax.train_step(loss_fn)                 # loss_fn(params, batch) -> loss
for batch in data:
    state, metrics = step(state, batch)
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from zerojax import aot as aot
    from zerojax import nnx as nnx
    from zerojax._audit import audit as audit
    from zerojax._audit_report import Report as Report
    from zerojax._batch import process_slice as process_slice
    from zerojax._batch import shard_batch as shard_batch
    from zerojax._checkpoint import read_extras as read_extras
    from zerojax._checkpoint import restore as restore
    from zerojax._checkpoint import save as save
    from zerojax._checkpoints import Checkpoints as Checkpoints
    from zerojax._checkpoints import Preempted as Preempted
    from zerojax._explicit import gather as gather
    from zerojax._explicit import param_specs as param_specs
    from zerojax._explicit import scan as scan
    from zerojax._explicit import shards as shards
    from zerojax._extras import Extras as Extras
    from zerojax._forecast import forecast as forecast
    from zerojax._gpus import Rates as Rates
    from zerojax._grad import value_and_grad as value_and_grad
    from zerojax._mean import mean as mean
    from zerojax._memory_table import memory_table as memory_table
    from zerojax._mfu import peak_flops as peak_flops
    from zerojax._mfu import step_flops as step_flops
    from zerojax._module_state import ModuleState as ModuleState
    from zerojax._place import gather_params as gather_params
    from zerojax._place import shard_train_state as shard_train_state
    from zerojax._plan import LeafPlan as LeafPlan
    from zerojax._plan import Plan as Plan
    from zerojax._planner import plan as plan
    from zerojax._precision import Precision as Precision
    from zerojax._precision import master_weights as master_weights
    from zerojax._processes import Watchdog as Watchdog
    from zerojax._processes import initialize as initialize
    from zerojax._processes import log as log
    from zerojax._report import Verification as Verification
    from zerojax._safetensors import export_safetensors as export_safetensors
    from zerojax._safetensors import import_safetensors as import_safetensors
    from zerojax._step import eval_step as eval_step
    from zerojax._step import train_step as train_step
    from zerojax._verify import verify as verify

__version__ = "0.1.0"

# The same names, each with the module that is imported when it is first used. With Orbax, the
# engine and the tools, `import zerojax` would cost half as much again as JAX, Flax and optax.
_MODULES = {
    "aot": "aot", "nnx": "nnx", "audit": "_audit", "Report": "_audit_report",
    "process_slice": "_batch", "shard_batch": "_batch", "read_extras": "_checkpoint",
    "restore": "_checkpoint", "save": "_checkpoint", "Checkpoints": "_checkpoints",
    "Preempted": "_checkpoints", "gather": "_explicit", "param_specs": "_explicit",
    "scan": "_explicit", "shards": "_explicit", "Extras": "_extras", "forecast": "_forecast",
    "Rates": "_gpus", "value_and_grad": "_grad", "mean": "_mean", "memory_table": "_memory_table",
    "peak_flops": "_mfu", "step_flops": "_mfu", "ModuleState": "_module_state",
    "gather_params": "_place", "shard_train_state": "_place", "LeafPlan": "_plan", "Plan": "_plan",
    "plan": "_planner", "Precision": "_precision", "master_weights": "_precision",
    "Watchdog": "_processes", "initialize": "_processes", "log": "_processes",
    "Verification": "_report", "export_safetensors": "_safetensors",
    "import_safetensors": "_safetensors", "eval_step": "_step", "train_step": "_step",
    "verify": "_verify",
}  # fmt: skip


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zerojax' has no attribute {name!r}")
    module = importlib.import_module(f"zerojax.{_MODULES[name]}")
    globals()[name] = module if name == _MODULES[name] else getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
