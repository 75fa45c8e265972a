"""Refusal of quantization options that are unused or contradictory."""

from __future__ import annotations

import math
from typing import Any

import pytest

from winml.modelkit.errors import ConfigError, UsageError
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import BLOCK_OPSET, MODES


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"block_size": 32}, "--block-size 32"),
        ({"algorithm": "hqq"}, "--algorithm"),
        ({"precision": "w8a8", "block_size": 32, "per_channel": False}, "--block-size 32"),
        ({"precision": "int4", "per_channel": False}, "--per-tensor"),
        ({"precision": "int4", "per_channel": True}, "--per-channel"),
        ({"precision": "fp16", "symmetric": False}, "--asymmetric"),
        ({"precision": "fp16", "method": "entropy"}, "--method"),
        ({"precision": "int4", "algorithm": "k_quant", "symmetric": True}, "--algorithm k_quant"),
        ({"precision": "int8", "mode": "weight-only", "algorithm": "hqq"}, "4-bit"),
        ({"precision": "int4", "weight_operators": "standard", "algorithm": "hqq"}, "fractional"),
        ({"precision": "w8a8", "algorithm": "awq"}, "--algorithm awq"),
        ({"precision": "w8a8", "algorithm": "gptq", "per_channel": False}, "one scale"),
        ({"precision": "w16a16", "algorithm": "gptq"}, "16 bits"),
    ],
)
def test_option_that_would_be_ignored_is_refused(given: dict[str, Any], words: str) -> None:
    """The message names the problem, and the hint begins with an option to use or to add."""
    with pytest.raises(UsageError, match=words) as caught:
        QuantizeOptions(**given).refuse_contradictions()
    assert caught.value.hint.startswith(("Use --", "Add --"))


@pytest.mark.parametrize(
    "given",
    [
        {"precision": "int8", "per_channel": False, "symmetric": True},
        {"precision": "int4", "block_size": 16, "algorithm": "hqq"},
        {"precision": "int4", "per_module": {"a": "int8"}, "per_channel": False, "block_size": 16},
        {"precision": "int4", "algorithm": "rtn", "symmetric": False},
        {"precision": "w8a8", "samples": 4, "method": "percentile"},
        {"precision": "fp32", "block_size": 16},
    ],
)
def test_option_read_by_one_mode_is_accepted(given: dict[str, Any]) -> None:
    """One of the modes is enough, also if other modules have another mode or nothing is quantized."""
    QuantizeOptions(**given).refuse_contradictions()


@pytest.mark.parametrize(
    ("given", "modes"),
    [
        ({"calibration_data": "samples"}, ("qdq",)),
        ({"precision": "uint8", "method": "entropy"}, ("qdq",)),
        ({"mode": "qdq"}, ("qdq",)),
        ({"smooth_quant": 0.5, "calibration_data": "samples"}, ("dynamic",)),
        ({"precision": "int4", "algorithm": "gptq", "calibration_data": "samples"}, ("weight-only",)),
        ({"precision": "fp32", "per_module": {"a": "int8"}, "calibration_data": "samples"}, ("qdq",)),
    ],
)
def test_calibration_without_a_mode_selects_the_mode_that_reads_it(given: dict[str, Any], modes: tuple[str]) -> None:
    """Options of ranges select qdq, unless another option reads the samples."""
    options = QuantizeOptions(**given)
    options.refuse_contradictions()
    assert modes == options.modes()


@pytest.mark.parametrize(
    ("given", "is_open"),
    [
        ({}, True),
        ({"precision": "fp32", "per_module": {"a": "int8"}}, True),
        ({"precision": "int4", "per_module": {"a": "int8"}}, False),
        ({"mode": "dynamic"}, False),
        ({"calibration_data": "samples"}, False),
        ({"precision": "w8a8"}, False),
        ({"budget": "4bits"}, False),
    ],
)
def test_graph_decides_a_mode_that_no_option_states(given: dict[str, Any], is_open: bool) -> None:
    """A precision of several modes without a mode, a budget or calibration options."""
    assert is_open == QuantizeOptions(**given).has_open_mode


def test_options_of_modes_are_fields() -> None:
    """A mode declares no option that is not there, and each that only some modes read."""
    declared = {name for rules in MODES.values() for name in rules.options}
    always = {"precision", "mode", "exclude", "include", "per_module", "ep", "dataset", "min_sqnr_db", "kv_cache"}
    assert declared == QuantizeOptions.model_fields.keys() - always


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_threshold_is_a_number(value: float) -> None:
    """Comparisons with NaN are false, so every result would pass, or none."""
    with pytest.raises(ConfigError, match="min_sqnr_db"):
        QuantizeOptions(min_sqnr_db=value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"precision": "fp16"}, ()),
        ({"precision": "w8a8"}, ("--smooth-quant", "--algorithm")),
        ({"precision": "w8a8", "smooth_quant": 0.5}, ("--algorithm",)),
        ({"precision": "int4"}, ("--algorithm",)),
        ({"precision": "int4", "algorithm": "gptq"}, ()),
    ],
)
def test_remedy_is_an_unused_option_of_the_mode(given: dict[str, Any], named: tuple[str, ...]) -> None:
    """Per-channel scales are no remedy for float16, and an option in use is no remedy at all."""
    remedies = QuantizeOptions(**given).remedies()
    assert len(named) == len(remedies)
    assert all(option in remedy for option, remedy in zip(named, remedies, strict=True))


@pytest.mark.parametrize("given", [{"block_size": 32}, {"block_sizes": {"a": 32}}], ids=str)
def test_blocks_without_a_provider_of_blocks_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--block-size"):
        QuantizeOptions(precision="w8a8", mode="qdq", ep="vitisai", **given).refuse_contradictions()


def test_block_size_beside_weight_only_leaves_qdq_without_blocks() -> None:
    rules = MODES["qdq"]
    both = QuantizeOptions(precision="w8a8", per_module={"lm_head": "int4"}, block_size=128, ep="qnn")
    both.refuse_contradictions()
    assert both.qdq_block_size is None
    assert rules.least_opset == both.least_opset(rules)
    alone = QuantizeOptions(precision="w8a8", block_size=128)
    assert 128 == alone.qdq_block_size
    assert BLOCK_OPSET == alone.least_opset(rules)
