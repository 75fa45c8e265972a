"""How is a graph read, written, cut, compared?

Everything that knows the file format and the ``onnx_ir`` graph as such. Does not know what a stage wants with it.
"""
