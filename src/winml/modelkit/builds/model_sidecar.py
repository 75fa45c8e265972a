"""Describes the finished model of a build: the sidecar of its export, with the nodes as they are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from winml.modelkit.builds.stage_runs import BuiltPart
from winml.modelkit.file_names import SIDECAR_SUFFIX
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.hierarchy.coverage import all_nodes, measure_coverage
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.options import read_json_file
from winml.modelkit.report.sidecar import DescribedFile, adapted_sidecar_json
from winml.modelkit.results.build_manifest import FileRecord

__all__ = ["has_sidecar", "model_sidecar"]


def has_sidecar(part: BuiltPart) -> bool:
    """Say whether the export of a part wrote a sidecar."""
    return _export_sidecar(part) is not None


def model_sidecar(part: BuiltPart, folder: Path, model_name: str) -> tuple[str | None, str]:
    """Return the sidecar of a finished part, and what is to be said of it.

    Args:
        part: The part; its last stage ran or was reused.
        folder: The folder of the build.
        model_name: The name the result gets.

    Returns:
        The text, None where the export wrote no sidecar or it describes another file; and a note, or an empty string.
    """
    found = _export_sidecar(part)
    if found is None:
        return None, ""
    exported, sidecar = found
    try:
        record: dict[str, Any] = read_json_file(folder / sidecar.name)
        # Sidecars of earlier versions do not say what they describe; the manifest does.
        is_its_own = record.get("model_sha256", exported.sha256) == exported.sha256
    except (OSError, ValueError, AttributeError):
        is_its_own = False
    if not is_its_own:
        return None, f"{folder / sidecar.name} does not describe {exported.name}, and is not used."
    return _adapted(record, part, folder, model_name), ""


def _export_sidecar(part: BuiltPart) -> tuple[FileRecord, FileRecord] | None:
    """Return the model that was made from PyTorch and its sidecar."""
    for record in part.records:
        sidecar = next((file for file in record.files if file.name.endswith(SIDECAR_SUFFIX)), None)
        if sidecar is not None:
            return record.files[0], sidecar
    return None


def _adapted(record: dict[str, Any], part: BuiltPart, folder: Path, model_name: str) -> str:
    model_file = part.current_files[0]
    model = ir.serde.deserialize_model(read_structure(folder / model_file.name))
    tags = [(node.name or "", tag) for node in all_nodes(model) if (tag := read_tag(node))]
    data = (file for file in part.current_files[1:] if not file.name.endswith(SIDECAR_SUFFIX))
    described = DescribedFile(
        sha256=model_file.sha256,
        files=((model_name, model_file.size_bytes), *((file.name, file.size_bytes) for file in data)),
        nodes={name: tag.tag for name, tag in tags},
        root_nodes=tuple(name for name, tag in tags if tag.source == "root"),
        coverage=measure_coverage(model),
    )
    return adapted_sidecar_json(record, described)
