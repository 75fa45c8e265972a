"""Quantization: weights and activations with fewer bits.

``pipeline`` takes a graph and frozen options, and returns a graph that computes with fewer bits where its modules
allow it. ``file_quantization`` does so from file to file; ``budget`` and ``sensitivity`` choose the bits.
"""
