"""Page of one or two models: modules, graph, and the results of earlier runs.

Reads the structure of files, aligns the modules of two files, and assigns the numbers of earlier results to modules.
"""
