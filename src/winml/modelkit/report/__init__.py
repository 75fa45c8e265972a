"""How is it told to people and to programs?

Turns finished records into a console view, a Markdown report and a JSON sidecar. Reads records only: runs nothing,
decides nothing.
"""
