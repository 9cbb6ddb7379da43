"""Stages, GPUs, rows and models side by side: many forecasts, kept in a file.

It imports `_forecast`; the command line imports it. Begin with `study.py`.
"""
