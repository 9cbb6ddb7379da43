"""Readers of compiled programs' text: instructions, bytes, times, and the origins of values.

It knows XLA and GPUs and nothing of ZeRO. It imports nothing of this library but the modules at
the top level; `_audit`, `aot` and `_forecast` import it. Begin with `module.py`.
"""
