"""How is an export told to programs? The ``<stem>_htp_metadata.json`` of FORMATS.

Its JSON Schema ships beside this file. Reads the result only.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from winml.modelkit.hierarchy.tree import ModuleNode
from winml.modelkit.results.export_result import ExportResult

__all__ = ["sidecar_json", "sidecar_schema"]


def sidecar_json(result: ExportResult) -> str:
    """Return the sidecar of an export as JSON text."""
    return json.dumps(_sidecar(result), indent=2, ensure_ascii=False) + "\n"


def sidecar_schema() -> dict[str, Any]:
    """Return the JSON Schema every sidecar satisfies."""
    text = resources.files(__package__).joinpath("htp_metadata.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _sidecar(result: ExportResult) -> dict[str, Any]:
    return {
        "export_context": {
            "timestamp": result.started.isoformat(timespec="seconds"),
            "tool_version": result.tool_version,
            "exporter": result.exporter,
            "exporter_reason": result.exporter_reason,
            "strategy": "htp",
            "opset_requested": result.opset_requested,
            "opset_produced": result.opset_produced,
            "seconds": round(result.seconds, 3),
        },
        "model": {
            "name_or_path": result.model.name_or_path,
            "class_name": result.model.class_name,
            "framework": "pytorch",
            "total_modules": result.tree.registered,
            "total_parameters": result.tree.root.parameter_count,
        },
        "tracing": {
            "modules_traced": len(result.tree),
            "execution_steps": result.tree.execution_steps,
            "task": result.model.task,
            "inputs": [spec.as_record() for spec in result.inputs],
        },
        "modules": _module(result, result.tree.root),
        "nodes": {node.name: node.tag for node in result.nodes},
        "statistics": _statistics(result),
        "verification": result.verification.as_record() if result.verification else None,
        "outputs": {
            "files": [{"name": file.path.name, "size_bytes": file.size_bytes} for file in result.files],
            "inputs": [spec.as_record() for spec in result.inputs],
            "outputs": [spec.as_record() for spec in result.outputs],
        },
        "notes": list(result.notes),
    }


def _module(result: ExportResult, node: ModuleNode) -> dict[str, Any]:
    return {
        "class_name": node.class_name,
        "tag": node.tag,
        "path": node.path,
        "execution_order": node.execution_order,
        "calls": node.calls,
        "depth": node.depth,
        "module_type": "torch.nn" if node.is_torch_nn else "custom",
        "is_leaf": node.is_leaf,
        "parameters": {
            "total": node.parameter_count,
            "trainable": node.trainable_count,
            "shapes": {name: list(shape) for name, shape in node.parameter_shapes.items()},
        },
        "children": [_module(result, child) for child in result.tree.children(node.path)],
    }


def _statistics(result: ExportResult) -> dict[str, Any]:
    coverage = result.coverage
    return {
        "steps": [{"name": step.name, "seconds": round(step.seconds, 4)} for step in result.steps],
        "node_count": coverage.nodes,
        "tagged_count": coverage.tagged,
        "coverage_percent": round(coverage.percent, 4),
        "sources": {
            source: {"count": count, "percent": round(100 * count / coverage.nodes, 4)}
            for source, count in coverage.sources.items()
        },
        # FORMATS: the nodes that ran in the root's own forward, so that "root" can be checked.
        "root_nodes": [node.name for node in result.nodes if node.source == "root"],
    }
