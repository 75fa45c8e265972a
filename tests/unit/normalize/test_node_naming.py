"""Unique names of values and nodes."""

from __future__ import annotations

import numpy as np

from graphs import answer, parse, tags
from winml.modelkit.normalize.passes import UniqueNodeNamesPass, ValueNamesPass
from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.onnx.stage import all_nodes

BODY = """
m (float[2] x, bool c) => (float[2] y)
{ a = Relu (x)   y = If (c) <then_branch = t () => (float[2] p) { p = Neg (a) },
                            else_branch = f () => (float[2] q) { q = Abs (a) }> }
"""


def test_equal_and_missing_names_become_unique_across_branches() -> None:
    """The first of equal names stays, free names are not taken twice."""
    model = parse(BODY)
    feeds = {"x": np.ones(2, np.float32), "c": True}
    before = (answer(model, **feeds), tags(model))
    for node, name in zip(all_nodes(model), ("/a/Op", "", "/a/Op", "/a/Op_1"), strict=True):
        node.name = name
    assert UniqueNodeNamesPass()(model).modified
    assert ["/a/Op", "/If", "/a/Op_2", "/a/Op_1"] == [node.name for node in all_nodes(model)]
    assert before == (answer(model, **feeds), tags(model))


def test_unique_names_stay() -> None:
    """Names that are unique already are left alone."""
    model = parse(BODY)
    before = [node.name for node in all_nodes(model)]
    assert not UniqueNodeNamesPass()(model).modified
    assert before == [node.name for node in all_nodes(model)]


WITH_A_GAP = """
m (float[4] x) => (float[n] y, int64[4] i)
{ y, first, i = Unique (x) }
"""


def test_omitted_output_stays_omitted() -> None:
    """A name would undo the removal of unused outputs in every round."""
    model = parse(WITH_A_GAP)
    feeds = {"x": np.array([2, 1, 2, 3], np.float32)}
    before = answer(model, **feeds)
    unique = model.graph.node(0)
    unique.outputs[1].name = ""
    assert not ValueNamesPass()(model).modified
    assert ["y", "", "i"] == [value.name for value in unique.outputs]
    assert before == answer(model, **feeds)


def test_normalization_settles_with_an_omitted_output() -> None:
    """The first round removes the name, and the second changes nothing."""
    result = normalize(parse(WITH_A_GAP))
    assert ["y", "", "i"] == [value.name for value in result.model.graph.node(0).outputs]
    assert not any("did not converge" in note for note in result.notes)


def test_unnamed_values_get_a_name() -> None:
    """A value without a name may be in use."""
    model = parse(BODY)
    model.graph.node(0).outputs[0].name = None
    assert ValueNamesPass()(model).modified
    assert model.graph.node(0).outputs[0].name


def test_values_of_two_branches_have_no_name_in_common() -> None:
    """Shape inference of onnx finds known values by name, and takes those of the other branch."""
    model = parse("""m (float[n, 4] x, bool c) => (float[k] y) <int64[1] flat = {-1}, int64[2] two = {2, -1}> {
        y = If (c) <then_branch = t () => (float[k] a) { s = Identity (flat) a = Reshape (x, s) },
                    else_branch = e () => (float[k] b) { s = Identity (two) r = Reshape (x, s) b = Reshape (r, flat) }>
        }""")
    assert ValueNamesPass()(model).modified
    names = [value.name for graph in model.graphs() for node in graph for value in node.outputs]
    assert len(names) == len(set(names))
    assert {"y", "a", "b", "s", "r"} < {*names}
    assert not ValueNamesPass()(model).modified
