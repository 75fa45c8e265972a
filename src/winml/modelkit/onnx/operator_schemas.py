"""Checks nodes against ONNX's schemas for the imported opset versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir


def nodes_against_schema(model: ir.Model) -> dict[ir.Node, str]:
    """Return node → violation, for nodes whose attributes, inputs or outputs do not fit their schema.

    Operators undefined in the imported opset version are not checked, since ONNX Runtime implements some of them.

    Args:
        model: The model; functions and subgraphs are included.
    """
    violations: dict[ir.Node, str] = {}
    scopes: list[tuple[Iterator[ir.Node], Mapping[str, int]]] = [(model.graph.all_nodes(), model.opset_imports)]
    scopes += [(function.all_nodes(), function.opset_imports) for function in model.functions.values()]
    for nodes, opsets in scopes:
        schemas: dict[tuple[str, str], onnx.defs.OpSchema | None] = {}
        for node in nodes:
            key = (node.op_type, node.domain)
            domain = "" if node.domain == "ai.onnx" else node.domain
            version = opsets.get(node.domain, opsets.get(domain))
            if key not in schemas:
                schemas[key] = None
                if version is not None and onnx.defs.has(node.op_type, version, domain):
                    schemas[key] = onnx.defs.get_schema(node.op_type, version, domain)
            schema = schemas[key]
            if schema is not None and (violation := _find_violation(node, schema, f"opset {version}")):
                violations[node] = violation
    return violations


def _find_violation(node: ir.Node, schema: onnx.defs.OpSchema, version: str) -> str | None:
    """Return the first violation as text; `None` if the node fits."""
    node_words = f"{node.op_type} {node.name or ''}".strip()
    if unknown := sorted(node.attributes.keys() - schema.attributes.keys()):
        return f"{node_words} with attribute {unknown[0]}, which {version} does not define"
    for kind, values, minimum, maximum in (
        ("inputs", node.inputs, schema.min_input, schema.max_input),
        ("outputs", node.outputs, schema.min_output, schema.max_output),
    ):
        # Omitted at the end: values that a schema with fewer values does not name.
        count = max((number for number, value in enumerate(values, 1) if value is not None), default=0)
        if not minimum <= count <= maximum:
            return f"{node_words} with {count} {kind}; {version} defines {minimum} to {maximum}"
    return None
