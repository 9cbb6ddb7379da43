"""A step against one device: the same inputs, replayed in plain JAX, compared leaf by leaf.

It imports `_step` and packages below it; only the top level imports it. Begin with
`verify.py`; `reference.py` computes the numbers that count as true.
"""
