"""Gradients and training steps: the loss on each device, its gradients, the user's own update.

It imports `_kernel`, `_features`, `_loss` and `_plan`; the tools above run and check what it
makes. Begin with `program.py`, the code of one device; `grad.py` puts it under `shard_map`, and
`step.py` adds the update.
"""
