"""What a step will need and cost on GPUs that are not there, and how much of them it uses.

It imports `_audit`, `aot` and `_step`; the command line imports it. Begin with `forecast.py`.
"""
