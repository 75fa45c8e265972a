"""What is a module's address, and which node belongs to it?

Knows tags as text (``address``), how a forward pass visits modules (``tracing``), the tree that follows from it
(``tree``), how a tag is written on a node (``tagging``) and how much of a graph carries one (``coverage``). Knows no
exporter and no model library.
"""
