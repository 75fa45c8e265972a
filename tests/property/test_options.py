"""JSON values as options: each is accepted or gives an error that names the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st

from winml.modelkit import ConfigError, InputTensorSpec, OutputTensorSpec, WinMLExportConfig
from winml.modelkit.onnx.specs import DTYPES
from winml.modelkit.options import nearest, parse_options, read_json
from winml.modelkit.tags.torch_modules import RULES

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
shapes = st.lists(st.integers(1, 9) | st.sampled_from(["batch", "sequence_1", "_"]), max_size=3).map(tuple)
ranges = st.none() | st.tuples(st.floats(-9, 9), st.floats(-9, 9)).map(lambda pair: tuple(sorted(pair)))
dtypes = st.sampled_from(DTYPES)
input_specs = st.builds(InputTensorSpec, name=names, shape=shapes, dtype=dtypes, value_range=ranges)
output_specs = st.builds(OutputTensorSpec, name=names, shape=shapes, dtype=dtypes)


def _name(spec: InputTensorSpec | OutputTensorSpec) -> str:
    return spec.name


configs = st.builds(
    WinMLExportConfig,
    exporter=st.sampled_from(["auto", "torchscript", "dynamo"]),
    opset_version=st.integers(11, 20),
    do_constant_folding=st.booleans(),
    input_tensors=st.none() | st.lists(input_specs, min_size=1, max_size=2, unique_by=_name).map(tuple),
    output_tensors=st.none() | st.lists(output_specs, min_size=1, max_size=2, unique_by=_name).map(tuple),
    torch_module=st.lists(names.filter(lambda name: name not in {"all", "auto", "none"}), max_size=2).map(tuple),
    verify=st.booleans(),
)
keys = st.sampled_from([*WinMLExportConfig.model_fields, "opset", "verfy"]) | st.text(max_size=8)


def attempt(read: Callable[[], Any]) -> tuple[Any, str]:
    """Return the parsed value, or None and the message of the ConfigError."""
    try:
        return read(), ""
    except ConfigError as error:
        return None, error.message


def through_text(value: Any) -> Any:
    """Write a value as JSON and parse the text as user input."""
    return read_json(json.dumps(value), "--options")[0]


@given(st.dictionaries(keys, json_values, max_size=4))
@example({"opset_version": 17, "verify": True})
@example({"torch_module": ""})
@example({"torch_module": [""]})
@example({"torch_module": "Linear"})
@example({"input_tensors": [{"name": "x", "shape": [1], "dtype": "float32", "value_range": [2, 1]}]})
def test_any_object_is_options_or_an_error_that_names_a_key(value: dict[str, Any]) -> None:
    """The result is a config or a ConfigError, and the key in its message is one of the given keys."""
    text = through_text(value)
    config, refusal = attempt(lambda: parse_options(WinMLExportConfig, text, "--export-config"))
    if config is None:
        assert refusal.startswith("--export-config: ")
        assert any(key in refusal or repr(key) in refusal for key in value)
    else:
        dumped = json.loads(config.model_dump_json())
        scalars = {key: wanted for key, wanted in value.items() if isinstance(wanted, (int, str, bool))}
        if (classes := scalars.get("torch_module")) not in {None, *RULES}:
            # Class names separated by commas are read as a list.
            scalars["torch_module"] = [name.strip() for name in str(classes).split(",") if name.strip()]
        assert scalars == {key: dumped[key] for key in scalars}


@given(json_values)
def test_any_value_is_a_spec_or_an_error(value: Any) -> None:
    """A spec is an object with name, shape and dtype; any other value is a ConfigError."""
    spec, refusal = attempt(lambda: parse_options(InputTensorSpec, value, "--input-specs"))
    if spec is None:
        assert refusal.startswith("--input-specs: ")
    else:
        assert {"name", "shape", "dtype"} <= set(value)


@given(configs)
def test_config_written_and_read_is_the_same(config: WinMLExportConfig) -> None:
    """Dumping to JSON and parsing again is the identity."""
    assert config == parse_options(
        WinMLExportConfig, through_text(json.loads(config.model_dump_json())), "--export-config"
    )


@given(input_specs)
def test_input_spec_written_and_read_is_the_same(spec: InputTensorSpec) -> None:
    """The identity holds for a dump and for the record of FORMATS, if the ranges of integers are whole."""
    assert spec == parse_options(InputTensorSpec, through_text(json.loads(spec.model_dump_json())), "--input-specs")
    is_exact = (
        spec.value_range is None or "float" in spec.dtype or all(bound.is_integer() for bound in spec.value_range)
    )
    assume(is_exact)
    assert spec == parse_options(InputTensorSpec, through_text(spec.as_record()), "--input-specs")


@given(st.text(alphabet='{}[]":,tfn0-9.eE \n\\', max_size=30))
def test_any_text_is_json_or_an_error_with_a_place(text: str) -> None:
    """A text that starts like JSON is read as Python's parser reads it, or refused at a line and column."""
    text = "{" + text
    read, refusal = attempt(lambda: read_json(text, "--options"))
    if read is None:
        assert "line" in refusal or "occurs twice" in refusal
    else:
        assert read[0] == json.loads(text)


@given(st.sampled_from(sorted(WinMLExportConfig.model_fields)), st.data())
def test_nearest_finds_a_key_with_one_letter_wrong(key: str, data: st.DataObject) -> None:
    """A key of more than four letters is found with one letter left out or doubled, or in upper case."""
    assume(len(key) > 4)
    place = data.draw(st.integers(0, len(key) - 1))
    wrong = data.draw(
        st.sampled_from([key[:place] + key[place + 1 :], key[:place] + key[place] * 2 + key[place + 1 :], key.upper()])
    )
    assert key == nearest(wrong, WinMLExportConfig.model_fields)
