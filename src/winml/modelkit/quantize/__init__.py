"""How are weights and activations represented with fewer bits?

Takes a graph and frozen options, returns a graph that computes with fewer bits where its modules allow it. Knows
neither files nor which tool made the graph; ranges of activations are given.
"""
