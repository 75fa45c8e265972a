"""Calls of a built model."""
