"""Writes the JSON Schema of a build's manifest beside its records, from which it is made."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from winml.modelkit.builds.manifest_records import BuildManifest


def schema_text() -> str:
    """Return the schema as it is shipped."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **BuildManifest.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    target = Path(str(resources.files("winml.modelkit.builds"))) / "build_manifest.schema.json"
    target.write_text(schema_text(), encoding="utf-8")
    print(f"wrote {target.name}")
