"""The sidecar of an exported graph for programs: ``<stem>_htp_metadata.json`` of FORMATS.

Its JSON Schema is next to this file. Reads only the export result.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winml.modelkit.export.records import ExportedPart, ExportResult
from winml.modelkit.tags.tagging import Coverage
from winml.modelkit.tags.tree import ModuleNode
from winml.modelkit.words import json_printable

_SIDECAR_VERSION = 2
"""``schema_version``: raised when a key changes its name or meaning. Sidecars of version 1 have no
``verification.assumed``; earlier sidecars have no version and are otherwise equal to version 1.
"""


def sidecar_json(result: ExportResult, part: ExportedPart) -> str:
    """Return the sidecar of one part of an export as JSON text."""
    return json_printable(json.dumps(_sidecar_record(result, part), indent=2, ensure_ascii=False)) + "\n"


@dataclass(frozen=True)
class DescribedFile:
    """A file that a later stage made of an exported one."""

    sha256: str
    """SHA-256 of the model file."""
    files: tuple[tuple[str, int], ...]
    """Name and size in bytes, the model first."""
    nodes: Mapping[str, str]
    """Node → tag."""
    root_nodes: tuple[str, ...]
    """Nodes tagged with the root because no other tag was found."""
    coverage: Coverage


def adapted_sidecar_json(sidecar: Mapping[str, Any], file: DescribedFile) -> str:
    """Return the sidecar of an export as JSON text, with its file facts replaced by the facts of ``file``."""
    note = f"Nodes, coverage and files are those of {file.files[0][0]}; everything else is that of the export."
    node_counts = Counter(file.nodes.values())
    record = {
        **sidecar,
        "model_sha256": file.sha256,
        **{key: _update_node_counts(module, node_counts) for key, module in sidecar.items() if key == "modules"},
        "nodes": dict(file.nodes),
        "statistics": {**sidecar["statistics"], **_coverage_record(file.coverage), "root_nodes": list(file.root_nodes)},
        "outputs": {**sidecar["outputs"], "files": [{"name": name, "size_bytes": size} for name, size in file.files]},
        "notes": [*sidecar["notes"], note],
    }
    return json_printable(json.dumps(record, indent=2, ensure_ascii=False)) + "\n"


def _sidecar_record(result: ExportResult, part: ExportedPart) -> dict[str, object]:
    return {
        "schema_version": _SIDECAR_VERSION,
        "model_sha256": part.model_sha256,
        "export_context": {
            "timestamp": result.started.isoformat(timespec="seconds"),
            "tool_version": result.tool_version,
            "exporter": part.exporter,
            "exporter_reason": part.exporter_reason,
            "strategy": "htp",
            "opset_requested": part.opset_requested,
            "opset_produced": part.opset_produced,
            "seconds": round(part.seconds, 3),
        },
        "model": {
            "name_or_path": result.model.name_or_path,
            "class_name": result.model.class_name,
            "framework": "pytorch",
            "total_modules": part.tree.registered,
            "total_parameters": part.tree.root.parameter_count,
        },
        **({"part": part.description.as_record()} if part.description is not None else {}),
        "tracing": {
            "modules_traced": len(part.tree),
            "execution_steps": part.tree.execution_steps,
            "task": result.model.task,
            "inputs": [spec.as_record() for spec in part.inputs],
        },
        "modules": _update_node_counts(_module_record(part, part.tree.root), Counter(node.tag for node in part.nodes)),
        "nodes": {node.name: node.tag for node in part.nodes},
        "statistics": {
            "steps": [{"name": step.name, "seconds": round(step.seconds, 4)} for step in part.steps],
            **_coverage_record(part.coverage),
            # FORMATS: the nodes that ran in the root's own forward, so that "root" can be checked.
            "root_nodes": [node.name for node in part.nodes if node.source == "root"],
        },
        "verification": part.verification.as_record() if part.verification else None,
        "outputs": {
            "files": [{"name": file.path.name, "size_bytes": file.size_bytes} for file in part.files],
            "companions": list(result.companions.names),
            "companions_sha256": dict(result.companions.sha256),
            "inputs": [spec.as_record() for spec in part.inputs],
            "outputs": [spec.as_record() for spec in part.outputs],
        },
        "notes": [*result.model_notes, *part.notes],
    }


def _module_record(part: ExportedPart, node: ModuleNode) -> dict[str, object]:
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
        "children": [_module_record(part, child) for child in part.tree.children(node.path)],
    }


def _update_node_counts(module: Mapping[str, Any], own_counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the record of a module and its children with node counts updated by tag."""
    children = [_update_node_counts(child, own_counts) for child in module["children"]]
    count = own_counts.get(module["tag"], 0)
    nodes = {"total": count + sum(child["nodes"]["total"] for child in children), "own": count}
    return {**module, "nodes": nodes, "children": children}


def _coverage_record(coverage: Coverage) -> dict[str, object]:
    return {
        "node_count": coverage.nodes,
        "tagged_count": coverage.tagged,
        "coverage_percent": round(coverage.percent, 4),
        "at_root_count": coverage.at_root,
        "at_root_percent": round(coverage.at_root_percent, 4),
        "sources": {
            source: {"count": count, "percent": round(100 * count / coverage.nodes, 4)}
            for source, count in coverage.sources.items()
        },
    }
