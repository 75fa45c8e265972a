"""Latency of a model, and the time of each module.

Measures runs (``latency``) and kernels (``by_module``), and returns records.
"""
