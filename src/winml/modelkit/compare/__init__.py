"""Comparison of two models: outputs, generated text, and the first module that differs."""
