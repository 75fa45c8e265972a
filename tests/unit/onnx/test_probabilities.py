"""Outputs of a graph that are probabilities."""

from __future__ import annotations

from graphs import parse
from winml.modelkit.onnx.operators import probability_outputs


def test_outputs_of_sigmoid_and_softmax_are_probabilities_after_any_movement() -> None:
    """Values computed from probabilities, and values joined with others, are not probabilities."""
    model = parse("""m (float[2, 3] x)
        => (float[2, 3] s, float[3, 2] t, float[2, 6] c, float[2, 3] twice, float[2, 6] d) {
        s = Sigmoid (x)
        p = Softmax (x)
        t = Transpose <perm = [1, 0]> (p)
        c = Concat <axis = 1> (s, p)
        twice = Add (s, s)
        d = Concat <axis = 1> (s, x)
    }""")
    assert {"s", "t", "c"} == probability_outputs(model.graph)
