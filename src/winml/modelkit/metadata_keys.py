"""Metadata keys that winml writes into an ONNX file: every ``winml.*`` key is defined here and nowhere else.

Also defined here: keys of torch and Model Explorer that are read or written. The values are specified in
docs/reference/formats.md.
"""

from __future__ import annotations

OUR_PREFIX = "winml."

TAG_KEY = "winml.hierarchy.tag"
DEPTH_KEY = "winml.hierarchy.depth"
MODULE_KEY = "winml.hierarchy.module"
SOURCE_KEY = "winml.hierarchy.source"
MODULES_KEY = "winml.hierarchy.modules"
"""Modules of a merged node, as a JSON list of module paths, if there are several."""
TREE_KEY = "winml.hierarchy.tree"

INPUTS_KEY = "winml.io.inputs"
OUTPUTS_KEY = "winml.io.outputs"
DIMENSIONS_KEY = "winml.io.dimensions"
"""Minimum and maximum size of each dynamic dimension that the graph supports, if bounded."""
MODEL_KEY = "winml.model"
EXPORT_KEY = "winml.export"
PART_KEY = "winml.part"
"""Part of the model that the file contains, and the connections of its outputs to inputs."""
NORMALIZED_KEY = "winml.normalized"
"""JSON with ``version`` and ``fingerprint``."""
QUANTIZATION_KEY = "winml.quantization"
"""Precision and role of a node (``weight``, ``activation``, ``operator``); request and result of the model, per
module."""
ADAPTERS_KEY = "winml.adapters"
"""Names of the adapters that a model switches at run time, and the modules with inputs for them."""
FLOAT_SOURCE_KEY = "winml.quantization.source"
"""Name and digest of the float source file of a quantized model."""
COMPILE_KEY = "winml.compile"
"""Execution provider that compiled the file, its version, device and options."""
COMPILE_TRACE_KEY = "winml.compile.trace"
"""Nodes that a file was compiled from, by module, with reasons of the nodes outside and operators on the device."""
REFIT_KEY = "winml.refit"
"""Of a graph without weights: its weights in the checkpoint, and the findings of its export, for ``winml refit``."""
CUT_KEY = "winml.module"
"""Module and call that an extracted model contains."""

FUNCTIONS_KEY = "winml.functions"
"""Information on a model with modules as functions that inlining alone does not restore."""
RELATIVE_KEY = "winml.function.relative"
"""Metadata of a node in a function shared by several calls, with ``{tag}``, ``{module}`` and ``{namespace}`` as
placeholders for the values of the call."""
FUNCTION_CALL_KEY, FUNCTION_NODE_KEY = "winml.function.call", "winml.function.node"
"""Identity of the call and of the node; on nodes in memory while functions are inlined, never in a file."""
FUNCTION_DOMAIN = "winml.module"
"""Domain of functions that are modules; an operator domain, not a metadata key."""

NAMESPACE_KEY = "namespace"
"""Scope in the format that Model Explorer groups by; written by torch."""
TORCH_PREFIX = "pkg.torch."
ONNXSCRIPT_PREFIX = "pkg.onnxscript."
STACK_TRACE_KEY = "pkg.torch.onnx.stack_trace"
"""Python source lines of a node, written by torch's dynamo exporter."""
SCOPES_KEY = "pkg.torch.onnx.name_scopes"
CLASSES_KEY = "pkg.torch.onnx.class_hierarchy"
BUILDER_SCOPES_KEY = "pkg.onnxscript.name_scopes"
BUILDER_CLASSES_KEY = "pkg.onnxscript.class_hierarchy"
FX_NODE_KEY = "pkg.torch.onnx.fx_node"
