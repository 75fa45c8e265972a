"""Reading, writing and cutting of ONNX graphs.

Knows the ONNX file format and the ``onnx_ir`` graph. Does not know why a stage reads or writes a file.
"""
