"""Compilation of a graph for one execution provider.

What it makes is for the provider, device and version it was made with.
"""
