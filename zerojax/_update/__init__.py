"""The optimizer's update as a program: which parts of it can run one after another.

It reads only jaxprs, and knows neither plans nor meshes.
"""
