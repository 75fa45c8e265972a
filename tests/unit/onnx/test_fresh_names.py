"""New names that neither a graph nor its subgraphs contain."""

from __future__ import annotations

from graphs import parse
from winml.modelkit.onnx.fresh_names import FreshNames

BRANCHES = """m (float[2] x, bool c) => (float[2] y) <float[2] w = {0, 0}> {
    a = Add (x, w)
    y = If (c) <then_branch = t () => (float[2] u) <float[2] wi = {0, 0}> { u = Mul (a, wi) },
                else_branch = f () => (float[2] v) { v = Neg (a) }>
}"""


def test_fresh_name_is_the_wish_or_the_wish_with_a_number() -> None:
    """Names of inputs, initializers, outputs and nodes at every depth are known, and so are earlier new names."""
    model = parse(BRANCHES)
    names = FreshNames.of_graph(model.graph)
    taken = ["x", "w", "a", "u", "wi", "v", model.graph[0].name or ""]
    assert [f"{name}_2" for name in taken] == [names.take(name) for name in taken]
    assert ["w_3", "new", "new_2"] == [names.take(name) for name in ("w", "new", "new")]
