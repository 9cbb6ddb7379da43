"""What zerojax puts together by itself, for programs that do it by hand.

`shards`, `gather`, `scan` and `param_specs` write ZeRO-3 into a `shard_map` of your own.
`master_weights` and `narrow_moments` wrap an optimizer as `zerojax.Precision` does.
`dequantized` returns the weights that `zerojax.quantized` has put into codes.
`ModuleState` makes the training state of a model that is a pytree, such as an `equinox.Module`.
"""

from zerojax._plan.kept import master_weights, narrow_moments
from zerojax._plan.quantize import dequantized
from zerojax._state.module_state import ModuleState
from zerojax._step.explicit import gather, param_specs, scan, shards

__all__ = [
    "ModuleState",
    "dequantized",
    "gather",
    "master_weights",
    "narrow_moments",
    "param_specs",
    "scan",
    "shards",
]
