"""Runs a loss whose parameters are sharded: each is all-gathered at its first use.

It reads jaxprs and knows nothing of states or plans: it imports only modules at the top level,
and `_step` imports it. Bytes move in `_collectives.py` alone. Begin with `ir.py`, what a jaxpr is
split into; `run.py` runs it, and the note in `body.py` says what is kept for backward.
"""
