"""What zerojax puts together by itself, for programs that do it by hand.

`master_weights` and `narrow_moments` wrap an optimizer as `zerojax.Precision` does.
`by_matrix` has each device update whole matrices. `dequantize` returns the weights that
`zerojax.quantize` has quantized.
"""

from zerojax._plan.kept import master_weights, narrow_moments
from zerojax._plan.quantize import dequantize
from zerojax._update.matrices import by_matrix

__all__ = ["by_matrix", "dequantize", "master_weights", "narrow_moments"]
