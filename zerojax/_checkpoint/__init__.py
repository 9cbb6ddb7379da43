"""Checkpoints that open at any stage on any number of devices, and safetensors files.

It imports `_plan` and `_state`, and only the top level and `zerojax.checkpoint` import it. Begin
with `save.py`; `matching.py` decides which saved leaf goes where.
"""
