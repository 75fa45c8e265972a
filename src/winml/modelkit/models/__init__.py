"""Resolution of a model: source, task, class, and the inputs of its forward.

Converts the user's request into a ``torch.nn.Module`` in evaluation mode and the specification of its inputs
(``model.load_model``). Independent of graphs, output files and export.
"""
