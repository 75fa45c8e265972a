"""Inference and text generation with a built model."""
