"""How is a graph compiled for one EP?

What it makes is for the provider, device and version it was made with.
"""
