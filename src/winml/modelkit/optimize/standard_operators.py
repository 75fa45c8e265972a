"""Replacement of ONNX Runtime's fused operators by equal operators of ONNX."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx_ir as ir

from winml.modelkit.errors import OptimizeError, opt
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.optimize.graph_matching import CONTRIB_DOMAIN
from winml.modelkit.tags.tagging import all_nodes, operator_name

_QUICK_GELU_ALPHA = 1.702
"""Specified: default of the attribute of ONNX Runtime's operator; that of ONNX's Swish is 1."""


def write_standard_operators(model: ir.Model) -> None:
    """Replace operators of ONNX Runtime by ONNX's operators, in place; the nodes keep their metadata.

    Raises:
        OptimizeError: operators of ONNX Runtime remain; the message lists them.
    """
    opset = model.opset_imports.get("", 1)
    names = FreshNames(node.name for node in all_nodes(model))
    for node in all_nodes(model):
        if (node.domain, node.op_type) in _RUNTIME_OPERATORS:
            _replace_operator(node, opset, names)
    remaining = Counter(operator_name(node) for node in all_nodes(model) if _is_of_runtime(node, opset))
    if remaining:
        listed = ", ".join(f"{count} {name}" for name, count in remaining.most_common())
        raise OptimizeError(
            f"{opt.operators} standard: opset {opset} of ONNX has no operator for {listed}",
            hint=f"Optimize the file as exported: it has no operators of ONNX Runtime. Or omit {opt.operators}.",
        )
    model.opset_imports.pop(CONTRIB_DOMAIN, None)


_RUNTIME_OPERATORS = frozenset({
    ("", "SimplifiedLayerNormalization"), (CONTRIB_DOMAIN, "FastGelu"), (CONTRIB_DOMAIN, "Gelu"),
    (CONTRIB_DOMAIN, "QuickGelu"),
})  # fmt: skip
"""Operators of ONNX Runtime that ONNX defines under another name."""


def _replace_operator(node: ir.Node, opset: int, names: FreshNames) -> None:
    """Write ONNX's equal operator to a node, in place; nothing if ONNX does not define it in the opset."""
    attributes: list[ir.Attr] = []
    new_operator = node.op_type
    match node.op_type:
        case "SimplifiedLayerNormalization":
            new_operator = "RMSNormalization"
        case "FastGelu":
            new_operator, attributes = "Gelu", [ir.AttrString("approximate", "tanh")]
        case "QuickGelu":
            alpha = node.attributes.get_float("alpha", _QUICK_GELU_ALPHA)
            new_operator, attributes = "Swish", [ir.AttrFloat32("alpha", alpha)]
    has_bias = node.op_type == "FastGelu" and len(node.inputs) > 1
    if has_bias or len(node.outputs) > 1 or not _is_defined(new_operator, opset):
        return
    if node.op_type != new_operator and node.op_type in (node.name or ""):
        node.name = names.take((node.name or "").replace(node.op_type, new_operator))
    node.domain, node.op_type = "", new_operator
    for attribute in attributes:
        node.attributes.add(attribute)


def _is_of_runtime(node: ir.Node, opset: int) -> bool:
    """Return True for a node of ONNX Runtime's domains, or of ONNX's domain that ONNX does not define."""
    if node.domain:
        return node.domain == CONTRIB_DOMAIN or node.domain.startswith(f"{CONTRIB_DOMAIN}.")
    return not _is_defined(node.op_type, opset)


def _is_defined(operator: str, opset: int) -> bool:
    return bool(onnx.defs.has(operator, opset))
