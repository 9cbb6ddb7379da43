"""Options that attach to a step, each in one file: what it gains and costs is said first in it.

They import `_loss`, `_engine` and what is below; `_step` asks for them where their option is set.
"""
