"""Every node has a name of its own."""

from __future__ import annotations

import numpy as np

from graphs import answer, parse, tags
from winml.modelkit.graph.stage import all_nodes
from winml.modelkit.normalize.node_naming import UniqueNodeNamesPass

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
