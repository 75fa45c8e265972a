"""Comparison of two files with the same values; bfloat16 graphs run in float32."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from winml.modelkit import compare_models
from winml.modelkit.compare.files import refuse_different
from winml.modelkit.errors import InputError, UsageError, VerificationError

BFLOAT16 = "bfloat16[rows, 4]"


def _save(path: Path, weight: float, operator: str = "Mul") -> Path:
    """Save a product, for which ONNX Runtime's CPU provider has no kernel in bfloat16."""
    graph = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 17]> g ({BFLOAT16} x) => ({BFLOAT16} y) {{ y = {operator} (x, w) }}'
    )
    values = np.full(4, weight, ml_dtypes.bfloat16)
    graph.graph.initializer.append(ir.to_proto(ir.tensor(values, name="w")))
    onnx.save(graph, path)
    return path


def test_files_in_bfloat16_are_compared_in_float32(tmp_path: Path) -> None:
    """ONNX Runtime cannot run them in bfloat16; the comparison says that it was in float32."""
    verification = refuse_different(_save(tmp_path / "a.onnx", 2), _save(tmp_path / "b.onnx", 0.5, "Div"), seed=0)
    assert verification.in_float32
    assert all(item.is_equal for item in verification.comparisons)


@pytest.mark.parametrize("weight", [3.015625, 4.0], ids=["last bit", "another"])
def test_another_weight_in_bfloat16_is_seen(tmp_path: Path, weight: float) -> None:
    """One step of bfloat16 beside 3 is 0.5 %."""
    with pytest.raises(VerificationError, match="the outputs of the result differ"):
        refuse_different(_save(tmp_path / "a.onnx", 3), _save(tmp_path / "b.onnx", weight), seed=0)


def _save_dropout(path: Path, scale: float) -> Path:
    """Save a graph that draws random numbers in every run."""
    onnx.save(
        onnx.parser.parse_model(
            f"""<ir_version: 9, opset_import: ["" : 17]> g (float[64, 8] x) => (float[64, 8] y)
            <float ratio = {{0.5}}, bool training = {{1}}, float scale = {{{scale}}}> {{
                a = Dropout (x, ratio, training)
                y = Mul (a, scale)
            }}"""
        ),
        path,
    )
    return path


def test_graph_with_random_numbers_is_no_bug(tmp_path: Path) -> None:
    """No file can equal a reference that differs from itself."""
    with pytest.raises(VerificationError, match=r"of a\.onnx differs between two runs on the same inputs") as raised:
        refuse_different(_save_dropout(tmp_path / "a.onnx", 1), _save_dropout(tmp_path / "b.onnx", 1), seed=0)
    assert "report" not in raised.value.hint
    assert "evaluation mode" in raised.value.hint
    with pytest.raises(UsageError, match=r"random numbers: .*\(Dropout\)"):
        compare_models(tmp_path / "a.onnx", tmp_path / "a.onnx")


def test_values_that_only_the_pinned_file_refuses_are_not_replaced(tmp_path: Path) -> None:
    """A table that lost its last row accepts zeros, which would hide the loss."""
    graphs = ("rows", "float[2] t = {1, 2}"), ("8", "float[1] t = {1}")
    for name, (size, table) in zip("ab", graphs, strict=True):
        text = f"g (int64[{size}] i) => (float[{size}] y) <{table}> {{ y = Gather (t, i) }}"
        onnx.save(
            onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> {text}'), tmp_path / f"{name}.onnx"
        )
    with pytest.raises(VerificationError, match="the result does not run"):
        refuse_different(tmp_path / "a.onnx", tmp_path / "b.onnx", seed=0, has_fixed_sizes=True)


def test_stale_shape_in_the_source_is_named(tmp_path: Path) -> None:
    """ONNX Runtime runs a file whose value_info is wrong; a transformation that believes it fails."""
    text = '<ir_version: 10, opset_import: ["" : 17]> g (float[N, 4] x) => (float[N, 4] y) <{}> {{ {} y = Abs (r) }}'
    for name, constant, body in (
        ("a", "float[2, 4] r", "r = Relu (x)"),
        ("b", "float[2, 4] r, int64[2] s = {2, 4}", "f = Relu (x) r = Reshape (f, s)"),
    ):
        onnx.save(onnx.parser.parse_model(text.format(constant, body)), tmp_path / f"{name}.onnx")
    with pytest.raises(InputError, match=r"declares \[2, 4\] for value r"):
        refuse_different(tmp_path / "a.onnx", tmp_path / "b.onnx", seed=0, sizes={"N": 3})
