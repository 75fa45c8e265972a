"""Writes and reads the stamp that says a graph is in its plain form, and unchanged since."""

from __future__ import annotations

import hashlib
import json

import onnx_ir as ir

from winml.modelkit.graph.fingerprint import fingerprint
from winml.modelkit.hierarchy.tagging import all_nodes
from winml.modelkit.metadata_keys import NORMALIZED_KEY

__all__ = ["is_normalized", "stamp"]

NORMALIZER_VERSION = 4
"""Counts up when the plain form changes, so that graphs in an older one are normalized again."""


def stamp(model: ir.Model) -> None:
    """Stamp the model as normalized with its present structure and names; in place."""
    model.metadata_props[NORMALIZED_KEY] = json.dumps(_record(model))


def is_normalized(model: ir.Model) -> bool:
    """Say whether the model carries a stamp of this version, and structure and names are still the stamped ones."""
    try:
        record = json.loads(model.metadata_props.get(NORMALIZED_KEY, "null"))
    except (ValueError, RecursionError):
        return False
    return bool(record == _record(model))


def _record(model: ir.Model) -> dict[str, str | int]:
    return {"version": NORMALIZER_VERSION, "fingerprint": fingerprint(model), "names": _digest_of_names(model)}


def _digest_of_names(model: ir.Model) -> str:
    """Return a digest of what the plain form promises and the structure leaves out: unique names, no unused weight."""
    names = [node.name or "" for node in all_nodes(model)]
    unused = sorted(
        name
        for graph in model.graphs()
        for name, value in graph.initializers.items()
        if not (value.uses() or value.is_graph_output())
    )
    return hashlib.sha256(json.dumps([names, unused]).encode()).hexdigest()
