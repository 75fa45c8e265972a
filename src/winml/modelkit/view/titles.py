"""Titles of the numbers and texts of modules that every page can show."""

UNCHANGED = ("equal", "changed inside")
"""Words for a module that does not itself differ: without and with changes of the modules inside it."""
STRUCTURE = ("nodes", "parameters", "bytes of weights", "MACs")
"""Numbers of every file, in the order of the own numbers of a template."""
PARAMETERS = STRUCTURE[1]
BITS, CLASS, CHANGE = "bits of a parameter", "class", "change"
"""Further values that are not from an earlier run."""
