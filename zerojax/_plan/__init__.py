"""The place of each leaf of a state, decided from shapes before anything runs.

Whatever places, runs or checks a step imports it. Begin with `layout.py`, a plan as data;
`planner.py` makes one, and `plan.py` moves states by it.
"""
