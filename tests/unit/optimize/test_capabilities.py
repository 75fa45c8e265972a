"""Capabilities of the optimizer: each changes its graph, no near miss, and nothing when disabled."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse
from installed_versions import OPSET_24
from unit.optimize.capability_graphs import CASES, CapabilityCase
from winml.modelkit.errors import OptimizeError, UsageError
from winml.modelkit.optimize.capabilities import CAPABILITIES
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import GraphCensus, OptimizeResult, optimize
from winml.modelkit.ort.graph_inputs import draw_feeds, graph_inputs
from winml.modelkit.ort.sessions import Session
from winml.modelkit.tags.tagging import measure_coverage

CONTRIB = ', "com.microsoft" : 1'


def _parse_case(case: CapabilityCase, body: str) -> ir.Model:
    """Return the model, with values for the weights ``w1``, ``w2`` …"""

    def insert_values(match: re.Match[str]) -> str:
        count = math.prod(int(size) for size in match["shape"].split(","))
        return f"{match[0]} = {{{', '.join(['0'] * count)}}}"

    head, brace, rest = body.partition("{ ")
    return parse(
        re.sub(r"float\[(?P<shape>[\d, ]+)\] w\d", insert_values, head) + brace + rest, case.opset, domains=CONTRIB
    )


def _enable_only(model: ir.Model, name: str) -> OptimizeResult:
    return optimize(model, OptimizeOptions.model_validate({name: True}))


def _operator_names(model: ir.Model) -> list[str]:
    return sorted(GraphCensus.of(model).operators.elements())


def _run_model(model: ir.Model) -> dict[str, Any]:
    session = Session(ir.to_proto(model).SerializeToString(), optimize=False)
    inputs = graph_inputs(session)
    sizes = {key: 3 for item in inputs for key in item.shape if isinstance(key, str)}
    return session.run(draw_feeds(inputs, sizes, seed=1))


def test_every_capability_of_onnxruntime_has_a_case() -> None:
    """Every capability of ONNX Runtime has a case; our own fusions are tested in separate files."""
    offered = [name for name, entry in CAPABILITIES.items() if entry.engine == "onnxruntime"]
    assert offered == [case.capability for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.capability)
def test_capability_fires_on_its_graph(case: CapabilityCase) -> None:
    """Enabled alone, it makes the expected operators, keeps every tag and the outputs, and the result is valid."""
    expected = _run_model(_parse_case(case, case.graph))
    result = _enable_only(_parse_case(case, case.graph), case.capability)
    assert result.changed
    assert case.expected == _operator_names(result.model)
    assert measure_coverage(result.model).is_complete
    assert result.fired.get(case.capability, 1) == 1
    onnx.checker.check_model(ir.to_proto(result.model))
    outputs = _run_model(result.model)
    for name, value in expected.items():
        tolerance = 2e-3 if case.changes_numbers else 1e-5
        np.testing.assert_allclose(outputs[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.capability)
def test_capability_leaves_the_near_miss(case: CapabilityCase) -> None:
    """A similar graph stays unchanged."""
    before = _operator_names(_parse_case(case, case.near_miss))
    result = _enable_only(_parse_case(case, case.near_miss), case.capability)
    assert before == _operator_names(result.model)
    assert not result.fired.get(case.capability)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.capability)
def test_capability_disabled_by_name_does_not_happen(case: CapabilityCase) -> None:
    """All other capabilities are enabled.

    Nodes that the capability adds are absent, or nodes that it removes are present.
    """
    level = {name: True for name, entry in CAPABILITIES.items() if entry.level is not None}
    options = OptimizeOptions.model_validate({**level, case.capability: False})
    result = optimize(_parse_case(case, case.graph), options)
    assert case.capability not in result.fired
    assert not _marks_of_case(case) & _marks_in_model(result.model)


def _marks_of_case(case: CapabilityCase) -> set[str]:
    entry = CAPABILITIES[case.capability]
    return {*entry.makes, *entry.marks}


def _marks_in_model(model: ir.Model) -> set[str]:
    census = GraphCensus.of(model)
    marks = {mark for entry in CAPABILITIES.values() for mark in entry.marks}
    return {*census.operators, *(mark for mark in marks if any(mark in name for name in census.names))}


@pytest.mark.parametrize("ep", ["qnn", "cuda", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.capability)
def test_capability_enabled_by_name_for_a_provider_fires_or_is_refused(case: CapabilityCase, ep: str) -> None:
    """A capability enabled by name is never dropped, and the remedy of the refusal works."""
    asked = {case.capability: True, "ep": ep}
    try:
        assert optimize(_parse_case(case, case.graph), OptimizeOptions.model_validate(asked)).changed
    except UsageError as error:
        found = re.search(r"--opset (\d+)", error.hint)
        assert (found is not None) == bool(CAPABILITIES[case.capability].transformers)
        if found is not None:
            options = OptimizeOptions.model_validate({**asked, "opset": int(found[1])})
            assert 1 == optimize(_parse_case(case, case.graph), options).fired[case.capability]


def test_capability_fires_from_its_stated_opset_on() -> None:
    """One opset earlier, ONNX Runtime's own operators would be needed."""
    for case in CASES:
        since = CAPABILITIES[case.capability].since_opset
        if since:
            for opset, fires in ((since - 1, False), (since, True)):
                model = optimize(_parse_case(case, case.graph), OptimizeOptions(opset=opset)).model
                only_onnx = OptimizeOptions.model_validate({"level": "basic", "ep": "qnn"})
                assert fires == (1 == optimize(model, only_onnx).fired[case.capability])


@OPSET_24
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.capability)
def test_standard_operators_leave_no_operator_of_onnxruntime(case: CapabilityCase) -> None:
    """At the highest level, the graph has operators of ONNX only, with tags and the same outputs."""
    model, options = _parse_case(case, case.graph), OptimizeOptions(level="full", operators="standard")
    expected = _run_model(model)
    result = optimize(model, options).model
    onnx.checker.check_model(ir.to_proto(result))
    assert {""} == {node.domain for node in result.graph}
    assert 24 == result.opset_imports[""]
    assert measure_coverage(result).is_complete
    for name, value in _run_model(result).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5)


@OPSET_24
def test_operator_of_onnxruntime_that_onnx_lacks_is_refused() -> None:
    """The message counts such operators; equal operators of ONNX are written."""
    text = """m (float[2, 4] x) => (float[2, 4] y) <float[4] w1 = {0, 0, 0, 0}>
        { g = com.microsoft.FastGelu (x) h = com.microsoft.QuickGelu (g) y = com.microsoft.BiasGelu (h, w1) }"""
    with pytest.raises(OptimizeError, match=r"ONNX has no operator for 1 com\.microsoft:BiasGelu"):
        optimize(parse(text, domains=CONTRIB), OptimizeOptions(operators="standard"))


@OPSET_24
@pytest.mark.parametrize(
    ("capability", "made"), [("fast_gelu_fusion", "Gelu"), ("quick_gelu_fusion", "Swish"), ("gelu_fusion", "Gelu")]
)
def test_activation_becomes_the_operator_of_onnx(capability: str, made: str) -> None:
    """The factor in the sigmoid, and the approximation by tanh, are attributes of ONNX's operators."""
    case = next(case for case in CASES if case.capability == capability)
    result = optimize(_parse_case(case, case.graph), OptimizeOptions(level="full", operators="standard"))
    assert 1 == result.fired[capability]
    assert made in _operator_names(result.model)


@OPSET_24
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opset": 22}, "opset 22 has no Attention"),
        ({"opset": 23, "quick_gelu_fusion": True}, "opset 23"),
        ({"group_query_attention_fusion": True}, "group-query-attention-fusion: opset 24"),
        ({"module": ("x",), "level": "full"}, "cannot be combined"),
    ],
)
def test_standard_operators_refuse_contradictions(options: dict[str, Any], words: str) -> None:
    """The message names the option and the opset."""
    with pytest.raises(UsageError, match=words):
        _check_standard_options(options)


def _check_standard_options(options: dict[str, Any]) -> None:
    requested = OptimizeOptions.model_validate({"operators": "standard", **options})
    list(requested.enabled())
    requested.refuse_whole_graph_options()


def test_opset_that_onnxruntime_does_not_open_is_refused() -> None:
    """The hint names the newest one that it opens."""
    with pytest.raises(UsageError, match="ONNX Runtime") as caught:
        OptimizeOptions(opset=99)
    newest = re.search(r"opset (\d+)", caught.value.hint)
    assert newest is not None
    assert int(newest[1]) >= 23
    OptimizeOptions(opset=int(newest[1]))
