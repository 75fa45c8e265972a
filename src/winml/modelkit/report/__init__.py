"""How are results rendered: console, Markdown, HTML, JSON?

Contains the document that all tables are built from, and its renderers. Reads records only: runs no model and computes
no result.
"""
