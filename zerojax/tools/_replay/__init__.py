"""Steps that run twice now and then, to find devices that compute wrong numbers.

It makes a program of its own from the step, whose code knows nothing of it. Begin with
`replayed.py`.
"""
