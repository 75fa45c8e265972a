"""Configs of verbs: written ones, merges with options, and names in messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from e2e.in_process import run_here
from winml.modelkit.builds.foreign_configs import read_winml_cli_config

WINML_CLI: dict[str, Any] = {
    "export": {
        "opset_version": 16,
        "batch_size": 2,
        "export_params": True,
        "do_constant_folding": True,
        "verbose": True,
        "dynamo": False,
        "enable_hierarchy_tags": False,
        "clean_onnx": False,
        "hierarchy_tag_format": "full",
        "input_tensors": [
            {"name": "input_ids", "dtype": "int64", "shape": [2, 16], "value_range": [0, 120]},
            {"name": "attention_mask", "dtype": "int64", "shape": [2, 16], "value_range": [0, 2]},
        ],
        "output_tensors": [{"name": "last_hidden_state"}, {"name": "pooler_output"}],
    },
    "optim": {"gelu_fusion": True, "clamp_values": False},
    "quant": {"mode": "static", "weight_type": "uint8", "activation_type": "uint16", "samples": 10},
    "compile": None,
    "loader": {"task": "feature-extraction", "model_class": "AutoModel", "model_type": "bert"},
}
"""A config as winml-cli writes it: ``value_range`` excludes its second number, outputs are names."""


def _config(*arguments: str | Path) -> tuple[dict[str, Any], str]:
    written = run_here("config", *arguments)
    assert 0 == written.code, written.err
    return json.loads(written.out), written.err


def _refused(*arguments: str | Path, words: str) -> None:
    refused = run_here(*arguments)
    assert (2, "") == (refused.code, refused.out), refused.err
    assert words in refused.err


def test_config_has_the_opset_and_null_for_skipped_stages(here: Path, small_bert: Path) -> None:
    """The opset is that of the export; a requested section stays, with a note if no stage reads it."""
    record, told = _config("-m", small_bert)
    assert "" == told
    assert record["quant"] is None
    assert record["optim"] is not None
    assert 18 == _config("-m", small_bert, "-c", '{"export": {"exporter": "dynamo"}}')[0]["export"]["opset_version"]
    exported = run_here("export", "-m", small_bert, "-o", "m.onnx", "--no-verify", "-f", "json")
    assert record["export"]["opset_version"] == json.loads(exported.out)["opset_produced"]
    asked, told = _config("-m", small_bert, "-p", "w8a16", "--ep", "qnn", "--no-compile")
    assert ("w8a16", "qnn", None) == (asked["quant"]["precision"], asked["quant"]["ep"], asked["compile"])
    assert "" == told
    _, told = _config("-m", small_bert, "-c", '{"compile": {"device": "npu"}}')
    assert "(compile.ep)" in told


def test_device_fills_the_quant_section_with_a_note(here: Path, small_file: Path) -> None:
    """``auto`` is written as its precision; a device starts no quantization that a config leaves out."""
    record, told = _config("-m", small_file, "--device", "gpu", "--no-compile")
    assert ("fp16", "gpu") == (record["quant"]["precision"], record["quant"]["device"])
    assert "is fp16" in told
    record, told = _config("-m", small_file, "-p", "auto", "--no-compile")
    assert "fp32" == record["quant"]["precision"]
    assert "quantize stage" in told
    left_out, _ = _config("-m", small_file, "-c", '{"quant": null}', "--device", "gpu", "--no-compile")
    assert left_out["quant"] is None
    _refused("quantize", "-m", small_file, "-o", "q.onnx", "-c", '{"precision": "auto"}', words="left at fp32")


def test_config_of_an_onnx_file_is_accepted_by_build(here: Path, small_file: Path) -> None:
    """The config skips the export; options of a PyTorch model do not apply."""
    assert 0 == run_here("config", "-m", small_file, "-o", "config.json").code
    record = json.loads((here / "config.json").read_text(encoding="utf-8"))
    assert (str(small_file), None) == (record["loader"]["model"], record["export"])
    built = run_here("build", "-c", "config.json", "-o", "out")
    assert 0 == built.code, built.err
    assert (here / "out" / "model.onnx").is_file()
    _refused("config", "-m", small_file, "--dtype", "fp16", words="--dtype")
    _refused("config", "-m", small_file, "-o", small_file, "--overwrite", words=f"input {small_file}")


def test_config_of_a_model_type_applies_to_any_checkpoint_of_the_type(here: Path, small_bert: Path) -> None:
    """The config names no model: ``-m`` of the build does."""
    sizes = ("--shape-config", '{"sequence_length": 8}')
    record, _ = _config("--model-type", "bert", *sizes)
    assert "model" not in record["loader"]
    assert "BertModel" == record["loader"]["model_class"]
    assert [1, 8] == record["export"]["input_tensors"][0]["shape"]
    _refused("config", "--model-type", "bret", words="'bert'")
    _refused("config", "--model-type", "bert", "-m", small_bert, words="--model-type")
    _refused("config", "-c", "{}", words="-m")


def test_config_merges_with_a_base_config(here: Path, small_bert: Path) -> None:
    """The given config is the base, and an option wins; sizes on the command line replace the inputs of the base."""
    base, _ = _config("-m", small_bert, "--dynamic-batch", "--no-quant")
    base["optim"] = {"level": "full", "operators": "onnxruntime", "module": [], "exclude": []}
    base["export"]["opset_version"] = 18
    (here / "base.json").write_text(json.dumps(base), encoding="utf-8")
    same, _ = _config("-c", "base.json")
    assert base == same
    merged, _ = _config("-c", "base.json", "--shape-config", '{"sequence_length": 8}', "-t", "fill-mask", "-d", "npu")
    assert ("fill-mask", "BertForMaskedLM") == (merged["loader"]["task"], merged["loader"]["model_class"])
    assert {("batch_size", 8)} == {tuple(spec["shape"]) for spec in merged["export"]["input_tensors"]}
    closed, _ = _config("-c", "base.json", "--batch-size", "3")
    assert {(3, 64)} == {tuple(spec["shape"]) for spec in closed["export"]["input_tensors"]}
    assert (18, "full", {"device": "npu"}) == (
        merged["export"]["opset_version"],
        merged["optim"]["level"],
        merged["compile"],
    )


def test_export_takes_a_whole_config_or_its_section_and_options_win(here: Path, small_bert: Path) -> None:
    """Model, task and dynamic sizes come from the config; the opset of the option wins."""
    config = {
        "schema_version": 1,
        "loader": {"model": str(small_bert), "task": "fill-mask", "random_weights": True},
        "export": {"opset_version": 16, "dynamic_batch": True},
        "optim": {"level": "full"},
    }
    (here / "config.json").write_text(json.dumps(config), encoding="utf-8")
    common = ("--no-verify", "-f", "json", "--overwrite", "-o", "m.onnx")

    def exported(*arguments: str | Path) -> dict[str, Any]:
        outcome = run_here("export", *arguments, *common)
        assert 0 == outcome.code, outcome.err
        return json.loads(outcome.out)

    whole = exported("-c", "config.json")
    assert ("BertForMaskedLM", 16) == (whole["model"]["class"], whole["opset_produced"])
    assert ["batch_size", 64] == whole["inputs"][0]["shape"]
    wins = exported("-c", "config.json", "--opset", "14", "-t", "feature-extraction")
    assert ("BertModel", 14) == (wins["model"]["class"], wins["opset_produced"])
    section = exported("-m", small_bert, "-c", '{"opset_version": 15}', "--export-config", '{"dynamic_sequence": true}')
    assert (15, [1, "sequence_length"]) == (section["opset_produced"], section["inputs"][0]["shape"])
    inputs = {"name": "input_ids", "shape": [1, 8], "dtype": "int64"}
    sized = exported("-m", small_bert, "-c", json.dumps({"input_tensors": [inputs]}), "--batch-size", "3")
    assert [3, 64] == sized["inputs"][0]["shape"]
    _refused("export", "-o", "n.onnx", words="no model")
    _refused("export", "-m", small_bert, "-c", '{"export": null}', "-o", "n.onnx", words="is null")
    _refused("export", "-m", small_bert, "--opset", "3", "-o", "n.onnx", words="--opset")


def test_config_of_winml_cli_is_read_if_its_meaning_is_equal(here: Path, small_bert: Path) -> None:
    """Other keys are named in notes; inputs have the intended values, and the export follows the config."""
    (here / "theirs.json").write_text(json.dumps(WINML_CLI), encoding="utf-8")
    record, told = _config("-c", "theirs.json", "-m", small_bert)
    assert [[0, 119], [0, 1]] == [spec["value_range"] for spec in record["export"]["input_tensors"]]
    assert (16, False, "auto") == tuple(record["export"][key] for key in ("opset_version", "hierarchy", "exporter"))
    assert (True, "none") == (record["optim"]["gelu_fusion"], record["optim"]["level"])
    assert ("w8a16", None) == (record["quant"]["precision"], record["compile"])
    for words in ("loader.model_type bert", "export.output_tensors", "export.verbose", "optim.clamp_values"):
        assert words in told
    # ``samples`` is read if the quantizer has calibration samples, else named in a note.
    assert ("samples" in told) != ("samples" in record["quant"])
    exported = run_here("export", "-c", "theirs.json", "-m", small_bert, "-o", "m.onnx", "-f", "json")
    assert 0 == exported.code, exported.err
    assert [2, 16] == json.loads(exported.out)["inputs"][0]["shape"]
    assert "note: export.verbose" in exported.err


def _own_range(**spec: Any) -> Any:
    value = {"export": {"clean_onnx": False, "input_tensors": [{"name": "x", "shape": [1], **spec}]}}
    read, _ = read_winml_cli_config(value, "theirs.json")
    return read["export"]["input_tensors"][0]["value_range"]


def test_range_of_winml_cli_ends_before_its_second_number_for_integers_alone() -> None:
    """The range of another dtype, or of an input without one, stays as written."""
    assert [0, 119] == _own_range(dtype="int64", value_range=[0, 120])
    assert [0, 1] == _own_range(dtype="bool", value_range=[0, 2])
    assert [0, 1] == _own_range(dtype="float32", value_range=[0, 1])
    assert [0, 1] == _own_range(value_range=[0, 1])


@pytest.mark.parametrize("bounds", [["a", "b"], [True, None], [[], {}], [0]])
def test_invalid_range_of_winml_cli_is_refused(here: Path, small_bert: Path, bounds: list[Any]) -> None:
    """The message names the key, as for a config of ours."""
    (spec, other) = WINML_CLI["export"]["input_tensors"]
    export = {**WINML_CLI["export"], "input_tensors": [{**spec, "value_range": bounds}, other]}
    (here / "theirs.json").write_text(json.dumps({**WINML_CLI, "export": export}), encoding="utf-8")
    _refused("config", "-c", "theirs.json", "-m", small_bert, words="value_range")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("export", "export_params", False),
        ("export", "hierarchy_tag_format", "module_only"),
        ("export", "compatibility", {"mode": "x"}),
        ("loader", "module_path", "encoder.layer.0"),
        ("loader", "user_script", "model.py"),
        ("optim", "clamp_values", True),
    ],
)
def test_config_of_winml_cli_that_would_give_another_result_is_refused(section: str, key: str, value: Any) -> None:
    """The message names the key, and a remedy."""
    theirs = {**WINML_CLI, section: {**WINML_CLI[section], key: value}}
    _refused("config", "--check", json.dumps(theirs), words=f"{section}.{key}: {value!r} is not supported")


def test_config_of_winml_cli_with_values_of_an_input_is_refused() -> None:
    """A batch size without an input is refused, too."""
    given = {**WINML_CLI["export"], "input_tensors": [{"name": "a", "shape": [1], "dtype": "int64"}]}
    given["input_tensors"][0]["dummy_value_runs"] = [[1, 5]]
    _refused("config", "--check", json.dumps({"export": given}), words="a.dummy_value_runs")
    _refused("config", "--check", '{"export": {"batch_size": 2}}', words="--batch-size")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"loader": {"dtype": "fp16"}}, "loader.dtype"),
        ({"loader": {"task": "fill-mask"}}, "loader.task"),
    ],
)
def test_build_of_a_file_names_the_key_of_the_config(here: Path, small_file: Path, config: Any, words: str) -> None:
    """The message names the key, since no option was used."""
    _refused("build", "-m", small_file, "-o", "out", "-c", json.dumps(config), words=words)
    _refused("build", "-m", small_file, "-o", "out", "--dynamic-seq-len", words="--dynamic-seq-len")


def test_error_names_the_source_of_dynamic_axes(here: Path, small_bert: Path) -> None:
    """The source is an option, the section of a config, or the JSON of the export."""
    axes = {"dynamic_axes": {"inputs": {"0": "b"}}}
    common = ("-m", small_bert, "-o", "out.onnx")
    _refused("export", *common, "--dynamic-axes", "inputs:0=b", words="--dynamic-axes: the model has no input 'inputs'")
    _refused("export", *common, "--export-config", json.dumps(axes), words="dynamic_axes in --export-config")
    _refused("export", *common, "-c", json.dumps({"export": axes}), words="export.dynamic_axes:")
    built = ("build", "-m", small_bert, "-o", "out")
    _refused(*built, "-c", json.dumps({"export": axes}), words="export.dynamic_axes:")


def test_hint_of_a_build_of_a_file_fixes_its_sizes(here: Path, small_file: Path) -> None:
    """The command in the hint, with the given sizes, works."""
    sizes = '{"sequence": 16}'
    _refused("build", "-m", small_file, "-o", "out", "--shape-config", sizes, words=f"winml export -m {small_file} -o")
    _refused("build", "-m", small_file, "-o", "out", "--batch-size", "2", words="--batch-size:")
    assert 0 == run_here("export", "-m", small_file, "-o", "fixed.onnx", "--shape-config", sizes).code
    assert 0 == run_here("build", "-m", "fixed.onnx", "-o", "out", "-q").code


def test_size_above_the_limit_of_a_file_is_refused_with_the_limit(here: Path, small_file: Path) -> None:
    """The file is not at fault: the exit code is 2, and no file is written."""
    at_most = "sequence_length 65: the graph was made for sizes 1 to 64"
    asked = '{"sequence_length": 65, "batch": 3}'
    _refused("export", "-m", small_file, "-o", "s.onnx", "--shape-config", asked, words=at_most)
    assert [] == list(here.iterdir())
    assert 0 == run_here("export", "-m", small_file, "-o", "s.onnx", "--shape-config", '{"sequence": 64}').code
    _refused(
        "export",
        "-m",
        "s.onnx",
        "-o",
        "t.onnx",
        "--shape-config",
        '{"sequence": 3}',
        words="dynamic dimensions: batch_size",
    )
    assert 0 == run_here("export", "-m", "s.onnx", "-o", "t.onnx", "--batch-size", "2").code
    _refused("export", "-m", "t.onnx", "-o", "u.onnx", "--batch-size", "2", words="--batch-size:")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "fp16"), "--dtype"),
        (("--opset", "18"), "--opset"),
        (("-c", "{}"), "--config"),
        ((), "no size"),
    ],
)
def test_export_of_a_file_refuses_inapplicable_options(
    here: Path, small_file: Path, options: tuple[str, ...], words: str
) -> None:
    """The option is refused with sizes and without."""
    _refused("export", "-m", small_file, "-o", "s.onnx", *options, words=words)
    _refused("export", "-m", "missing.onnx", "-o", "s.onnx", words="missing.onnx:")


def _stages_of(*arguments: str | Path) -> dict[str, dict[str, Any]]:
    built = run_here("build", *arguments, "-o", "out", "--rebuild", "-f", "json")
    assert 0 == built.code, built.err
    (part,) = json.loads(built.out)["parts"]
    return {stage["name"]: stage for stage in part["stages"]}


def test_provider_option_equals_the_compile_section(here: Path, small_file: Path) -> None:
    """Both forms compile the result and tell the provider to earlier stages; ``--no-compile`` skips one stage only."""
    asked = ("-m", small_file, "--level", "extended")
    for ep, switch, status in (("cpu", (), "run"), ("qnn", ("--no-compile",), "skipped")):
        for place in (("--ep", ep), ("-c", json.dumps({"compile": {"ep": ep}}))):
            stages = _stages_of(*asked, *place, *switch)
            assert ep == stages["optimize"]["origin"]["options"]["optim"]["ep"]
            assert status == stages["compile"]["status"]


def test_reason_to_skip_compilation_is_true(here: Path, small_file: Path) -> None:
    """The named provider has no file format, or only another section names it."""
    told = {
        place: _stages_of("-m", small_file, *place)["compile"]["reason"]
        for place in (
            ("--ep", "dml"),
            ("-c", '{"compile": {"ep": "dml"}}'),
            ("-c", '{"optim": {"ep": "qnn"}}'),
            ("--level", "basic"),
        )
    }
    unnamed = [place for place, reason in told.items() if "(compile.ep)" in reason]
    assert [("--level", "basic")] == unnamed
    assert len(set(told.values())) == 3
    _refused("build", "-m", small_file, "-o", "new", "--ep", "dml", "--compile", words="--ep dml: DmlExecutionProvider")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ep-options", "soc_model=60"), "--ep-options:"),
        (("--ep", "cpu", "--ep-options", "soc_model"), "expected KEY=VALUE"),
        (("--ep", "cpu", "--ep-options", "a=b"), "--ep-options a: CPUExecutionProvider"),
        (("-c", '{"compile": {"ep": "cpu", "ep_options": {"a": "b"}}}'), "compile.ep_options a: CPUExecutionProvider"),
        (("--ep", "cpu", "--ep-options", "a=b", "--no-compile"), "--no-compile"),
        (("--ep", "vitisai"), "--ep vitisai: VitisAIExecutionProvider"),
        (("-c", '{"compile": {"ep": "vitisai"}}'), "compile.ep vitisai: VitisAIExecutionProvider"),
    ],
)
def test_options_of_the_provider_are_read_or_refused(
    here: Path, small_file: Path, arguments: tuple[str, ...], words: str
) -> None:
    """The message names the given option."""
    _refused("build", "-m", small_file, "-o", "out", *arguments, words=words)
    assert not (here / "out").exists()


def test_ineffective_capability_is_refused_before_the_export(here: Path, small_bert: Path) -> None:
    """The message names the key and the key that helps, and a build with that key works."""
    optim = {"gelu_fusion": True}
    asked = ("build", "-m", small_bert, "-o", "out", "--ep", "qnn", "--no-compile", "--no-quant", "-c")
    _refused(*asked, json.dumps({"optim": optim}), words="optim.opset 20")
    assert not (here / "out").exists()
    built = run_here(*asked, json.dumps({"optim": {**optim, "opset": 20}}))
    assert 0 == built.code, built.err
    assert "Gelu" in {node.op_type for node in onnx.load(here / "out" / "model.onnx").graph.node}
