"""What zerojax puts together by itself, for programs that do it by hand.

`master_weights` and `narrow_moments` wrap an optimizer as `zerojax.Precision` does.
`dequantize` returns the weights that `zerojax.quantize` has quantized.
`ModuleState` makes the training state of a model that is a pytree, such as an `equinox.Module`.
"""

from zerojax._plan.kept import master_weights, narrow_moments
from zerojax._plan.quantize import dequantize
from zerojax._state.module_state import ModuleState

__all__ = ["ModuleState", "dequantize", "master_weights", "narrow_moments"]
