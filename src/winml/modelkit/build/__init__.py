"""In what order do the stages run?

The only place where stages meet: it loads, exports, normalizes, verifies and writes by calling the rooms that know how.
"""
