"""Documents of results, and their renderers for terminal, Markdown and HTML.

Contains the document that all tables are built from, and its renderers. Reads records only: runs no model and computes
no result.
"""
