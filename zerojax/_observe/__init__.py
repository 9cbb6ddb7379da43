"""What a run does while it runs, for its logs.

It imports `_forecast`, for FLOPs. Begin with `meter.py`.
"""
