"""What is the plain form of this graph?

One pass per file, and ``pipeline`` with their order. In memory, without ONNX Runtime; does not know who made the graph.
"""
