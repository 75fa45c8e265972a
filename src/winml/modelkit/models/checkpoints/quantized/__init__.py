"""Readers of quantized checkpoints, by the format in which a checkpoint is published."""
