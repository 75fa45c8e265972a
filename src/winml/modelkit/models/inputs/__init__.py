"""Inputs of a forward, and their valid values."""
