"""Checkpoints that open at any stage on any number of devices, and safetensors files.

It imports `_plan` and `_state`, and nothing imports it but the top level. Begin with
`checkpoint.py`; `matching.py` decides which saved leaf goes where.
"""
