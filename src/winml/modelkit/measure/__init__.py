"""How fast, how big, how far from the reference?

Measures what it is given and returns records; prints nothing and writes no file.
"""
