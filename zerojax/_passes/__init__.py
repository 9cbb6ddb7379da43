"""Passes over a traced loss: each takes a `Loss` and returns one, and stands in a file of its own.

To write one, begin with `loss.py`. `_loss/trace.py` runs the passes that make a loss that of one
device, `_step/passes.py` those that options ask for.
"""
