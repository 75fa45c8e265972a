"""Checkpoints: the location and the content of their files."""
