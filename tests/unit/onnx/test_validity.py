"""Refusal of graphs that cannot be computed."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from winml.modelkit.errors import InputError
from winml.modelkit.onnx.validity import refuse_invalid

HEADER = '<ir_version: 10, opset_import: ["" : 17, "f" : 1]>\n'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("m (float[2] x) => (float[2] y) { y = Add (x, q) }", "'q'"),
        ("m (float[2] x) => (float[2] z) { y = Neg (x) }", "'z'"),
        (
            """m (bool c, float[2] x) => (float[2] y) {
                y = If (c) <then_branch = t () => (float[2] a) { a = Neg (x) },
                            else_branch = e () => (float[2] b) { b = Neg (a) }> }""",
            "'a'",
        ),
        (
            """m (float[2] x) => (float[2] y) { y = f.g (x) }
               <domain: "f", opset_import: ["" : 17]> g (u) => (v) { v = Add (u, w) }""",
            "'w'",
        ),
    ],
)
def test_undefined_value_is_named(body: str, words: str) -> None:
    """The value is in the graph, its outputs, a subgraph or a function."""
    with pytest.raises(InputError, match=rf"m\.onnx: .*{words}"):
        refuse_invalid(onnx.parser.parse_model(HEADER + body), Path("m.onnx"))


def test_weight_of_a_subgraph_hides_no_value_around_it() -> None:
    """Two branches may have weights of one name; a graph around them may not."""
    branches = """m (bool c, float[2] x) => (float[2] z) <float[2] %s = {1, 2}> {
        y = If (c) <then_branch = t () => (float[2] a) <float[2] w = {3, 4}> { a = Add (x, w) },
                    else_branch = e () => (float[2] b) <float[2] w = {5, 6}> { b = Mul (x, w) }>
        z = Add (y, %s) }"""
    with pytest.raises(InputError, match=r"m\.onnx: .*'w'"):
        refuse_invalid(onnx.parser.parse_model(HEADER + branches % ("w", "w")), Path("m.onnx"))
    refuse_invalid(onnx.parser.parse_model(HEADER + branches % ("v", "v")), Path("m.onnx"))


def test_valid_graph_passes_with_any_node_order() -> None:
    """Inputs left out, outer values in subgraphs and nodes out of order are all fine."""
    body = """m (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> {
        y = If (c) <then_branch = t () => (float[2] a) { a = Add (x, later) },
                    else_branch = e () => (float[2] b) { b = Clip (w, , ) }>
        later = Neg (x) }"""
    refuse_invalid(onnx.parser.parse_model(HEADER + body), Path("m.onnx"))


def test_operators_of_no_version_are_refused() -> None:
    """Operators of other domains are not checked."""
    model = onnx.parser.parse_model(HEADER + "m (float[2] x) => (float[2] y) { y = Neg (x) }")
    del model.opset_import[:]
    with pytest.raises(InputError, match=r"m\.onnx: has Neg, .*opset_import"):
        refuse_invalid(model, Path("m.onnx"))
    model.graph.node[0].domain = "f"
    refuse_invalid(model, Path("m.onnx"))
