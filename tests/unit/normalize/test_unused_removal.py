"""Removal of unused initializers."""

from __future__ import annotations

import numpy as np

from graphs import answer, operators, parse, tags
from winml.modelkit.normalize.passes import UnusedInitializerRemovalPass

BRANCHES = """
m (float[2] x, bool c) => (float[2] y, float[1] k) <float[2] a = {1,2}, float[1] k = {3}, float[1] b = {4}>
{ y = If (c) <then_branch = t () => (float[2] p) <float[1] d = {5}, float[1] e = {6}> { p = Mul (x, d) },
              else_branch = f () => (float[2] q) { q = Add (x, a) }> }
"""


def test_unused_initializer_is_removed_in_subgraphs_too() -> None:
    """Initializers read in the graph or in a branch stay, and so do outputs."""
    model = parse(BRANCHES)
    feeds = {"x": np.ones(2, np.float32), "c": True}
    before = (answer(model, **feeds), tags(model), operators(model))
    assert UnusedInitializerRemovalPass()(model).modified
    assert [["a", "k"], ["d"], []] == [list(graph.initializers) for graph in model.graphs()]
    assert before == (answer(model, **feeds), tags(model), operators(model))


def test_unused_removal_without_unused_initializers_has_no_effect() -> None:
    """A second run finds nothing."""
    model = parse(BRANCHES)
    UnusedInitializerRemovalPass()(model)
    assert not UnusedInitializerRemovalPass()(model).modified
