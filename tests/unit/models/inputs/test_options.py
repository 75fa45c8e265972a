"""Parsing of the options about inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from winml.modelkit.errors import ConfigError
from winml.modelkit.models.inputs.options import ShapeConfig, parse_input_specs, parse_shape_config
from winml.modelkit.onnx.specs import InputTensorSpec


def test_shape_config_inline_keeps_stated_sizes_only() -> None:
    """Sizes that were not given stay open."""
    config = parse_shape_config('{"sequence_length": 128, "height": 224, "batch_size": 2}')
    assert {"sequence_length": 128, "height": 224, "batch_size": 2} == config.fixed()


def test_shape_config_file_equals_inline_text(tmp_path: Path) -> None:
    """A path and the file's text as an option are equivalent."""
    path = tmp_path / "shapes.json"
    path.write_text('{"width": 7}', encoding="utf-8")
    assert ShapeConfig(width=7) == parse_shape_config(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"sequence_lenght": 8}', "'sequence_length'"),
        ('{"height": 0}', "height:"),
        ('{"height": 2.5}', "height"),
        ('{"height": "8"}', "height"),
        ('{"sequence_length": "16"}', "(got '16')"),
        ('{"height": 8,\n "width": }', "line 2, column 11"),
        ("[1]", "JSON object"),
        ("missing.json", "no such"),
    ],
)
def test_shape_config_malformed_is_refused_by_name(text: str, words: str) -> None:
    """The message names the place and the nearest key."""
    with pytest.raises(ConfigError) as caught:
        parse_shape_config(text)
    assert words in str(caught.value)
    assert str(caught.value).count("(got ") < 2
    assert "--shape-config" in str(caught.value)


def test_input_specs_list_and_object_mean_the_same() -> None:
    """A list of objects with names equals one object keyed by the names."""
    listed = parse_input_specs('[{"name": "x", "shape": [1, "n"], "dtype": "float32", "value_range": [0, 1]}]')
    keyed = parse_input_specs('{"x": {"shape": [1, "n"], "dtype": "float32", "value_range": [0, 1]}}')
    assert (InputTensorSpec(name="x", shape=(1, "n"), dtype="float32", value_range=(0, 1)),) == listed == keyed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no input"),
        ("{}", "no input"),
        ('[{"name": "x", "shape": [1], "dtype": "float33"}]', "unknown dtype"),
        ('[{"name": "x", "shape": [1], "dtyp": "float32"}]', "dtype"),
        ('[{"name": "x", "shape": [1], "dtype": "int8"}, {"name": "x", "shape": [1], "dtype": "int8"}]', "twice"),
        ('{"x": 3}', "an object"),
        ('{"x": {"name": "y", "shape": [1], "dtype": "int8"}}', "'y'"),
        ("[3]", "input 0:"),
    ],
)
def test_input_specs_malformed_are_refused_by_name(text: str, words: str) -> None:
    """The message names the input and the error in its description."""
    with pytest.raises(ConfigError) as caught:
        parse_input_specs(text)
    assert words in str(caught.value)
    assert "--input-specs" in str(caught.value)


def test_input_specs_accept_containers_of_the_forward() -> None:
    """Objects and lists of inputs are paths; -1 leaves a size open."""
    text = """{"features": {"ids": {"shape": [1, -1], "dtype": "int64"}, "x": [{"shape": [2], "dtype": "float32"}]},
        "images": [{"shape": [3], "dtype": "float32"}, {"shape": [4], "dtype": "float32"}],
        "flat.name": {"shape": [5], "dtype": "float32"}}"""
    specs = parse_input_specs(text)
    expected = {"features.ids": (1, -1), "features.x.0": (2,), "images.0": (3,), "images.1": (4,), "flat.name": (5,)}
    assert expected == {spec.name: spec.shape for spec in specs}


def test_input_specs_misspelled_key_is_not_read_as_a_container() -> None:
    """An object with values other than objects and lists is an input, and its keys are checked."""
    with pytest.raises(ConfigError, match="shap"):
        parse_input_specs('{"ids": {"shap": [1], "dtype": "int64"}}')


def test_type_and_shape_in_one_text_mean_the_object() -> None:
    """``int64[batch,16]`` needs no quotes in a shell."""
    objects = '{"ids": {"shape": ["batch", 16], "dtype": "int64"}, "x": {"shape": [1, 8]}}'
    assert parse_input_specs("ids=int64[batch,16],x=[1,8]") == parse_input_specs(objects)
