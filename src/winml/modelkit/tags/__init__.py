"""How is a module identified, and which nodes belong to it?

Tags as text (``address``), the modules a forward pass calls (``torch_modules``), the module tree built from those calls
(``tree``), tags on nodes and the share of tagged nodes (``tagging``), selectors (``selector``), and tags restored after
foreign tools (``carry``). Knows no exporter and no model library.
"""
