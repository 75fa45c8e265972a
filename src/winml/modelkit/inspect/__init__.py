"""What is in this model?

Reads an ONNX file without its weights, or a checkpoint's config and the headers of its weight files. Changes nothing.
"""
