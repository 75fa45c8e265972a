"""The shipped schema of a manifest against its records."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from schemas import manifest_schema
from winml.modelkit.builds.manifest_records import (
    BuildManifest,
    PartRecord,
    StageRecord,
    read_manifest,
)
from winml.modelkit.errors import UsageError


def test_manifest_schema_is_generated_from_the_records() -> None:
    """``scripts/build_manifest_schema.py`` writes the schema anew."""
    jsonschema.Draft202012Validator.check_schema(manifest_schema())
    shipped = {key: value for key, value in manifest_schema().items() if key != "$schema"}
    assert _remove_defaults(BuildManifest.model_json_schema()) == _remove_defaults(shipped)


def _remove_defaults(schema: Any) -> Any:
    """Return a schema without ``additionalProperties: true``, which has no meaning. Pydantic writes it from 2.11 on."""
    if isinstance(schema, list):
        return [_remove_defaults(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if (key, value) != ("additionalProperties", True)}
    return {key: _remove_defaults(value) for key, value in kept.items()}


def test_manifest_survives_a_round_trip() -> None:
    """Nothing is lost in JSON."""
    manifest = BuildManifest(status="done", files=("model.onnx",), versions={"torch": "2"}, normalizations=1)
    jsonschema.validate(manifest.as_record(), manifest_schema())
    assert manifest == BuildManifest.model_validate_json(manifest.model_dump_json())


def test_manifest_of_the_first_version_is_read_as_one_of_one_part() -> None:
    """The records at the top belong to the only part; a build that had not begun has no part yet."""
    file = {"name": "model.onnx", "size_bytes": 1, "sha256": "0"}
    stage = {"name": "export", "status": "run", "files": [file]}
    record = {"manifest_version": 1, "status": "done", "files": ["model.onnx"], "model": [file], "stages": [stage]}
    manifest = read_manifest(json.dumps(record))
    assert ["model"] == [part.name for part in manifest.parts]
    assert ("model.onnx", "export") == (manifest.model[0].name, manifest.stages[0].name)
    assert () == read_manifest('{"manifest_version": 1, "status": "unfinished", "files": []}').parts
    with pytest.raises(ValueError, match="manifest_version"):
        read_manifest('{"manifest_version": 3, "status": "done", "files": []}')


def test_manifest_of_several_parts_is_read_per_part() -> None:
    """The records of a single part raise an error if there are several parts."""
    skipped = StageRecord(name="quantize", status="skipped")
    parts = (PartRecord(name="encoder", stages=(skipped,)), PartRecord(name="decoder"))
    manifest = BuildManifest(status="done", files=(), parts=parts)
    jsonschema.validate(manifest.as_record(), manifest_schema())
    found = manifest.part("encoder")
    assert found is not None
    assert skipped == found.stage("quantize")
    assert manifest.part("vision") is None
    with pytest.raises(UsageError, match="encoder, decoder"):
        _ = manifest.stages
