"""JSON Schemas of the package, for tests that validate written files."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def manifest_schema() -> dict[str, Any]:
    """JSON Schema of a build manifest."""
    return _read("builds/build_manifest.schema.json")


def sidecar_schema() -> dict[str, Any]:
    """JSON Schema of the sidecar of an export."""
    return _read("export/htp_metadata.schema.json")


def _read(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(resources.files("winml.modelkit").joinpath(path).read_text(encoding="utf-8"))
    return schema
