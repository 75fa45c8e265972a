"""Compilation of a graph for one execution provider.

The result runs only with the provider, device and version that it was compiled for.
"""
