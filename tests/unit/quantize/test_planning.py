"""Plan of a quantization: a precision for each node with a weight, or a reason against it."""

from __future__ import annotations

from typing import Any

import pytest

from graphs import parse
from weighted_graphs import CONVOLUTION, PERCEPTRON, weight
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.options import parse_options
from winml.modelkit.quantize.file_quantization import graph_modules
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.planning import QuantizationPlan, plan_quantization, refuse_idle_selectors

IF = f"""m (float[2, 64] x, bool c) => (float[2, 64] y) <{weight("w1", 64, 64)}> {{
    h = MatMul (x, w1)
    y = If (c) <then_branch = t () => (float[2, 64] a) <{weight("w2", 64, 64)}> {{ a = MatMul (h, w2) }},
                else_branch = e () => (float[2, 64] b) {{ b = Relu (h) }}> }}"""


def plan(body: str, **options: Any) -> QuantizationPlan:
    """Plan a graph."""
    model = parse(body)
    return plan_quantization(model, parse_options(QuantizeOptions, options, "test"), graph_modules(model, "root"))


def precisions(made: QuantizationPlan) -> dict[str, str]:
    """Return operator → precision, or the reason for none."""
    return {node.operator: node.requested.name if node.mode else node.reason for node in made.nodes}


def test_exclude_and_include_hold_for_all_below() -> None:
    """Exclusion takes precedence over all other options; modules not included stay if there is an inclusion."""
    assert {"MatMul": "int8", "Gemm": "excluded by Gemm"} == precisions(plan(PERCEPTRON, exclude=["Gemm"]))
    assert {"MatMul": "not included", "Gemm": "int8"} == precisions(plan(PERCEPTRON, include=["Gemm"]))
    both = plan(PERCEPTRON, include=["M"], exclude=["MatMul"], per_module={"MatMul": "uint8"})
    assert {"MatMul": "excluded by MatMul", "Gemm": "int8"} == precisions(both)


def test_of_several_rules_the_first_wins() -> None:
    """Rules stand in the order of the file, and all win over the precision of the rest."""
    made = plan(PERCEPTRON, precision="int8", per_module={"Gemm": "uint8", "M": "fp32"})
    assert {"MatMul": "set to fp32", "Gemm": "uint8"} == precisions(made)
    assert [("dynamic", "uint8")] == [(mode, precision.name) for mode, precision in made.groups()]


@pytest.mark.parametrize(
    ("body", "options", "words"),
    [
        (CONVOLUTION, {}, "Conv (--mode qdq"),
        (PERCEPTRON, {"exclude": ["/M"]}, "excluded by /M"),
        (PERCEPTRON.replace("float[", "float16["), {}, "float16"),
        (
            f"m (float[64, 2] x) => (float[64, 2] y) <{weight('w', 64, 64)}> {{ y = MatMul (w, x) }}",
            {},
            "weight on",
        ),
        (
            f"m (float[2, 3, 8] x) => (float[2, 3, 8] y) <{weight('w', 2, 8, 8)}> {{ y = MatMul (x, w) }}",
            {},
            "3 (use --per-tensor)",
        ),
        ("m (float[2] x) => (float[2] y) { y = Relu (x) }", {}, "no node"),
    ],
)
def test_empty_plan_is_refused_with_the_reason(body: str, options: dict[str, Any], words: str) -> None:
    """A file without quantized nodes is no result."""
    with pytest.raises(UsageError) as refused:
        plan(body, **options)
    assert words in refused.value.message


def test_batch_of_matrices_has_one_scale_on_request() -> None:
    """The operator takes one scale and zero point, so ``--per-tensor`` applies."""
    body = f"m (float[2, 3, 8] x) => (float[2, 3, 8] y) <{weight('w', 2, 8, 8)}> {{ y = MatMul (x, w) }}"
    assert {"MatMul": "int8"} == precisions(plan(body, per_channel=False))


def test_node_of_a_branch_is_counted_and_left() -> None:
    """Activations are measured in the main graph only: those of a branch get their scale at run time, or stay float."""
    outer = plan(IF.replace("MatMul (h, w2)", "MatMul (h, w1)"), mode="qdq")
    assert ["qdq", "dynamic"] == [node.mode for node in outer.nodes]
    made = plan(IF, precision="w8a8")
    assert ["", "qdq does not quantize subgraphs and functions"] == [node.reason for node in made.nodes]
    assert ["/M/MatMul"] * 2 == [node.tag for node in made.nodes]


def test_call_of_a_function_is_left_with_its_reason() -> None:
    """A call of a function with the name of an operator is no operator."""
    function = '<opset_import: ["" : 17], domain: "m">\nGemm (x, w) => (y) { y = MatMul (x, w) }'
    body = PERCEPTRON.replace("Gemm (r, w2, w_b)", "m.Gemm (r, w2)").replace(f", {weight('w_b', 32)}", "")
    model = parse(body, functions=function, domains=', "m" : 1')
    made = plan_quantization(model, QuantizeOptions(), graph_modules(model, "root"))
    assert ["", "dynamic does not support Gemm"] == [node.reason for node in made.nodes]


@pytest.mark.parametrize("place", ["graph", "branch", "function"])
def test_quantized_graph_is_refused_at_any_depth(place: str) -> None:
    """A second quantization would lose accuracy twice."""
    quantizing = "DynamicQuantizeLinear"
    bodies = {
        "graph": PERCEPTRON.replace("a = MatMul", f"q, s, z = {quantizing} (x) a = MatMul"),
        "branch": IF.replace("{ b = Relu (h)", f"{{ q, s, z = {quantizing} (h) b = Relu (h)"),
        "function": PERCEPTRON.replace("Relu (a)", "m.F (a)"),
    }
    function = f'<opset_import: ["" : 17], domain: "m">\nF (x) => (y) {{ q, s, z = {quantizing} (x) y = Relu (x) }}'
    model = parse(bodies[place], **({"functions": function, "domains": ', "m" : 1'} if place == "function" else {}))
    with pytest.raises(InputError, match="already quantized") as refused:
        plan_quantization(model, QuantizeOptions(), graph_modules(model, "root"))
    assert f"is a {quantizing}" in refused.value.message


def test_unmatched_selector_lists_the_nearest() -> None:
    """A rule without modules is refused with the nearest name, and with a reason if the graph has no modules."""
    with pytest.raises(UsageError, match="'Gemn'") as refused:
        plan(PERCEPTRON, per_module={"Gemn": "fp32"})
    assert "Gemm" in refused.value.hint
    model = parse(PERCEPTRON)
    for number, node in enumerate(model.graph):
        node.metadata_props.clear()
        node.name = f"n{number}"
    modules = graph_modules(model, "root")
    with pytest.raises(UsageError, match="no node") as refused:
        plan_quantization(model, QuantizeOptions(exclude=("Gemm",)), modules)
    assert "winml retag" in refused.value.hint


def test_rule_behind_one_that_covers_its_modules_is_refused() -> None:
    """The first rule applies; the second, with another precision, would never. A rule that agrees is allowed."""
    model = parse(PERCEPTRON)
    modules = graph_modules(model, "root")
    options = parse_options(QuantizeOptions, {"per_module": {"M": "int8", "Gemm": "fp32"}}, "test")
    with pytest.raises(UsageError, match="Gemm: earlier"):
        refuse_idle_selectors(model, options, modules)
    for rules in ({"Gemm": "fp32", "M": "int8"}, {"M": "int8", "Gemm": "int8"}):
        refuse_idle_selectors(model, parse_options(QuantizeOptions, {"per_module": rules}, "test"), modules)


def test_modules_of_untagged_graph_are_read_from_node_names() -> None:
    """Scopes are selectors then."""
    model = parse(PERCEPTRON)
    for node in model.graph:
        node.metadata_props.clear()
    modules = graph_modules(model, "net")
    assert "node names" == modules.source
    made = plan_quantization(model, QuantizeOptions(exclude=("gemm",)), modules)
    assert {"MatMul": "int8", "Gemm": "excluded by gemm"} == precisions(made)
    assert {"/net/matmul", "/net/gemm"} == {node.tag for node in made.nodes}


def test_precision_that_no_mode_reaches_names_both_ways_out() -> None:
    """Other modes of the precision, and other precisions of the mode."""
    with pytest.raises(UsageError, match=r"--precision int4.*--mode") as refused:
        plan(PERCEPTRON, precision="int4", mode="dynamic")
    assert "--mode weight-only" in refused.value.hint
    assert "dynamic with int8, uint8" in refused.value.hint


def test_weight_of_an_outer_graph_counts_in_a_branch() -> None:
    """A branch reads the initializers of the outer graph."""
    made = plan(IF.replace("MatMul (h, w2)", "MatMul (h, w1)"))
    assert 2 == len(made.nodes)
    assert [2] == [len(names) for names in made.groups().values()]


def test_integer_tables_and_vectors_are_not_counted_as_weights() -> None:
    """Tables of indices and biases stay, and are not counted as left."""
    body = f"""m (float[2, 64] x) => (float[2, 64] y, int64[2, 4] z)
        <{weight("w1", 64, 64)}, {weight("t", 4, 4, dtype="int64")}, int64[2] i = {{0, 1}}, {weight("w_b", 64)}>
        {{ a = MatMul (x, w1) y = Add (a, w_b) z = Gather (t, i) }}"""
    assert ["MatMul"] == [node.operator for node in plan(body).nodes]


def test_constant_of_an_operator_without_weights_is_not_listed() -> None:
    """Tables that are multiplied or added are not counted as left; the weights of a recurrent layer are."""
    weights = ", ".join(
        [weight("w", 64, 64), weight("w_cos", 2, 64), weight("w_r", 1, 32, 64), weight("w_q", 1, 32, 8)]
    )
    body = f"""m (float[2, 64] x, float[5, 2, 64] s) => (float[2, 64] y, float[5, 1, 2, 8] z) <{weights}> {{
        a = Mul (x, w_cos) b = Add (a, w_cos) y = MatMul (b, w) z = LSTM <hidden_size = 8> (s, w_r, w_q) }}"""
    assert {"MatMul": "int4", "LSTM": "weight-only does not support LSTM"} == precisions(plan(body, precision="int4"))


@pytest.mark.parametrize("options", [{}, {"precision": "w8a8"}, {"precision": "int4"}, {"precision": "fp16"}])
def test_weight_that_a_run_may_replace_is_left(options: dict[str, Any]) -> None:
    """Old exports list weights among the inputs of the graph."""
    model = parse(PERCEPTRON)
    model.graph.inputs.append(model.graph.initializers["w1"])
    made = plan_quantization(model, QuantizeOptions(**options), graph_modules(model, "root"))
    left = {node.operator: node.reason for node in made.nodes if node.has_weight}
    assert left["MatMul"].startswith("its weight is a graph input")
    assert not left["Gemm"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("m (float[2, 4] x) => (float[2, 4] y) { y = Relu (x) }", "Quantization reduces"),
        ("m (float[2, 4] x) => (float[2, 4] y) <float[4] b = {1, 2, 3, 4}> { y = Add (x, b) }", "fp16"),
        (PERCEPTRON.replace("float[", "double["), "float32"),
    ],
)
def test_graph_without_weights_has_a_remedy(body: str, words: str) -> None:
    """No selection of modules and no mode helps: there is no weight, or the weights are float64."""
    with pytest.raises(UsageError, match="no node to quantize") as raised:
        plan(body)
    assert words in raised.value.hint
