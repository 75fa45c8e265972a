"""How does a module's forward become a graph, with torch's TorchScript exporter?"""
