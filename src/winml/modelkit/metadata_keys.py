"""Which metadata keys does winml write into an ONNX file? Every ``winml.*`` key is defined here and nowhere else.

Also spelled here: the keys of torch and Model Explorer that we read or write beside ours. What each holds is
specified in docs/reference/formats.md.
"""

from __future__ import annotations

OUR_PREFIX = "winml."

TAG_KEY = "winml.hierarchy.tag"
DEPTH_KEY = "winml.hierarchy.depth"
MODULE_KEY = "winml.hierarchy.module"
SOURCE_KEY = "winml.hierarchy.source"
MODULES_KEY = "winml.hierarchy.modules"
"""The modules a merged node stands for, as a JSON list of module paths, where they are several."""
TREE_KEY = "winml.hierarchy.tree"

INPUTS_KEY = "winml.io.inputs"
OUTPUTS_KEY = "winml.io.outputs"
DIMENSIONS_KEY = "winml.io.dimensions"
"""Smallest and largest size of each dynamic dimension for which the graph was made, if it has such bounds."""
MODEL_KEY = "winml.model"
EXPORT_KEY = "winml.export"
PART_KEY = "winml.part"
"""Which part of a model of several the file is, and which of its outputs feeds which input."""
NORMALIZED_KEY = "winml.normalized"
"""JSON with ``version`` and ``fingerprint``."""
QUANTIZATION_KEY = "winml.quantization"
"""Of a node: its precision and what it is (``weight``, ``activation``, ``operator``). Of the model: what was asked for
and what came of it, module by module."""
ADAPTERS_KEY = "winml.adapters"
"""Of a model whose adapters are switched at run time: their names, and the modules that have inputs for them."""
FLOAT_SOURCE_KEY = "winml.quantization.source"
"""Of a quantized model: name and digest of the float file that it was made from."""
COMPILE_KEY = "winml.compile"
"""Which execution provider compiled the file, in which version, for which device and with which options."""
CUT_KEY = "winml.module"
"""Which call of which module a cut model is."""

FUNCTIONS_KEY = "winml.functions"
"""Of a model whose modules are functions: what inlining alone does not give back."""
RELATIVE_KEY = "winml.function.relative"
"""Of a node in a function that several calls share: its metadata, with ``{tag}``, ``{module}`` and
``{namespace}`` where those of the call go."""
FUNCTION_CALL_KEY, FUNCTION_NODE_KEY = "winml.function.call", "winml.function.node"
"""On nodes in memory while functions are inlined, never in a file: what their call is, and what they were."""
FUNCTION_DOMAIN = "winml.module"
"""The domain of functions that are modules; of operators, not of metadata."""

NAMESPACE_KEY = "namespace"
"""The scope in the form Model Explorer groups by; torch's own."""
TORCH_PREFIX = "pkg.torch."
ONNXSCRIPT_PREFIX = "pkg.onnxscript."
STACK_TRACE_KEY = "pkg.torch.onnx.stack_trace"
"""The lines of Python a node came from, as torch's dynamo exporter names it."""
SCOPES_KEY = "pkg.torch.onnx.name_scopes"
CLASSES_KEY = "pkg.torch.onnx.class_hierarchy"
BUILDER_SCOPES_KEY = "pkg.onnxscript.name_scopes"
BUILDER_CLASSES_KEY = "pkg.onnxscript.class_hierarchy"
FX_NODE_KEY = "pkg.torch.onnx.fx_node"
