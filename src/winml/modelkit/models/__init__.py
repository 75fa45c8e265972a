"""Which model is it, and which inputs does its forward take?

Converts the user's request into a ``torch.nn.Module`` in evaluation mode and the specification of its inputs
(``model.load_model``). Independent of graphs, output files and export.
"""
