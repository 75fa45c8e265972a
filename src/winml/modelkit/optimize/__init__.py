"""What makes it cheaper with the same answer?

Takes a graph and frozen options, returns a graph; knows neither files nor where the graph came from.
"""
