"""A user's loss as a jaxpr, and its arguments: batches, keys, fields, exact means.

It imports `_plan` and what is below it; `_step` and the tools import it. Begin with `trace.py`.
"""
