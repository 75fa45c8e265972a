"""How does a graph become a file, and a file a graph?"""
