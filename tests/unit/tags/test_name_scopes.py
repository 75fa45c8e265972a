"""Module paths from node names, including names changed by tools."""

from __future__ import annotations

import pytest

from winml.modelkit.tags.dialects import name_scope


@pytest.mark.parametrize(
    ("name", "op_type", "scope"),
    [
        ("/encoder/layer.0/MatMul", "MatMul", ("encoder", "layer.0")),
        ("/encoder/layer.0/MatMul_12", "MatMul", ("encoder", "layer.0")),
        ("/encoder/MatMul/MatMulAddFusion", "Gemm", ("encoder",)),
        ("/encoder/MatMul_1/MatMulScaleFusion/", "FusedMatMul", ("encoder",)),
        ("/encoder/MatMul_output_0", "Gemm", ("encoder",)),
        ("/encoder/Reshape_new_reshape", "Reshape", ("encoder",)),
        ("fused /pooler/dense/Gemm", "FusedGemm", ("pooler", "dense")),
        ("/Conv/Conv", "Conv", ("Conv",)),
        ("/Add", "Add", ()),
        ("MatMul_7", "MatMul", ()),
        ("", "Relu", ()),
        ("/", "Relu", ()),
    ],
)
def test_name_scope_contains_modules_only(name: str, op_type: str, scope: tuple[str, ...]) -> None:
    """Suffixes that a tool added to an operator's name are no module; a module may have the name of an operator."""
    assert scope == name_scope(name, op_type)
