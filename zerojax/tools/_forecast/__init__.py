"""The memory and time that a step will take on GPUs that are not there, and the FLOP/s it reaches.

It imports `_audit`, `aot` and `_step`; the command line imports it. Begin with `forecast.py`.
"""
