"""What makes a graph faster without changing its outputs?

Takes a graph and frozen options, returns a graph. Knows neither files nor which tool made the graph.
"""
