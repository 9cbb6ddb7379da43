"""A user's state, taken apart: its parameters, its optimizer state, and the rest.

The only package that knows container types: `TrainState`, tuples, dicts, Flax nnx, Equinox. It
imports only `_kernel` and the modules at the top level. Begin with `state.py`. [Note: the plan in
the optimizer], in `carried.py`, explains how a step finds the plan of its state.
"""
