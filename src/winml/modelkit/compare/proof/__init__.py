"""Proof of a model: recorded inputs and outputs of PyTorch, replayed where the model runs, without PyTorch."""
