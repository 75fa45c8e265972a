"""Optimization of a graph without a change of its outputs.

Takes a graph and frozen options, returns a graph. Depends on neither files nor the tool that made the graph.
"""
