"""Kinds of values from the structure of a graph, whatever its names, and the bits of activations by kind."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from graphs import parse
from weighted_graphs import weight
from winml.modelkit.quantize.value_kinds import classify_nodes, find_score_projections

_MATRICES = ", ".join(weight(f"w_{name}", 8, 8) for name in "qkvoud")
_LAYER = f"""m (float[1, 4, 8] x, float[1, 1, 4] mask) => (float[1, 4, 8] y) <{_MATRICES},
    float[8] b = {{0, 0, 0, 0, 0, 0, 0, 0}}, float[8] g = {{1, 1, 1, 1, 1, 1, 1, 1}}, float root = {{2.8}}> {{
    n = LayerNormalization (x, g, b)
    qp = MatMul (n, w_q) q = Add (qp, b)
    k = MatMul (n, w_k) kt = Transpose <perm = [0, 2, 1]> (k)
    v = MatMul (n, w_v)
    s = MatMul (q, kt) sd = Div (s, root) sm = Add (sd, mask) p = Softmax (sm)
    c = MatMul (p, v) ct = Transpose <perm = [0, 2, 1]> (c) cr = Transpose <perm = [0, 2, 1]> (ct)
    o = MatMul (cr, w_o) ob = Add (o, b) r = Add (ob, x)
    u = MatMul (r, w_u) a = Gelu (u) d = MatMul (a, w_d) y = Add (d, r) }}"""


def _kinds_by_output(model: ir.Model) -> dict[str, str]:
    """Name of a computed value → its kind."""
    for number, node in enumerate(model.graph):
        node.name = f"node_{number}"
    kinds = classify_nodes(model)
    return {node.outputs[0].name or "": kinds[node.name or ""] for node in model.graph}


def test_values_of_an_encoder_layer_have_the_kind_of_their_place() -> None:
    """Products with weights belong to what reads them: an attention, a sum or a function."""
    kinds = _kinds_by_output(parse(_LAYER, opset=20))
    assert dict.fromkeys(("kt", "s", "sd", "sm", "p", "c", "ct", "cr"), "attention") == {
        name: kind for name, kind in kinds.items() if kind == "attention"
    }
    assert dict.fromkeys(("qp", "q", "k", "v"), "projection") == {
        name: kind for name, kind in kinds.items() if kind == "projection"
    }
    rest = {"n": "normalization", "u": "intermediate", "a": "function"}
    assert {**rest, **dict.fromkeys(("o", "ob", "r", "d", "y"), "residual")} == {
        name: kind for name, kind in kinds.items() if kind not in ("attention", "projection")
    }


@pytest.mark.parametrize(
    ("scaled", "expected"),
    [
        ("sd = Div (s, root) sm = Add (sd, mask)", {}),
        ("sm = Add (s, mask)", {"s": ["qp", "k"]}),
        ("sd = Add (s, b4) sm = Where (few, sd, mask)", {"s": ["qp", "k"]}),
    ],
)
def test_projections_of_unscaled_scores_are_found(scaled: str, expected: dict[str, list[str]]) -> None:
    """Biases and masks are added to scores; those that are divided, as in most models, are left out."""
    body = _LAYER.replace("sd = Div (s, root) sm = Add (sd, mask)", scaled)
    body = body.replace("mask)", "mask, bool[1, 4, 4] few, float[1, 4, 4] b4)", 1)
    found = find_score_projections(parse(body, opset=20))
    assert expected == {name: [node.outputs[0].name for node in nodes] for name, nodes in found.items()}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # A classifier: its softmax is no attention.
        ("h = MatMul (x, w) y = Softmax (h)", {"h": "intermediate", "y": "other"}),
        # A normalization of single operators, as below opset 23.
        (
            ("p = Pow (x, two) m = ReduceMean <axes = [-1]> (p) e = Add (m, two) r = Sqrt (e) d = Div (x, r)"
            " n = Mul (d, g) y = MatMul (n, w)"),
            {**dict.fromkeys("pmerdn", "normalization"), "y": "intermediate"},
        ),
        # A gate, whose result is a function.
        (
            ("u = MatMul (x, w) f = Sigmoid (u) s = Mul (u, f) o = MatMul (x, w) t = Mul (s, o) d = MatMul (t, w)"
            " y = Add (d, x)"),
            {"u": "intermediate", "f": "function", "s": "function", "o": "intermediate", "t": "function",
             "d": "residual", "y": "residual"},
        ),
        # Angles of rotary positions need all bits that there are.
        ("a = Mul (x, two) s = Sin (a) y = MatMul (s, w)", {"a": "position", "s": "position", "y": "intermediate"}),
    ],
)  # fmt: skip
def test_other_structures(body: str, expected: dict[str, str]) -> None:
    """Kinds of nodes outside of an attention."""
    constants = f"{weight('w', 8, 8)}, float[1] two = {{2}}, float[8] g = {{1, 1, 1, 1, 1, 1, 1, 1}}"
    text = f"m (float[1, 4, 8] x) => (float[1, 4, 8] y) <{constants}> {{ {body} }}"
    assert expected == _kinds_by_output(parse(text, opset=17))


def test_convolutions_are_a_kind_unless_they_are_added() -> None:
    """An activation that clips belongs to the layer before it."""
    constants = ", ".join([weight("w1", 4, 4, 1, 1), weight("w2", 4, 4, 1, 1)])
    text = f"""m (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) <{constants}> {{
        a = Conv (x, w1) r = Relu (a) b = Conv (r, w2) s = Add (b, x) y = Relu (s) }}"""
    kinds = _kinds_by_output(parse(text))
    assert {"a": "convolution", "r": "convolution", "b": "residual", "s": "residual", "y": "residual"} == kinds
