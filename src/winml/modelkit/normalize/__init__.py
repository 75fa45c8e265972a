"""What is the plain form of this graph?

One pass per file; ``pipeline`` has their order. In memory, without ONNX Runtime. Does not know which tool made the
graph.
"""
