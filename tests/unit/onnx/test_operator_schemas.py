"""Check of nodes against the operator schemas of the model's opset."""

from __future__ import annotations

import onnx_ir as ir

from graphs import parse
from winml.modelkit.onnx.operator_schemas import nodes_against_schema


def test_valid_nodes_have_no_violation() -> None:
    """Omitted inputs, other domains and operators that the opset does not define are no violations."""
    model = parse(
        "m (float[1,4] x, float[4] g) => (float[1,4] y) <float top = {6}>"
        '{ a = Clip (x, "", top)  b = LayerNormalization (a, g)  y = com.microsoft.Gelu (b) }',
        opset=15,
        domains=', "com.microsoft" : 1',
    )
    assert {} == nodes_against_schema(model)


def test_attribute_and_input_of_a_newer_opset_are_violations() -> None:
    """The text names node, attribute and opset; subgraphs are checked, too."""
    model = parse("m (float[2,4] x) => (float[2,2] y, float[2,2] z) { y, z = Split <axis=1> (x) }", opset=13)
    split = model.graph[0]
    split.attributes["num_outputs"] = ir.AttrInt64("num_outputs", 2)
    assert {
        split: f"Split {split.name} with attribute num_outputs, which opset 13 does not define"
    } == nodes_against_schema(model)
    model.opset_imports[""] = 17  # Split is as in opset 13
    assert nodes_against_schema(model)[split].endswith("which opset 17 does not define")
    model.opset_imports[""] = 18
    assert {} == nodes_against_schema(model)
    squeezed = parse(
        """m (float[1,2] x, bool c) => (float[2] y) <int64[1] a = {0}>
        { y = If (c) <then_branch = t () => (float[2] p) { p = Squeeze (x, a) },
                      else_branch = e () => (float[2] q) { q = Squeeze (x, a) }> }""",
    )
    assert {} == nodes_against_schema(squeezed)
    squeezed.opset_imports[""] = 11
    assert ["2 inputs; opset 11"] * 2 == [
        text.partition("with ")[2][:18] for text in nodes_against_schema(squeezed).values()
    ]
