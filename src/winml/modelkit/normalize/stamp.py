"""Writes and reads the stamp that says a graph is in its plain form, and unchanged since."""

from __future__ import annotations

import json

import onnx_ir as ir

from winml.modelkit.graph.fingerprint import fingerprint
from winml.modelkit.metadata_keys import NORMALIZED_KEY

__all__ = ["is_normalized", "stamp"]

NORMALIZER_VERSION = 2
"""Counts up when the plain form changes, so that graphs in an older one are normalized again."""


def stamp(model: ir.Model) -> None:
    """Stamp the model as normalized with its present structure; in place."""
    model.metadata_props[NORMALIZED_KEY] = json.dumps(
        {"version": NORMALIZER_VERSION, "fingerprint": fingerprint(model)}
    )


def is_normalized(model: ir.Model) -> bool:
    """Say whether the model carries a stamp of this version, and its structure is still the stamped one."""
    try:
        record = json.loads(model.metadata_props.get(NORMALIZED_KEY, "null"))
    except json.JSONDecodeError:
        return False
    return bool(record == {"version": NORMALIZER_VERSION, "fingerprint": fingerprint(model)})
