"""What makes a graph faster without changing its outputs?

Takes a graph and frozen options, returns a graph. Depends on neither files nor the tool that made the graph.
"""
