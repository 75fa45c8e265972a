"""Removal of identity nodes if their names allow it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphs import answer, operators, parse, tags
from winml.modelkit.normalize.passes import IdentityRemovalPass

X = np.array([1, -2], np.float32)


def _remove_identities(model: ir.Model) -> bool:
    return IdentityRemovalPass()(model).modified


def test_identity_between_nodes_and_before_an_output_is_removed() -> None:
    """The chain x → Identity → Relu → Identity → y becomes x → Relu → y, with the name of the output."""
    model = parse(
        "m (float[2] x) => (float[2] y) { a = Identity (x)  b = Relu (a)  c = Identity (b)  y = Identity (c) }"
    )
    before = answer(model, x=X)
    assert _remove_identities(model)
    assert ["Relu"] == operators(model)
    assert [("/M/Relu", "direct")] == tags(model)
    assert ["y"] == [value.name for value in model.graph.outputs]
    assert before == answer(model, x=X)
    assert not _remove_identities(model)


def test_transposition_without_a_moved_axis_is_removed() -> None:
    """Transpositions that move axes stay, also without a permutation: the default reverses all axes."""
    model = parse(
        "m (float[2, 2] x) => (float[2, 2] y) { a = Transpose <perm = [0, 1]> (x)  b = Relu (a)"
        "  c = Transpose <perm = [1, 0]> (b)  y = Transpose (c) }"
    )
    before = answer(model, x=np.outer(X, X))
    assert _remove_identities(model)
    assert ["Relu", "Transpose", "Transpose"] == operators(model)
    assert before == answer(model, x=np.outer(X, X))


def test_identity_in_a_branch_and_in_a_function_is_removed() -> None:
    """Subgraphs and functions are cleaned as well."""
    model = parse(
        """m (float[2] x, bool c) => (float[2] y)
        { y = If (c) <then_branch = t () => (float[2] p) { q = Identity (x)  p = f.Twice (q) },
                      else_branch = e () => (float[2] r) { r = Abs (x) }> }""",
        domains=', "f" : 1',
        functions='<domain: "f", opset_import: ["" : 17]> Twice (a) => (b) { i = Identity (a)  b = Add (i, a) }',
    )
    before = answer(model, x=X, c=True)
    assert _remove_identities(model)
    assert ["If", "Twice", "Abs", "Add"] == operators(model)
    assert before == answer(model, x=X, c=True)


@pytest.mark.parametrize(
    "body",
    [
        "m (float[2] x) => (float[2] y) { y = Identity (x) }",
        "m (float[2] x) => (float[2] y) <float[2] w = {0,0}> { y = Identity (w) }",
        "m (float[2] x) => (float[2] y, float[2] z) { y = Relu (x)  z = Identity (y) }",
        (
            "m (float[2] x, bool c) => (float[2] y) { a = Relu (x)  y = If (c) <"
            "then_branch = t () => (float[2] p) { p = Identity (a) },"
            " else_branch = e () => (float[2] q) { q = Identity (x) }> }"
        ),
    ],
    ids=["input", "initializer", "two outputs", "branch"],
)
def test_identity_that_makes_an_output_of_its_own_stays(body: str) -> None:
    """An output needs a node of its own graph, and no other output's."""
    model = parse(body)
    before = operators(model)
    assert not _remove_identities(model)
    assert before == operators(model)
