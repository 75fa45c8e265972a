"""Extraction of modules as models of their own."""
