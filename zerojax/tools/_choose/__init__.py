"""The fastest way to train a model on some GPUs, ranked by a formula and compiled.

It imports `_forecast`; the command line imports it. Begin with `choose.py`.
"""
