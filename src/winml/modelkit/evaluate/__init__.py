"""Evaluation of a model on its task: tasks, metrics and limits."""
