"""Safetensors files, and what a loop saves beside its state. `zerojax` has `save`, `restore`, and
`Checkpoints`."""

from zerojax._checkpoint.extras import Extras
from zerojax._checkpoint.loop import Preempted
from zerojax._checkpoint.safetensors import export_safetensors, import_safetensors
from zerojax._checkpoint.save import read_extras

__all__ = ["Extras", "Preempted", "export_safetensors", "import_safetensors", "read_extras"]
