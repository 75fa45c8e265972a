"""Which model is it, and which inputs does its forward take?

From what the user named to a ``torch.nn.Module`` in evaluation mode and the specification of its inputs
(``model.load_model``). Knows nothing of graphs, files to write, or how the model will be exported.
"""
