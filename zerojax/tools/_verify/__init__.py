"""A step against one device: the same inputs, replayed in plain JAX, compared leaf by leaf.

It imports `_step` and what is below it; nothing imports it but the top level. Begin with
`verify.py`; `reference.py` computes the numbers that count as true.
"""
