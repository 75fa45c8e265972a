"""Selection of nodes by module, from tags or node names."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from module_chains import save_chain
from winml.modelkit.errors import UsageError
from winml.modelkit.optimize.file_optimization import optimize_within
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.transform.module_functions import graph_modules, selected_nodes, source_notes


def _chain(tmp_path: Path, *, tagged: bool = True) -> ir.Model:
    return ir.load(save_chain(tmp_path / "chain.onnx", tagged=tagged))


def test_modules_of_a_graph_without_tags_are_read_from_names_with_a_note(tmp_path: Path) -> None:
    """A note says that modules come from names; modules from tags need no note."""
    assert [] == source_notes(graph_modules(_chain(tmp_path), "chain"))
    assert 1 == len(source_notes(graph_modules(_chain(tmp_path, tagged=False), "chain")))


def test_selected_nodes_belong_to_a_module_without_an_excluded_module(tmp_path: Path) -> None:
    """The modules below a module belong to the selection."""
    model = _chain(tmp_path)
    assert 3 == len(selected_nodes(model, ["/M/A.0"], [])[0])
    assert 2 == len(selected_nodes(model, ["/M/A.0"], ["/M/A.0/B"])[0])
    assert len(model.graph) - 3 == len(selected_nodes(model, [], ["/M/A.0"])[0])


def test_selection_that_leaves_no_node_is_refused(tmp_path: Path) -> None:
    """The same module is included and excluded."""
    with pytest.raises(UsageError, match="no node remains"):
        selected_nodes(_chain(tmp_path), ["/M/C"], ["/M/C"])


def test_optimizer_is_limited_to_the_selected_modules(tmp_path: Path) -> None:
    """The note counts the selected nodes; the optimizer needs the types of values between modules."""
    model = ir.passes.common.ShapeInferencePass()(_chain(tmp_path)).model
    result = optimize_within(model, OptimizeOptions(module=("/M/A.0",), gelu_fusion=True))
    assert "3 of 7" in result.notes[0]
