"""Output of an inspected ONNX file, complete for any names."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from winml.modelkit.inspect.onnx_inspection import inspect_onnx
from winml.modelkit.inspect.onnx_table import onnx_inspection_document
from winml.modelkit.report.module_tree import TreeLimits
from winml.modelkit.report.terminal import console_for, print_document


def _file(folder: Path, scope: str = "/encoder/layer.0", batch: Any = 2, operators: int = 0) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name=f"{scope}/MatMul")]
    nodes += [
        helper.make_node(operator, ["y"], [f"y_{operator}"])
        for operator in ("Abs", "Acos", "Asin", "Atan", "Ceil", "Cos", "Erf", "Exp", "Floor", "Log")[:operators]
    ]
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 8])],
        [numpy_helper.from_array(np.ones((4, 8), np.float32), "w[0]")],
    )
    graph.node[0].input[1] = "w[0]"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    helper.set_model_props(model, {"author": "ada"})
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def _print(
    path: Path, *, selector: str | None = None, with_hierarchy: bool = False, verbose: bool = False
) -> list[str]:
    stream = io.StringIO()
    document = onnx_inspection_document(inspect_onnx(path, selector=selector), TreeLimits() if with_hierarchy else None)
    print_document(document, console_for(stream), verbose=verbose)
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_print_onnx_inspection_has_one_fact_per_line(tmp_path: Path) -> None:
    """A reader of a pipe finds each fact by the first word of its line."""
    path = _file(tmp_path)
    assert [
        f"file {path} ({path.stat().st_size} B)",
        "format IR version 10 · ai.onnx opset 17",
        "producer does not say",
        "inputs x float32[2, 4]",
        "outputs y float32[2, 8]",
        "initializers 1, 32 values, 128 B: float32 32 (128 B) · 32 bits a parameter",
        "nodes 1",
        "operators MatMul 1",
        "MACs 64",
        "metadata author",
        "hierarchy from node names · 1 of 1 nodes (100 %), none at the root",
        "sources node names 1",
    ] == _print(path)


def test_print_onnx_inspection_hierarchy_indents_modules_with_total_and_own(tmp_path: Path) -> None:
    """A module stands below its parent, with its own count after the total."""
    lines = _print(_file(tmp_path), with_hierarchy=True)
    assert [
        "module path nodes own parameters own size own bits own MACs own",
        "main 1 0 32 0 128 B 0 B 32 – 64 0",
        "encoder encoder 1 0 32 0 128 B 0 B 32 – 64 0",
        "layer.0 encoder.layer.0 1 1 32 32 128 B 128 B 32 32 64 64",
    ] == lines[lines.index("") + 1 :]


def test_print_onnx_inspection_unknown_is_marked_and_never_zero(tmp_path: Path) -> None:
    """A dimension without a size makes the number of operations unknown."""
    lines = _print(_file(tmp_path, batch="batch"), with_hierarchy=True)
    assert "MACs unknown: a shape they depend on is not static, or an operator is foreign" in lines
    assert lines[-1].endswith("128 B 128 B 32 32 ? ?")


def test_print_onnx_inspection_verbose_prints_all_rows(tmp_path: Path) -> None:
    """The option prints all operators, other metadata and each initializer; without it the rest is counted."""
    path = _file(tmp_path, operators=10)
    brief, verbose = _print(path), _print(path, verbose=True)
    assert any(line.endswith("and 3 others") for line in brief)
    assert any(line.startswith("operators MatMul 1, Abs 1") and line.endswith("Log 1") for line in verbose)
    assert "author ada" in verbose
    assert "w[0] float32[4, 8] 128 B" == verbose[-1]


def test_print_onnx_inspection_selector_lists_nodes(tmp_path: Path) -> None:
    """Inputs and outputs of a module's nodes are printed; names with brackets stay whole."""
    lines = _print(_file(tmp_path, scope="/a[red]/b"), selector="**/b", with_hierarchy=True)
    assert "b a[red].b 1 1 32 32 128 B 128 B 32 32 64 64" in lines
    assert "/a[red]/b/MatMul MatMul /main/a[red]/b x, w[0] y 64" == lines[-1]


def test_print_onnx_inspection_of_an_empty_graph_has_all_lines(tmp_path: Path) -> None:
    """A graph without nodes and modules has all lines."""
    path = tmp_path / "empty.onnx"
    onnx.save(helper.make_model(helper.make_graph([], "main", [], [])), path)
    lines = _print(path, with_hierarchy=True, verbose=True)
    assert {"inputs none", "outputs none", "nodes 0", "initializers 0, 0 values, 0 B", "MACs 0"} <= {*lines}
    assert "hierarchy none: no node says which module it came from" == lines[-1]
