"""The metadata and description of a model that a foreign tool wrote anew."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

__all__ = ["restore_description"]


def restore_description(rewritten: ir.Model, original: ir.Model) -> None:
    """Restore the metadata and description that a foreign tool changed, and remove unused opsets; in place.

    Args:
        rewritten: What the tool made.
        original: What it was given.
    """
    rewritten.metadata_props.clear()
    rewritten.metadata_props.update(original.metadata_props)
    rewritten.producer_name, rewritten.producer_version = original.producer_name, original.producer_version
    rewritten.doc_string, rewritten.domain = original.doc_string, original.domain
    rewritten.model_version = original.model_version
    rewritten.graph.name = original.graph.name
    RemoveUnusedOpsetsPass()(rewritten)
