"""How are results rendered: console, Markdown, HTML, JSON?

The document that the tables of all subjects are made of, and its renderers. Reads records only: runs nothing and
computes no result.
"""
