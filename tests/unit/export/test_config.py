"""Options of the export stage."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from winml.modelkit import InputTensorSpec, OutputTensorSpec, WinMLExportConfig
from winml.modelkit.errors import ConfigError
from winml.modelkit.options import parse_options


def test_config_defaults_are_stable() -> None:
    """The exporter's own opset, folding, tags and verification are the default; guesses and local paths are off."""
    config = WinMLExportConfig()
    assert (17, 18) == (config.opset_for("torchscript"), config.opset_for("dynamo"))
    assert (True, True, True) == (config.do_constant_folding, config.hierarchy, config.verify)
    assert (False, False, "auto") == (config.operation_fallback, config.keep_torch_metadata, config.torch_module)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("none", "none"),
        (["all"], "all"),
        ([], "none"),
        (["Linear", " LayerNorm "], ("Linear", "LayerNorm")),
        ("Linear, LayerNorm", ("Linear", "LayerNorm")),
    ],
)
def test_config_torch_module_has_one_form(value: Any, expected: Any) -> None:
    """A word may be in a list; an empty list of an older file reads as no classes."""
    config = parse_options(WinMLExportConfig, {"torch_module": value}, "--export-config")
    assert expected == config.torch_module == WinMLExportConfig(torch_module=value).torch_module
    assert config == WinMLExportConfig.model_validate_json(config.model_dump_json())


@pytest.mark.parametrize("value", ["", " , ", [""]])
def test_config_torch_module_without_a_name_is_refused(value: Any) -> None:
    """An empty value is more often an unset variable than a request for no modules, which is the word ``none``."""
    with pytest.raises(ConfigError, match="torch_module"):
        parse_options(WinMLExportConfig, {"torch_module": value}, "--export-config")


def test_config_torch_module_word_beside_classes_is_refused() -> None:
    """``all`` and ``none`` leave no classes to name."""
    with pytest.raises(ConfigError, match="torch_module: 'all'"):
        parse_options(WinMLExportConfig, {"torch_module": ["Linear", "all"]}, "--export-config")


def test_config_json_reads_nested_specs() -> None:
    """A JSON object gives the same record as Python objects."""
    text = """{"opset_version": 18, "torch_module": ["LayerNorm"], "input_tensors":
        [{"name": "ids", "shape": [1, "sequence"], "dtype": "int64", "value_range": [0, 9]}],
        "output_tensors": [{"name": "y", "shape": [], "dtype": "float32"}]}"""
    expected = WinMLExportConfig(
        opset_version=18,
        torch_module=("LayerNorm",),
        input_tensors=(InputTensorSpec(name="ids", shape=(1, "sequence"), dtype="int64", value_range=(0.0, 9.0)),),
        output_tensors=(OutputTensorSpec(name="y", shape=(), dtype="float32"),),
    )
    assert expected == parse_options(WinMLExportConfig, json.loads(text), "--export-config")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"opset_version": 10}, "to 11 (got 10)"),
        ({"opset_version": 25}, "to 24 (got 25)"),
        ({"opset_version": "17"}, "integer (got '17')"),
        ({"opset_version": True}, "integer (got True)"),
        ({"do_constant_folding": 1}, "boolean (got 1)"),
        ({"opset": 17}, "'opset_version'"),
        ({"input_tensors": [{"name": "x", "shape": [-2], "dtype": "float32"}]}, "input_tensors.0.shape.0"),
        ({"input_tensors": [{"name": "x", "shape": [1], "dtype": "float"}]}, "input_tensors.0.dtype: unknown dtype"),
        ({"input_tensors": [{"name": "x", "shap": [1], "dtype": "float32"}]}, "'shape'"),
        ({"input_tensors": [{"name": "x", "dtype": "float32"}]}, "input_tensors.0.shape: Field required"),
        ({"output_tensors": [{"name": "", "shape": [1], "dtype": "float32"}]}, "output_tensors.0.name"),
    ],
)
def test_config_wrong_value_is_named_in_the_error(value: dict[str, Any], words: str) -> None:
    """The message names the field, the expectation and the value."""
    with pytest.raises(ConfigError) as caught:
        parse_options(WinMLExportConfig, value, "--export-config")
    assert caught.value.message.startswith("--export-config: ")
    assert words in caught.value.message


def test_config_is_frozen() -> None:
    """Options cannot change during an export."""
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        WinMLExportConfig().verify = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wanted", "actual", "words"),
    [
        (((2, 3), "float32"), ((2, 3), "float32"), ""),
        ((("batch", 3), "float32"), ((2, 3), "float32"), ""),
        (((2, 4), "float32"), ((2, 3), "float32"), "expected float32[2, 4], the model returns float32[2, 3]"),
        (((2, 3, 1), "float32"), ((2, 3), "float32"), "expected float32[2, 3, 1], the model returns float32[2, 3]"),
        (((2, 3), "int64"), ((2, 3), "float32"), "expected int64[2, 3], the model returns float32[2, 3]"),
    ],
)
def test_output_spec_disagreement_is_reported(wanted: Any, actual: Any, words: str) -> None:
    """Rank, sizes and dtype have to agree; a named size agrees with any."""
    first, second = (OutputTensorSpec(name="y", shape=shape, dtype=dtype) for shape, dtype in (wanted, actual))
    assert words == first.disagreement(second)


@pytest.mark.parametrize("key", ["input_tensors", "output_tensors"])
def test_config_tensors_of_one_name_are_refused(key: str) -> None:
    """Two tensors cannot share a name, and an empty list describes nothing."""
    tensor = {"name": "x", "shape": [1], "dtype": "float32"}
    with pytest.raises(ConfigError, match="each name"):
        parse_options(WinMLExportConfig, {key: [tensor, tensor]}, "--export-config")
    with pytest.raises(ConfigError, match="at least"):
        parse_options(WinMLExportConfig, {key: []}, "--export-config")
