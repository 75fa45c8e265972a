"""Formats of quantized operators: the graphs that ask for them, the record, and the answers of a provider."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from winml.modelkit.errors import NoAnswerError
from winml.modelkit.ort.devices import choose_provider
from winml.modelkit.ort.execution_providers import LIBRARY_VARIABLE
from winml.modelkit.ort.format_keys import product_key
from winml.modelkit.ort.kernels import reports_placement
from winml.modelkit.ort.probe_graphs import PROBES
from winml.modelkit.ort.quantized_formats import (
    QuantizedFormats,
    _ask_provider,
    _find_formats,
    _find_refusal,
    quantized_formats,
    recorded_formats,
)
from winml.modelkit.ort.sessions import is_onnxruntime_at_least
from winml.modelkit.quantize.placements import PLACEMENTS, refused_precisions


@pytest.mark.parametrize("key", PROBES)
def test_every_graph_is_valid_and_runs_on_the_cpu(key: str) -> None:
    """A refusal is the provider's, not that of an invalid graph."""
    model = PROBES[key].make()
    onnx.checker.check_model(model)
    if key.startswith(("MatMulNBits/2", "MoE")) and not is_onnxruntime_at_least("1.24"):
        return  # it has no kernel for 2 bits, and none for experts in float
    ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("ep", ["qnn", "openvino"])
def test_record_answers_every_graph(ep: str) -> None:
    """A new graph is recorded too."""
    formats = recorded_formats(ep)
    assert formats is not None
    assert set(PROBES) == set(formats.answers)


@pytest.mark.skipif(not reports_placement(), reason="this ONNX Runtime does not report the assignment of nodes")
def test_installed_provider_is_asked_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU provider runs all nodes of these graphs with equal outputs."""
    chosen = choose_provider("cpu", None, {})
    keys = (product_key(8, 16, "channel"), "MatMulNBits/4/rank 2")
    monkeypatch.setattr("winml.modelkit.ort.probe_graphs.PROBES", {key: PROBES[key] for key in keys})
    assert dict.fromkeys(keys, "") == _ask_provider(chosen)


def test_provider_that_answers_too_late_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine decides no format, so nothing is stored."""
    monkeypatch.setattr("winml.modelkit.ort.quantized_formats._SECONDS", 0.001)
    with pytest.raises(NoAnswerError, match="did not respond"):
        _ask_provider(choose_provider("cpu", None, {}))


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        ({"problem": "no memory"}, "no memory"),
        ({"assigned": [["Other", "a", "MatMul", ""]], "sqnr_db": 60.0}, "MatMul runs on the CPU: too wide"),
        ({"assigned": [["Own", "a", "MatMul", ""]], "sqnr_db": 3.0}, "its result is wrong (SQNR 3 dB)"),
        ({"assigned": [["Own", "a", "MatMul", ""], ["Other", "convert_input", "Cast", ""]], "sqnr_db": None}, ""),
    ],
)
def test_format_runs_if_all_nodes_do_with_near_outputs(reported: dict[str, object], words: str) -> None:
    """Conversions of inputs and outputs may run on the CPU."""
    assert words == _find_refusal(reported, {"a": "too wide"}, "Own")


def test_library_named_later_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of an earlier call are those of another plug-in."""
    quantized_formats("qnn")
    before = _find_formats.cache_info().misses
    (tmp_path / "plug_in.so").touch()
    monkeypatch.setenv(LIBRARY_VARIABLE, f"qnn={tmp_path / 'plug_in.so'}")
    assert recorded_formats("qnn") == quantized_formats("qnn"), "an invalid library has no answers"
    assert before + 1 == _find_formats.cache_info().misses


def test_provider_with_kernels_is_not_asked() -> None:
    """Its kernels are listed instead; an unknown provider has no formats."""
    assert [None, None, None] == [quantized_formats(ep) for ep in ("cpu", "unknown", None)]


def test_refused_scales_are_not_placed() -> None:
    """The formats of a provider limit its placement, with the reason and its source."""
    from dataclasses import replace

    from winml.modelkit.quantize.precisions import PRECISIONS

    refused = {product_key(8, 16, scales): "too few wires" for scales in ("tensor", "channel", "block")}
    placement = replace(PLACEMENTS["qnn"], formats=QuantizedFormats("qnn", "qnn 9", is_installed=True, answers=refused))
    assert "too few wires (asked of qnn 9)" == placement.refusal(PRECISIONS["w8a16"], "qdq")
    assert "asked" in placement.refusal(PRECISIONS["w8a8"], "qdq"), "a format that no graph asked for is not assumed"


def test_precisions_of_a_provider_are_listed_with_reasons() -> None:
    """A precision that no graph asks for is not listed; of a provider without answers, none is."""
    refusals = refused_precisions("qnn")
    assert {"w8a8", "w8a16", "w16a16", "w4a16", "int4", "fp16"} <= {name for name, why in refusals.items() if not why}
    assert "bf16" not in refusals
    assert {} == refused_precisions(None)
