"""The optimizer's update as a program, traced once: which parts of it can run one after another.

Reads jaxprs only; knows neither plans nor meshes.
"""
