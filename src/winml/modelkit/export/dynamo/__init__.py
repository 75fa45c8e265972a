"""Capture of a module's forward with torch's dynamo exporter."""
