"""An account of the program that XLA made of a step, checked against the promises of its stage.

It imports `_hlo` and `_plan`; `_forecast` imports it. Begin with `measurement.py`, the cost of a
compiled step: `audit.py` fills it in, and `contract.py` checks it.
"""
