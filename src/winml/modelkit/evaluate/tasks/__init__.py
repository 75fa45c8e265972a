"""Evaluation tasks: roles read from a dataset, predictions from outputs, and metrics."""
