"""What XLA made of a step, held to what its stage promises.

It imports `_hlo` and `_plan`; `_forecast` imports it. Begin with `measured.py`, what is known of a
compiled step; `contract.py` has the promises, and `audit.py` fills in the one and asks the other.
"""
