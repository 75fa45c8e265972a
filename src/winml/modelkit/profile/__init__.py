"""How fast does a model run, and which module takes the time?

Measures runs (``latency``) and kernels (``by_module``), and returns records.
"""
