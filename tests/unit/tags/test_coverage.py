"""Coverage of tags, counted on graphs."""

from __future__ import annotations

import pytest

from graphs import parse
from winml.modelkit.tags.tagging import (
    Coverage,
    NodeTag,
    all_nodes,
    clear_tag,
    count_coverage,
    measure_coverage,
    write_tag,
)

BRANCHES = """
agraph (float[2] x, bool c) => (float[2] y) {
    y = If (c) <
        then_branch = yes () => (float[2] a) { a = Relu (x) },
        else_branch = no () => (float[2] b) {
            d = Neg (x)
            b = If (c) <
                then_branch = deep () => (float[2] e) { e = Exp (d) },
                else_branch = deeper () => (float[2] f) { f = local.twice (d) }
            >
        }
    >
}
"""
TWICE = '<opset_import: ["" : 17], domain: "local"> twice (v) => (w) { w = Add (v, v) }'


def test_coverage_counts_subgraphs_and_functions() -> None:
    """Branches within branches, and the bodies of functions, are nodes like any other."""
    model = parse(BRANCHES, functions=TWICE, domains=', "local" : 1')
    assert ["Add", "Exp", "If", "If", "Neg", "Relu", "twice"] == sorted(node.op_type for node in all_nodes(model))
    assert Coverage(nodes=7, tagged=7, sources={"direct": 7}) == measure_coverage(model)


def test_coverage_counts_the_nodes_at_the_root_from_every_source() -> None:
    """Nodes with the tag of the root count from every source, and their share is of all nodes."""
    model = parse(BRANCHES, functions=TWICE, domains=', "local" : 1')
    for node in all_nodes(model):
        if node.op_type in ("Exp", "Neg"):
            write_tag(node, NodeTag("/M", "", "merged"))
    coverage = measure_coverage(model)
    assert (2, 28.57) == (coverage.at_root, coverage.as_record()["at_root_percent"])
    assert 0.0 == Coverage(0, 0, {}).at_root_percent


@pytest.mark.parametrize("operator", ["Exp", "Add", "Relu"])
def test_coverage_detects_one_untagged_node_at_any_depth(operator: str) -> None:
    """A single untagged node at any depth makes the coverage incomplete."""
    model = parse(BRANCHES, functions=TWICE, domains=', "local" : 1')
    clear_tag(next(node for node in all_nodes(model) if node.op_type == operator))
    coverage = measure_coverage(model)
    assert (6, False) == (coverage.tagged, coverage.is_complete)
    assert 100 * 6 / 7 == pytest.approx(coverage.percent)


def test_coverage_counts_each_source() -> None:
    """Unused sources are absent."""
    model = parse(BRANCHES, functions=TWICE, domains=', "local" : 1')
    first, second, *_ = all_nodes(model)
    write_tag(first, NodeTag("/M", "", "root"))
    write_tag(second, NodeTag("/M", "", "merged"))
    assert {"root": 1, "merged": 1, "direct": 5} == dict(measure_coverage(model).sources)


def test_coverage_of_an_empty_graph_is_complete() -> None:
    """A model without nodes has no node without a tag."""
    empty = count_coverage([])
    assert (100.0, True) == (empty.percent, empty.is_complete)
