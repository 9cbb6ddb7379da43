"""An account of what XLA made of a step, checked against what its stage promises.

It imports `_hlo` and `_plan`; `_forecast` imports it. Begin with `measurement.py`, what is known of
a compiled step: `audit.py` fills it in, and `contract.py` checks it.
"""
