"""Quantization engines, a module each."""
