"""Does the shipped schema say what the records of a manifest hold?"""

from __future__ import annotations

import jsonschema

from winml.modelkit.results.build_manifest import BuildManifest, manifest_schema


def test_manifest_schema_is_made_from_the_records() -> None:
    """``scripts/build_manifest_schema.py`` writes it anew."""
    jsonschema.Draft202012Validator.check_schema(manifest_schema())
    made = BuildManifest.model_json_schema()
    assert made == {key: value for key, value in manifest_schema().items() if key != "$schema"}


def test_manifest_is_read_as_it_was_written() -> None:
    """Nothing is lost on the way through JSON."""
    manifest = BuildManifest(status="done", files=("model.onnx",), versions={"torch": "2"}, normalizations=1)
    jsonschema.validate(manifest.as_record(), dict(manifest_schema()))
    assert manifest == BuildManifest.model_validate_json(manifest.model_dump_json())
