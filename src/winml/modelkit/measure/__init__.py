"""How fast does a model run, and which module takes the time?

Measures runs and profiles, and returns records. Prints nothing and writes no file.
"""
