"""Normalization of a graph to its plain form.

``pipeline`` has the order of the passes. In memory, without ONNX Runtime. Does not depend on the tool that made the
graph.
"""
