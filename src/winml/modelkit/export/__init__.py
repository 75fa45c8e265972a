"""How does a torch module become a graph?

Prepares a live module and restores it (``preparation``), captures its forward as an ``onnx_ir`` graph with the module
stack of every node (``torchscript``, ``dynamo``), and tags the nodes (``node_tagger``). Does not load models, normalize
graphs, write or verify files.
"""
