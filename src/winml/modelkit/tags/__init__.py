"""Identity of modules, and the tags of their nodes.

Tags as text (``address``), module calls of a forward pass (``torch_modules``), the module tree built from those calls
(``tree``), tags on nodes and the share of tagged nodes (``tagging``), selectors (``selector``), and transfer of tags
after foreign tools (``carry``). Depends on no exporter and no model library.
"""
