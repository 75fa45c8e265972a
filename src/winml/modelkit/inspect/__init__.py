"""Description of a model: modules, nodes, weights, and support by execution providers.

Reads an ONNX file without its weights, or the config of a checkpoint and the headers of its weight files. Changes
nothing.
"""
