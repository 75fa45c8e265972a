"""Capture of a module's forward with torch's TorchScript exporter."""
