"""How does a torch module become a graph?

Prepares a live module and restores it (``preparation``), captures its forward as an ``onnx_ir`` graph whose nodes know
the module they ran in (``torchscript`` with ``scopes``, ``dynamo`` with ``module_stacks``), tags them (``node_tagger``)
and compares the file with the module (``verification``). Does not load models, normalize graphs or write files.
"""
