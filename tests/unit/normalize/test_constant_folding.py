"""Folding of values that depend on constants only, within limits."""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir
import pytest

from graphs import answer, operators, parse, tags
from winml.modelkit.normalize.pipeline import OUTPUT_LIMIT_ELEMENTS, ConstantFoldingPass, normalize

X = np.arange(6, dtype=np.float32).reshape(2, 3)

TOO_LARGE = OUTPUT_LIMIT_ELEMENTS + 1


def _fold_constants(model: ir.Model) -> bool:
    return ConstantFoldingPass()(model).modified


def test_folding_computes_shapes_from_the_graph() -> None:
    """Shape → Gather → Concat → Reshape becomes a Reshape to a constant."""
    model = parse(
        "m (float[2,3] x) => (float[3,2] y) <int64[1] one = {1}, int64[1] two = {2}>"
        "{ s = Shape (x)  d = Gather <axis=0> (s, one)  t = Concat <axis=0> (d, two)  y = Reshape (x, t) }"
    )
    before = answer(model, x=X)
    assert _fold_constants(model)
    assert "Reshape" == operators(model)[-1]
    assert {"Gather", "Concat", "Shape"}.isdisjoint(operators(model))
    assert before == answer(model, x=X)
    assert all(tags(model))


def test_folding_copies_tag_and_module_to_the_replacing_node() -> None:
    """A CastLike becomes a Cast in the same module, and says that its tag was merged."""
    model = parse("m (float[2,3] x, int64[1] k) => (int64[2,3] y) { y = CastLike (x, k) }")
    before = answer(model, x=X, k=[1])
    model.graph[0].metadata_props["namespace"] = "M/cast"
    assert _fold_constants(model)
    assert [("/M/CastLike", "merged")] == tags(model)
    assert ("/castlike/Cast", "M/cast") == (model.graph[0].name, model.graph[0].metadata_props["namespace"])
    assert before == answer(model, x=X, k=[1])


def test_folding_a_known_condition_keeps_the_tags_of_the_branch() -> None:
    """The nodes of the branch that is taken move up with their own tags."""
    model = parse(
        """m (float[2,3] x) => (float[2,3] y) <bool c = {1}>
        { y = If (c) <then_branch = t () => (float[2,3] p) { q = Relu (x) p = Neg (q) },
                      else_branch = e () => (float[2,3] r) { r = Abs (x) }> }"""
    )
    before = answer(model, x=X)
    assert _fold_constants(model)
    assert ["Relu", "Neg"] == operators(model)
    assert [("/M/Relu", "direct"), ("/M/Neg", "direct")] == tags(model)
    assert before == answer(model, x=X)


def test_folding_leaves_no_note_of_removed_names() -> None:
    """Values carry no metadata of onnxscript's."""
    model = parse(
        "m (float[2] x) => (float[2] y) <float[2] a = {1,2}, float[2] b = {3,4}> { c = Add (a, b)  y = Mul (x, c) }"
    )
    assert _fold_constants(model)
    assert ["Mul"] == operators(model)
    assert [{}] == [dict(value.metadata_props) for value in model.graph.initializers.values()]


@pytest.mark.parametrize(
    "body",
    [
        # The result is larger than a file should hold.
        (
            f"m (float[1] x) => (float[{TOO_LARGE}] y) <int64[1] s = {{{TOO_LARGE}}}, float[1] k = {{2}}>"
            "{ e = Expand (k, s)  y = Mul (x, e) }"
        ),
        # A weight is not read.
        (
            f"m (float[1] x) => (float[8193] y) <float[8193] w = {{{','.join('0' * 8193)}}}, float[1] k = {{2}}>"
            "{ a = Mul (w, k)  y = Mul (x, a) }"
        ),
        # A tied weight is not stored twice.
        (
            "m (float[1,3] x, int64[1] i) => (float[1,4] y, float[1,3] e) <float[4,3] w = {0,0,0,0,0,0,0,0,0,0,0,0}>"
            "{ a = Transpose <perm=[1,0]> (w)  y = MatMul (x, a)  e = Gather (w, i) }"
        ),
        # The matrices of experts stay stacked, as MoE takes them.
        (
            "m (float[1,2] x) => (float[1,2] y)"
            " <float[2,2,2] w = {1,2,3,4,5,6,7,8}, int64 i = {0}, int64 j = {1}>"
            "{ a = Gather <axis=0> (w, i)  b = Gather <axis=0> (w, j)  h = MatMul (x, a)  y = MatMul (h, b) }"
        ),
        # Random on purpose.
        "m (float[1] x) => (float[3] y) { r = RandomUniform <shape=[3]> ()  y = Mul (x, r) }",
        # Depends on an input.
        "m (float[2] x) => (float[2] y) <float[2] a = {1,2}> { y = Add (x, a) }",
    ],
)
def test_folding_does_not_fire(body: str) -> None:
    """Large results, weights, tied and stacked weights, random numbers and inputs are left alone."""
    model = parse(body)
    before = operators(model)
    assert not _fold_constants(model)
    assert before == operators(model)


def test_folding_skips_uncomputable_nodes_silently(caplog: pytest.LogCaptureFixture) -> None:
    """A node on which the reference implementation fails stays, without a message."""
    model = parse(
        "m (float[4] x) => (float[4] y) <float[2] a = {1,2}, int64[1] s = {3}> { b = Reshape (a, s)  y = Add (x, b) }"
    )
    with caplog.at_level(logging.WARNING):
        _fold_constants(model)
    assert ["Reshape", "Add"] == operators(model)
    assert [] == caplog.records


SPLITS = {
    "equal": "<axis=1> (x, two)",
    "uneven": "<axis=1> (x, three)",
    "sizes": "<axis=1> (x, sizes)",
    "squeezed": "<axis=1, keepdims=0> (x, one)",
}


@pytest.mark.parametrize("opset", [11, 13, 17, 18])
@pytest.mark.parametrize("split", SPLITS)
def test_split_sequence_becomes_a_split_of_the_opset(split: str, opset: int) -> None:
    """The sequence goes, and ONNX Runtime loads the graph in every opset that has sequences."""
    model = parse(
        "m (float[2,4] x) => (float[2,k] y) <int64 zero = {0}, int64 two = {2}, int64 three = {3}, int64 one = {1},"
        f" int64[2] sizes = {{1, 3}}> {{ s = SplitToSequence {SPLITS[split]}  a = SequenceAt (s, zero)"
        "  b = SequenceAt (s, one)  y = Concat <axis=-1> (a, b) }",
        opset,
    )
    model.graph.outputs[0].shape = None
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    before = answer(model, x=values)
    result = normalize(model)
    assert "Split" in operators(model)
    assert {"SplitToSequence", "SequenceAt"}.isdisjoint(operators(model))
    assert before == answer(model, x=values)
    assert all(tags(model))
    assert not [note for note in result.notes if "without" in note]
    assert not normalize(model).changed


@pytest.mark.parametrize("opset", [11, 12, 13, 18])
def test_stacked_sequence_becomes_a_concat_of_the_opset(opset: int) -> None:
    """The axes of Unsqueeze are an attribute before opset 13."""
    model = parse(
        "m (float[2,3] x) => (float[2,2,3] y)"
        " { r = Relu (x)  s = SequenceConstruct (x, r)  y = ConcatFromSequence <axis=0, new_axis=1> (s) }",
        opset,
    )
    before = answer(model, x=X)
    normalize(model)
    assert ["Concat", "Relu", "Unsqueeze", "Unsqueeze"] == sorted(operators(model))
    assert before == answer(model, x=X)


def test_invalid_folding_is_undone() -> None:
    """Split has no computed sizes in opset 11: the graph stays unfolded, and a note says so."""
    model = parse(
        "m (float[2,4] x, int64[2] n) => (float[2,k] y) <int64 zero = {0}>"
        "{ s = SplitToSequence <axis=1> (x, n)  c = Constant <value = int64 {0}> ()  i = Identity (c)"
        "  y = SequenceAt (s, i) }",
        11,
    )
    feeds = {"x": np.arange(8, dtype=np.float32).reshape(2, 4), "n": [1, 3]}
    before = answer(model, **feeds)
    result = normalize(model)
    assert ["SplitToSequence", "SequenceAt"] == operators(model)
    assert before == answer(model, **feeds)
    assert ["ConstantFoldingPass"] == [note.split()[2].rstrip(":") for note in result.notes if " without " in note]
    assert all(tags(model))
