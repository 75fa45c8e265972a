"""Reading, writing and migration of a build config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from winml.modelkit.builds.config import (
    MIGRATIONS,
    SCHEMA_VERSION,
    WinMLBuildConfig,
    check_load_keywords,
    parse_build_config,
)
from winml.modelkit.errors import ConfigError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.options import parse_options

DATA = Path(__file__).parents[2] / "data"
INPUT = InputTensorSpec(name="input_ids", shape=(1, 16), dtype="int64", value_range=(0, 99), last_value=2)


def parsed(value: Any) -> WinMLBuildConfig:
    """Read a config that needs no migration."""
    config, notes = parse_build_config(value, "test")
    assert () == notes
    return config


def test_config_empty_is_the_default() -> None:
    """Every key has a default."""
    assert WinMLBuildConfig() == parsed({})


def test_config_written_and_read_again_is_the_same() -> None:
    """Nothing is lost in JSON, null sections included."""
    config = WinMLBuildConfig(
        export=WinMLExportConfig(input_tensors=(INPUT,), torch_module=("Linear",)), quant=None, auto=False
    )
    record = json.loads(json.dumps(config.as_record()))
    assert record["quant"] is None
    assert config == parsed(record)


def test_config_export_section_is_accepted_by_export_config() -> None:
    """The section can be handed to ``winml export --export-config``."""
    config = WinMLBuildConfig(export=WinMLExportConfig(input_tensors=(INPUT,)))
    assert config.export == parse_options(WinMLExportConfig, config.as_record()["export"], "test")


def test_config_every_section_but_null_keeps_its_stage() -> None:
    """A null section skips its stage; an empty object does not."""
    config = parsed({"optim": None, "compile": {}})
    assert config.optim is None
    assert config.compile is not None


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"optm": {}}, "test: unknown key 'optm'; did you mean 'optim'?"),
        ({"optim": {"gelu_fuson": True}}, "test: optim: unknown key 'gelu_fuson'; did you mean 'gelu_fusion'?"),
        (
            {"export": {"input_tensors": [{"name": "a", "shpe": [1], "dtype": "float32"}]}},
            "test: export.input_tensors.0: unknown key 'shpe'; did you mean 'shape'?",
        ),
        ({"export": {"opset_version": "17"}}, "test: export.opset_version: Input should be a valid integer (got '17')"),
        ({"compile": {"device": "tpu"}}, "test: compile.device: Input should be 'cpu', 'gpu' or 'npu' (got 'tpu')"),
        ({"eval": {"metric": "f1"}}, "test: eval: unknown key 'metric'; did you mean 'metrics'?"),
        ({"schema_version": 99}, "test: schema_version 99: newer than 1, the newest that this winml reads"),
        ({"schema_version": "1"}, "test: schema_version '1': expected a number from 0 to 1"),
        ({"schema_version": -1}, "test: schema_version -1: expected a number from 0 to 1"),
        ([], "test: expected a JSON object, got list"),
    ],
)
def test_config_invalid_is_refused_in_one_sentence(value: Any, sentence: str) -> None:
    """The message names the key and the nearest known key."""
    with pytest.raises(ConfigError) as caught:
        parse_build_config(value, "test")
    assert sentence == caught.value.message


def test_config_of_version_0_still_loads() -> None:
    """A file of the first layout is read, and a note tells each renamed key."""
    config, notes = parse_build_config(json.loads((DATA / "build_config_v0.json").read_text(encoding="utf-8")), "v0")
    assert ("section optimize is now called optim", "loader.model_id is now called loader.model") == notes
    assert config.optim is not None
    assert config.optim.gelu_fusion is True
    assert config.loader is not None
    assert "bert-base-uncased" == config.loader.model
    assert SCHEMA_VERSION == config.schema_version


def test_config_every_earlier_version_has_its_migration() -> None:
    """Every earlier schema version has a migration."""
    assert list(range(SCHEMA_VERSION)) == sorted(MIGRATIONS)


def test_config_migration_leaves_its_argument_unchanged() -> None:
    """The caller's object is not modified."""
    given = {"schema_version": 0, "optimize": {}}
    parse_build_config(given, "v0")
    assert {"schema_version": 0, "optimize": {}} == given


def test_config_schema_accepts_written_configs_and_refuses_unknown_keys() -> None:
    """The published JSON Schema and the reader agree."""
    schema = WinMLBuildConfig.model_json_schema()
    record = WinMLBuildConfig(export=WinMLExportConfig(input_tensors=(INPUT,))).as_record()
    jsonschema.validate(record, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**record, "optm": {}}, schema)


def test_config_schema_describes_every_key() -> None:
    """Each key of each section has a description."""
    schema = WinMLBuildConfig.model_json_schema()
    records = [schema, *(entry for entry in schema["$defs"].values() if "properties" in entry)]
    silent = [
        f"{record.get('title')}.{key}"
        for record in records
        for key, value in record["properties"].items()
        if not value.get("description")
    ]
    assert [] == silent


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({"tusk": "fill-mask"}, "'task'"),
        ({"model": "bert"}, "'model'"),
        ({"rebuild": True}, "'rebuild'"),
        ({"seed": "zero"}, "seed"),
        ({"dtype": object()}, "dtype:"),
    ],
)
def test_load_keyword_that_declares_no_option_or_has_a_wrong_value_is_refused(load: dict[str, Any], words: str) -> None:
    """The message names the function, and the nearest keyword if there is one."""
    with pytest.raises(ConfigError, match=words) as caught:
        check_load_keywords(load, "build_hf_model")
    assert caught.value.message.startswith("build_hf_model")


def test_load_keywords_of_every_declared_option_are_accepted() -> None:
    """The functions accept every option that the command offers."""
    check_load_keywords({"task": "fill-mask", "trust_remote_code": True, "seed": 3, "dtype": "fp16"}, "f")
