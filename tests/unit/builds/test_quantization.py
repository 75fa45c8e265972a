"""The section ``quant`` of a build config, and the precision ``auto``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winml.modelkit.builds.build_model import cache_key
from winml.modelkit.builds.config import (
    CompileSection,
    OptimSection,
    QuantSection,
    WinMLBuildConfig,
    idle_quantization,
    parse_build_config,
    quantize_options,
    with_precision,
)
from winml.modelkit.builds.dtypes import planned_optimization
from winml.modelkit.builds.foreign_configs import read_winml_cli_config
from winml.modelkit.builds.identity import ModelIdentity
from winml.modelkit.builds.in_memory_stages import handed_over_stages
from winml.modelkit.builds.plan import BuildPlan, plan_build
from winml.modelkit.builds.stages import STAGES
from winml.modelkit.errors import ConfigError, UsageError
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.optimize.capabilities import CAPABILITIES
from winml.modelkit.quantize.options import QuantizeOptions


def section(**values: Any) -> QuantSection:
    """Return a section as a config file has it."""
    quant = parse_build_config({"quant": values}, "test")[0].quant
    assert quant is not None
    return quant


def config_of(**values: Any) -> WinMLBuildConfig:
    """Return a config with a section."""
    return WinMLBuildConfig(quant=section(**values))


def plan_for(**quant: Any) -> BuildPlan:
    """Return the plan of a build of a checkpoint."""
    return plan_build(config_of(**quant), ModelRequest("checkpoint"))


@pytest.mark.parametrize(
    ("quant", "off"),
    [
        ({}, set()),
        ({"precision": "fp16"}, set()),
        ({"precision": "int4"}, {"matmul_transpose_fusion"}),
        ({"precision": "int8"}, {"conv_activation_fusion", "matmul_transpose_fusion"}),
        ({"precision": "int8", "mode": "dynamic"}, {"matmul_transpose_fusion"}),
    ],
)
def test_fusions_that_quantization_does_not_take_are_off(quant: dict[str, Any], off: set[str]) -> None:
    """The mode decides, or every mode that the graph may select; a fusion that is enabled by name stays on."""
    values = {"quant": quant, "optim": {"level": "full"}}
    options = planned_optimization(parse_build_config(values, "test")[0])
    assert options is not None
    assert off == {entry.name for entry in CAPABILITIES.values() if getattr(options, entry.name) is False}
    values["optim"] = {"level": "full", "conv_activation_fusion": True}
    named = planned_optimization(parse_build_config(values, "test")[0])
    assert named is not None
    assert named.conv_activation_fusion


def test_limit_alone_requests_no_quantization() -> None:
    """A minimum SQNR applies to the stages that run, and is refused if none runs."""
    assert idle_quantization(config_of(min_sqnr_db=20.0))
    with pytest.raises(UsageError, match="neither quantizes nor compiles"):
        plan_for(min_sqnr_db=20.0)
    compiled = parse_build_config({"compile": {"ep": "cpu"}, "quant": {"min_sqnr_db": 20.0}}, "test")[0]
    plan = plan_build(compiled, ModelRequest("checkpoint"))
    assert plan.config.quant is not None
    assert idle_quantization(plan.config)
    assert not idle_quantization(config_of(min_sqnr_db=20.0, precision="int8"))


def test_section_has_every_option_of_the_stage_and_a_place() -> None:
    """The section of a config has every option of ``winml quantize``, and a device."""
    assert {"device"} == QuantSection.model_fields.keys() - QuantizeOptions.model_fields.keys()
    rules = {"*.layer.0": "fp32", "**": "int4"}
    options = quantize_options(section(exclude=["A"], per_module=rules, symmetric=True, device="npu"))
    assert (("A",), list(rules), True) == (options.exclude, list(options.per_module), options.symmetric)


@pytest.mark.parametrize(
    ("place", "precision"),
    [
        ({}, "fp32"),
        ({"device": "cpu"}, "fp32"),
        ({"device": "gpu"}, "fp16"),
        ({"device": "npu"}, "w8a16"),
        ({"ep": "qnn"}, "w8a16"),
        ({"ep": "dml"}, "fp16"),
        ({"ep": "qnn", "device": "gpu"}, "fp16"),
    ],
)
def test_auto_is_decided_by_the_device(place: dict[str, str], precision: str) -> None:
    """The device wins over the default of the provider."""
    assert precision == quantize_options(section(precision="auto", **place)).precision


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "no precision"),
        ({"device": "npu", "ep": "qnn"}, "no precision"),
        ({"precision": "fp32"}, "precision fp32"),
        ({"precision": "auto"}, "auto is fp32"),
        ({"precision": "auto", "ep": "openvino"}, "default of openvino"),
        ({"precision": "fp32", "per_module": {"a": "fp32"}}, "the model"),
    ],
)
def test_empty_section_has_a_reason_for_no_quantization(values: dict[str, Any], words: str) -> None:
    """A build reports the reason."""
    assert words in idle_quantization(config_of(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"precision": "int8"},
        {"exclude": ["a"]},
        {"mode": "qdq"},
        {"precision": "fp32", "per_module": {"a": "int8"}},
        {"precision": "auto", "device": "gpu"},
    ],
)
def test_section_with_any_request_quantizes(values: dict[str, Any]) -> None:
    """An exclude list alone means int8, as in ``winml quantize``."""
    assert "" == idle_quantization(config_of(**values))


@pytest.mark.parametrize(("ep", "is_another"), [(None, False), ("cpu", False), ("OpenVINOExecutionProvider", True)])
def test_provider_of_a_build_decides_the_form_of_tables(ep: str | None, is_another: bool) -> None:
    """A section without a provider uses that of the compile section; without a precision nothing is quantized."""
    quantize = next(stage for stage in STAGES if stage.name == "quantize")
    compiled = CompileSection(ep=ep)
    plan = plan_build(WinMLBuildConfig(quant=section(precision="int4"), compile=compiled), ModelRequest("checkpoint"))
    assert plan.config.quant is not None
    assert quantize_options(plan.config.quant).takes_constant_tables == is_another
    assert (quantize.options(plan) != quantize.options(plan_for(precision="int4"))) == is_another
    assert idle_quantization(config_of(ep="openvino"))


def test_precision_wins_over_the_section_and_keeps_its_other_keys() -> None:
    """A precision also replaces a null section."""
    assert section(precision="int4", exclude=["a"]) == with_precision(section(precision="int8", exclude=["a"]), "int4")
    assert section(precision="int4") == with_precision(None, "int4")
    with pytest.raises(ConfigError, match="precision"):
        with_precision(None, "int3")


def test_precision_that_the_mode_does_not_reach_is_refused_with_the_plan() -> None:
    """The precision is refused before anything is loaded."""
    with pytest.raises(UsageError, match="int4"):
        plan_for(precision="int4", mode="dynamic")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"precision": "int4", "per_channel": False}, "--per-tensor"),
        ({"precision": "w8a8", "symmetric": False}, "zero point"),
        ({"precision": "w8a8", "calibration_data": "gone.npz"}, "--calibration-data gone.npz"),
    ],
)
def test_quantization_that_cannot_be_done_is_refused_with_the_plan(values: dict[str, Any], words: str) -> None:
    """The refusal comes before an export of minutes, whether the stage quantizes or the export in memory."""
    with pytest.raises(UsageError, match=words):
        plan_for(**values)


def test_data_is_known_by_its_content(tmp_path: Path) -> None:
    """A changed or an additional sample makes another result; another folder with the same samples does not."""
    quantize = next(stage for stage in STAGES if stage.name == "quantize")

    def options(name: str) -> dict[str, Any]:
        return quantize.options(plan_for(precision="w8a8", calibration_data=str(tmp_path / name)))

    for name in ("data", "copy"):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "0.npz", x=np.ones(2))
    first = options("data")
    assert first == options("copy")
    np.savez(tmp_path / "data" / "0.npz", x=np.zeros(2))
    second = options("data")
    np.savez(tmp_path / "data" / "1.npz", x=np.ones(2))
    assert 3 == len({json.dumps(found) for found in (first, second, options("data"))})


def test_data_set_is_identified_by_its_files_and_seed(tmp_path: Path) -> None:
    """Files of one name in two folders are two data sets.

    A data set of the Hub is known by its name; the seed draws samples.
    """
    quantize = next(stage for stage in STAGES if stage.name == "quantize")

    def options(data: str) -> dict[str, Any]:
        return quantize.options(plan_for(precision="w8a8", calibration_data=data, columns={"text": "line"}))

    for name in ("first", "second"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "x.txt").write_text("one")
    before = options(str(tmp_path / "data"))
    assert ["first/x.txt", "second/x.txt"] == list(before["quant"]["calibration_data"])
    (tmp_path / "data" / "first" / "x.txt").write_text("two")
    assert before != options(str(tmp_path / "data"))
    assert {"text": "line"} == before["quant"]["columns"]
    assert "seed" in before
    assert "owner/name:part" == options("owner/name:part")["quant"]["calibration_data"]


def test_compiled_file_is_judged_again_on_other_data(tmp_path: Path) -> None:
    """The samples of a comparison decide its result; without a comparison they do not count."""
    compile_stage = next(stage for stage in STAGES if stage.name == "compile")

    def options(name: str, *, verify: bool = True, seed: int = 0) -> dict[str, Any]:
        (tmp_path / name).write_text(f"text\n{name}\n")
        quant = section(precision="int4", dataset=str(tmp_path / name))
        config = WinMLBuildConfig(quant=quant, compile=CompileSection(ep="cpu"))
        return compile_stage.options(plan_build(config, ModelRequest("checkpoint", seed=seed), verify=verify))

    assert options("a.csv") == options("a.csv")
    assert options("a.csv") != options("b.csv")
    assert options("a.csv") != options("a.csv", seed=1)
    assert options("a.csv", verify=False) == options("b.csv", verify=False)


def test_optimized_graph_of_a_quantized_build_has_separate_projections() -> None:
    """The key of the stage names the fusions that it applies: projections are packed after they are quantized."""
    optimize = next(stage for stage in STAGES if stage.name == "optimize")
    plain, quantized = (
        optimize.options(
            plan_build(WinMLBuildConfig(layout="genai", optim=OptimSection(), quant=quant), ModelRequest("checkpoint"))
        )
        for quant in (None, section(precision="int4"))
    )
    assert {"packed_projection_fusion"} == {*plain["attention"]} - {*quantized["attention"]}


def test_seed_counts_if_it_determines_the_ranges() -> None:
    """The seed draws the random values that decide the ranges; without ranges it does not count."""
    quantize = next(stage for stage in STAGES if stage.name == "quantize")

    def options(precision: str, seed: int) -> dict[str, Any]:
        config = WinMLBuildConfig(quant=section(precision=precision))
        return quantize.options(plan_build(config, ModelRequest("checkpoint", seed=seed)))

    assert options("w8a8", 1) != options("w8a8", 2)
    assert options("int8", 1) != options("int8", 2)  # the graph decides the mode
    assert options("int4", 1) == options("int4", 2)


def test_precision_that_no_mode_makes_is_refused() -> None:
    """``w4a16`` of earlier configs, then 4-bit weights alone, is a precision of its own."""
    config, notes = parse_build_config({"quant": {"precision": "w4a16"}}, "test")
    assert (config.quant, notes) == (section(precision="w4a16"), ())
    with pytest.raises(ConfigError, match=r"quant\.precision"):
        section(precision="w2a2")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"mode": "static", "weight_type": "uint8", "activation_type": "uint16"}, {"precision": "w8a16"}),
        (
            {"mode": "static", "weight_type": "int8", "per_channel": False, "symmetric": True},
            {"precision": "w8a8", "per_channel": False, "symmetric": True},
        ),
        ({"mode": "dynamic", "weight_type": "uint8"}, {"precision": "uint8", "mode": "dynamic"}),
        (
            {"mode": "rtn", "rtn_bits": 4, "rtn_symmetric": True, "per_channel": False},
            {"precision": "int4", "mode": "weight-only", "symmetric": True},
        ),
        ({"mode": "fp16", "fp16_op_block_list": None, "samples": 10}, {"precision": "fp16"}),
        ({"precision": "int8"}, {"precision": "int8"}),
    ],
)
def test_quantization_of_winml_cli_is_read_if_its_meaning_is_equal(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    """Keys that apply to another mode of theirs are left out."""
    config, _ = parse_build_config({"skip_optimize": False, "quant": theirs}, "theirs.json")
    read = config.quant
    assert read is not None
    assert section(**ours) == read.model_copy(update={"samples": None} if hasattr(read, "samples") else {})


@pytest.mark.parametrize(
    "theirs",
    [
        {"mode": "rtn", "rtn_bits": 2},
        {"mode": "static", "weight_type": "uint16"},
        {"mode": "static", "nodes_to_exclude": ["/MatMul"]},
    ],
)
def test_quantization_of_winml_cli_without_a_counterpart_is_refused(theirs: dict[str, Any]) -> None:
    """A build without the key would differ from the request."""
    with pytest.raises(ConfigError, match="not supported"):
        read_winml_cli_config({"quant": theirs}, "theirs.json")


def test_own_config_is_not_mistaken_for_winml_cli() -> None:
    """Modes and algorithms that both tools know are read as ours."""
    value = {"quant": {"precision": "int4", "mode": "weight-only", "algorithm": "rtn"}}
    assert (value, []) == read_winml_cli_config(value, "ours.json")


def test_order_of_rules_makes_another_result() -> None:
    """The first matching rule wins, so keys and records tell orders apart."""
    rules = {"a": "int8", "b": "fp32"}
    first, second = plan_for(per_module=rules), plan_for(per_module=dict(reversed(rules.items())))
    identity = ModelIdentity(dict, is_repeatable=True, places=())
    assert cache_key(first, identity) != cache_key(second, identity)
    quantize = next(stage for stage in STAGES if stage.name == "quantize")
    assert quantize.options(first) != quantize.options(second)


@pytest.mark.parametrize(
    ("values", "is_handed_over"),
    [
        ({"precision": "int4"}, True),
        ({"precision": "int8", "mode": "weight-only"}, True),
        ({"precision": "fp16"}, True),
        ({"precision": "int4", "algorithm": "gptq"}, True),
        ({"budget": "4.5bits"}, True),
        ({"budget": "smallest", "min_sqnr_db": 25.0, "mode": "qdq"}, False),
        ({"precision": "int4", "kv_cache": "int8"}, False),
        ({"precision": "int8"}, False),
        ({"precision": "int4", "per_module": {"a": "int8"}}, False),
        ({"precision": "fp32"}, False),
    ],
)
def test_tensor_by_tensor_quantization_is_handed_over(values: dict[str, Any], is_handed_over: bool) -> None:
    """The receiving stage makes the graph, and lists the absorbed stages."""
    plan = plan_for(**values)
    stages = handed_over_stages(STAGES, plan)
    assert (["quantize"] if is_handed_over else ["export"]) == [stage.name for stage in stages if stage.makes_graph]
    givers = [stage.name for stage in stages if stage.handed_to == "quantize"]
    assert (["export", "optimize"] if is_handed_over else []) == givers
    assert STAGES == handed_over_stages(STAGES, plan_build(WinMLBuildConfig(quant=None), ModelRequest("checkpoint")))


def test_list_as_mode_is_refused_by_its_key() -> None:
    """A list as mode is neither ours nor that of another tool."""
    with pytest.raises(ConfigError, match=r"quant\.mode"):
        section(mode=["weight-only"])
