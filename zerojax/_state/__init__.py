"""A user's state, taken apart: its parameters, its optimizer state, and the rest.

The only package that knows container types: `TrainState`, tuples, dicts, Flax nnx, Equinox. It
imports nothing but the modules at the top level; everything else may import it. Begin with
`state.py`. [Note: the plan in the optimizer], in `carried.py`, tells how a step finds the plan of
the state it is given.
"""
