"""Export of a torch module as an ONNX graph.

Captures the forward of a module as an ``onnx_ir`` graph with the module stack of every node (``torchscript``,
``dynamo``), tags the nodes (``graph_making``), writes and verifies the file of each part (``part_export``).
"""
