"""How is a module identified, and which nodes belong to it?

Tags as text (``address``), the modules a forward pass calls (``tracing``), the module tree built from those calls
(``tree``), tags on nodes (``tagging``), the share of tagged nodes (``coverage``), selectors (``selector``), and tags
restored after foreign tools (``carry``). Knows no exporter and no model library.
"""
