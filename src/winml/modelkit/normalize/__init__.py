"""What is the plain form of this graph?

``pipeline`` has the order of the passes. In memory, without ONNX Runtime. Does not depend on the tool that made the
graph.
"""
