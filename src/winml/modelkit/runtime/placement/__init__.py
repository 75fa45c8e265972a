"""Which nodes of a graph does an execution provider run? It is asked itself, or its documentation is read."""
