"""Checkpoints, and safetensors files, that open at any stage on any number of devices."""

from zerojax._checkpoint.extras import Extras
from zerojax._checkpoint.loop import Checkpoints, Preempted
from zerojax._checkpoint.safetensors import export_safetensors, import_safetensors
from zerojax._checkpoint.save import read_extras, restore, save

__all__ = [
    "Checkpoints",
    "Extras",
    "Preempted",
    "export_safetensors",
    "import_safetensors",
    "read_extras",
    "restore",
    "save",
]
