"""What a run does while it runs, and what a trace of it says.

`meter` follows a training loop.
"""
