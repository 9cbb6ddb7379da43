"""ZeRO for JAX: the same training loop on many devices, each with 1/N of the training state.

state = zerojax.shard_train_state(state, stage=3)  # any flax TrainState
step = zerojax.train_step(loss_fn)                 # loss_fn(params, batch) -> loss
for batch in data:
    state, metrics = step(state, batch)
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from zerojax import aot as aot, manual as manual, nnx as nnx
    from zerojax._checkpoint.checkpoint import (
        read_extras as read_extras,
        restore as restore,
        save as save,
    )
    from zerojax._checkpoint.extras import Extras as Extras
    from zerojax._checkpoint.goodput import Goodput as Goodput
    from zerojax._checkpoint.loop import Checkpoints as Checkpoints, Preempted as Preempted
    from zerojax._checkpoint.safetensors import (
        export_safetensors as export_safetensors,
        import_safetensors as import_safetensors,
    )
    from zerojax._loss.batch import process_slice as process_slice, shard_batch as shard_batch
    from zerojax._loss.mean import mean as mean
    from zerojax._loss.pad_batch import pad_batch as pad_batch
    from zerojax._observe.meter import Meter as Meter
    from zerojax._plan.mesh import mesh as mesh
    from zerojax._plan.place import (
        full_params as full_params,
        shard_train_state as shard_train_state,
        unpad as unpad,
    )
    from zerojax._plan.plan import Plan as Plan
    from zerojax._plan.planner import plan as plan
    from zerojax._plan.precision import Precision as Precision
    from zerojax._run.elastic import elastic as elastic
    from zerojax._run.processes import Watchdog as Watchdog, initialize as initialize, log as log
    from zerojax._step.grad import value_and_grad as value_and_grad
    from zerojax._step.step import eval_step as eval_step, train_step as train_step
    from zerojax._update.offload import Offload as Offload
    from zerojax._wire.codecs import Quantized as Quantized
    from zerojax.tools._audit.audit import audit as audit
    from zerojax.tools._audit.report import Report as Report
    from zerojax.tools._choose.choose import choose as choose
    from zerojax.tools._forecast.forecast import forecast as forecast
    from zerojax.tools._forecast.memory_table import memory_table as memory_table
    from zerojax.tools._forecast.mfu import peak_flops as peak_flops, step_flops as step_flops
    from zerojax.tools._hlo.gpus import Rates as Rates
    from zerojax.tools._hlo.known import rates_of as rates_of
    from zerojax.tools._study.study import study as study
    from zerojax.tools._verify.verification import Verification as Verification
    from zerojax.tools._verify.verify import verify as verify

__version__ = "0.1.0"

# The same names, by the module that is imported when one of them is first used. With Orbax, the
# engine and the tools, `import zerojax` would cost half as much again as JAX, Flax and optax.
_EXPORTS = {
    "tools._audit.audit": ["audit"],
    "tools._audit.report": ["Report"],
    "_checkpoint.checkpoint": ["read_extras", "restore", "save"],
    "_checkpoint.extras": ["Extras"],
    "_checkpoint.goodput": ["Goodput"],
    "_checkpoint.loop": ["Checkpoints", "Preempted"],
    "_checkpoint.safetensors": ["export_safetensors", "import_safetensors"],
    "tools._choose.choose": ["choose"],
    "_wire.codecs": ["Quantized"],
    "_run.elastic": ["elastic"],
    "tools._forecast.forecast": ["forecast"],
    "tools._forecast.memory_table": ["memory_table"],
    "tools._forecast.mfu": ["peak_flops", "step_flops"],
    "tools._hlo.gpus": ["Rates"],
    "tools._hlo.known": ["rates_of"],
    "_loss.batch": ["process_slice", "shard_batch"],
    "_loss.mean": ["mean"],
    "_loss.pad_batch": ["pad_batch"],
    "_observe.meter": ["Meter"],
    "_plan.mesh": ["mesh"],
    "_plan.place": ["full_params", "shard_train_state", "unpad"],
    "_plan.plan": ["Plan"],
    "_plan.planner": ["plan"],
    "_plan.precision": ["Precision"],
    "_run.processes": ["Watchdog", "initialize", "log"],
    "_step.grad": ["value_and_grad"],
    "_step.step": ["eval_step", "train_step"],
    "tools._study.study": ["study"],
    "_update.offload": ["Offload"],
    "tools._verify.verification": ["Verification"],
    "tools._verify.verify": ["verify"],
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
_MODULES |= {name: name for name in ("aot", "manual", "nnx")}


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zerojax' has no attribute {name!r}")
    module = importlib.import_module(f"zerojax.{_MODULES[name]}")
    globals()[name] = module if name == _MODULES[name] else getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
