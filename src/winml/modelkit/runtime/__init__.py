"""What does a graph answer on a device?

Values to feed it (``feeds``) and sessions to run it (``sessions``). Knows nothing of torch or of where a graph came from.
"""
