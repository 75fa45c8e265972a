"""A new name is one that neither the graph nor its subgraphs have."""

from __future__ import annotations

from graphs import parse
from winml.modelkit.onnx.fresh_names import FreshNames

BRANCHES = """m (float[2] x, bool c) => (float[2] y) <float[2] w = {0, 0}> {
    a = Add (x, w)
    y = If (c) <then_branch = t () => (float[2] u) <float[2] wi = {0, 0}> { u = Mul (a, wi) },
                else_branch = f () => (float[2] v) { v = Neg (a) }>
}"""


def test_fresh_name_is_the_wish_or_the_wish_with_a_number() -> None:
    """Inputs, initializers, outputs and nodes are known at every depth, and so is what was given before."""
    model = parse(BRANCHES)
    names = FreshNames.of_graph(model.graph)
    taken = ["x", "w", "a", "u", "wi", "v", model.graph[0].name or ""]
    assert [f"{name}_2" for name in taken] == [names.take(name) for name in taken]
    assert ["w_3", "new", "new_2"] == [names.take(name) for name in ("w", "new", "new")]
