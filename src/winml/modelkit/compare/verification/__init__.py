"""Verification of a written file: its outputs compared with those of PyTorch."""
