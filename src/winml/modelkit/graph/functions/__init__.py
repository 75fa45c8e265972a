"""How do modules become functions of a file, and how does the file become one graph again?"""
