"""How is a graph read, written and cut into parts?

Knows the ONNX file format and the ``onnx_ir`` graph. Does not know why a stage reads or writes a file.
"""
