"""How are results rendered: console, Markdown, HTML, JSON?

Turns finished records into tables, pages, reports and files for other tools. Reads records only: runs nothing and
computes no result.
"""
