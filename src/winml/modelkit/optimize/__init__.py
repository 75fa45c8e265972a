"""What makes it cheaper with the same answer?

Takes a graph and frozen options, returns a graph. Knows neither files nor which tool made the graph.
"""
