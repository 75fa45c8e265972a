"""Modules as functions: selection, content, and reading of files with functions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphs import answer, parse
from winml.modelkit.errors import InputError
from winml.modelkit.metadata_keys import FUNCTION_DOMAIN, FUNCTIONS_KEY
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.onnx.function_folding import FoldedModel, Sharing, fold_modules
from winml.modelkit.onnx.function_inlining import graph_digest, restore_recorded
from winml.modelkit.tags.selector import ModuleAddress
from winml.modelkit.tags.tagging import NodeTag, read_tag, write_tag

X = np.array([1.0, -2.0], np.float32)

LAYERS = """layers (float[2] x) => (float[2] y) <float[2] w0 = {0, 0}, float[2] w1 = {0, 0}, float[2] w2 = {0, 0}> {
  a = Add (x, w0)
  b = Tanh (a)
  c = Add (b, w1)
  d = Tanh (c)
  e = Mul (d, w2)
  y = Tanh (e)
}"""
"""Two equal layers with different weights, and a different third layer."""


def _tagged(body: str, modules: dict[str, tuple[str, str]], *, functions: str = "", domains: str = "") -> ir.Model:
    """Return a graph of nodes with the tag and module path of their output; others have the tag of the root."""
    model = parse(body, functions=functions, domains=domains)
    for node in model.graph.all_nodes():
        tag, path = modules.get(str(node.outputs[0].name), ("/M", ""))
        scope = f"/{path}" if path else ""
        node.name = f"{scope}/{node.op_type}_{node.outputs[0].name}"
        write_tag(node, NodeTag(tag, path, "direct"))
    return model


def _fold(model: ir.Model, sharing: Sharing = "none") -> FoldedModel:
    tags = dict.fromkeys((tag.tag, tag.module) for node in model.graph.all_nodes() if (tag := read_tag(node)))
    return fold_modules(
        model, [ModuleAddress(path, tag, tag.rpartition("/")[2].partition(".")[0]) for tag, path in tags], sharing
    )


def _layers() -> ir.Model:
    layers = {value: f"/M/Layer.{number}" for number, values in enumerate(("ab", "cd", "ey")) for value in values}
    return _tagged(LAYERS, {value: (tag, f"layer.{tag[-1]}") for value, tag in layers.items()})


def test_equal_layers_share_a_function_and_weights_are_its_inputs() -> None:
    """The layer that computes something else has a function of its own."""
    folded = _fold(_layers(), "class")
    assert {"Layer": 2, "Layer_2": 1} == folded.functions
    calls = [
        (node.domain, node.op_type, node.name, [value.name for value in node.inputs if value])
        for node in folded.model.graph
    ]
    assert [
        (FUNCTION_DOMAIN, "Layer", "/layer.0", ["x", "w0"]),
        (FUNCTION_DOMAIN, "Layer", "/layer.1", ["b", "w1"]),
        (FUNCTION_DOMAIN, "Layer_2", "/layer.2", ["d", "w2"]),
    ] == calls
    assert answer(_layers(), x=X) == answer(folded.model, x=X)


def test_call_has_the_tag_and_a_shared_body_is_relative() -> None:
    """Inlining by another tool gives every node the tag of its own layer."""
    model = _fold(_layers(), "class").model
    tags = [tag.tag for node in model.graph if (tag := read_tag(node))]
    assert ["/M/Layer.0", "/M/Layer.1", "/M/Layer.2"] == tags
    body = model.functions[FUNCTION_DOMAIN, "Layer", ""]
    assert [None, None] == [read_tag(node) for node in body]
    assert ["/Add_a", "/Tanh_b"] == [node.name for node in body]


def test_each_module_has_a_function_named_by_its_tag() -> None:
    """Nodes inside have their own tags if no function is shared."""
    folded = _fold(_layers())
    assert {"M.Layer.0": 1, "M.Layer.1": 1, "M.Layer.2": 1} == folded.functions
    body = folded.model.functions[FUNCTION_DOMAIN, "M.Layer.1", ""]
    assert ["/M/Layer.1", "/M/Layer.1"] == [tag.tag for node in body if (tag := read_tag(node))]


def test_functions_of_modules_call_functions_of_inner_modules() -> None:
    """An inner module is a call in the function of the outer module."""
    modules = {"a": ("/M/A", "a"), "b": ("/M/A/B", "a.b"), "c": ("/M/A", "a")}
    folded = _fold(_tagged(LAYERS, modules))
    assert {"M.A": 1, "M.A.B": 1} == folded.functions
    outer = folded.model.functions[FUNCTION_DOMAIN, "M.A", ""]
    assert ["Add", "M.A.B", "Add"] == [node.op_type for node in outer]
    assert 1 == outer.opset_imports[FUNCTION_DOMAIN]


def test_module_with_a_node_of_another_one_between_is_left_out() -> None:
    """The reason names the node."""
    (left_out,) = _fold(_tagged(LAYERS, {"a": ("/M/A", "a"), "c": ("/M/A", "a")})).plan.left_out[1:]
    assert "/Tanh_b (Tanh)" in left_out.reason


def test_function_contains_most_nodes_if_few_are_separate() -> None:
    """The first node is needed before a node of another module, so the function has the remaining four."""
    folded = _fold(_tagged(LAYERS, dict.fromkeys("acdey", ("/M/A", "a"))))
    (part,) = folded.plan.all_parts
    assert (["/a/Add_a"], 4) == ([node.name for node in part.outside], len(part.nodes))
    assert {"M.A": 1} == folded.functions


LOOP = """loop (int64 n, bool p, float[2] x) => (float[2] y) {
  a = Neg (x)
  y = Loop (n, p, a) <body = step (int64 i, bool q, float[2] s) => (bool r, float[2] t) {
    r = Identity (q)
    u = Tanh (s)
    t = Add (u, x)
  }>
}"""


def test_module_inside_a_loop_body_is_left_out_and_its_parent_is_a_function() -> None:
    """A call outside a subgraph cannot replace nodes inside the subgraph."""
    model = _tagged(LOOP, {"y": ("/M/A", "a"), "": ("/M/A", "a"), "u": ("/M/A/B", "a.b"), "t": ("/M/A/B", "a.b")})
    folded = _fold(model)
    assert {"M.A": 1} == folded.functions
    feeds = {"n": 3, "p": True, "x": X}
    assert answer(model, **feeds) == answer(folded.model, **feeds)
    reasons = {item.module.tag: item.reason for item in folded.plan.left_out}
    assert "Loop" in reasons["/M/A/B"]


FOREIGN = """<domain: "other", opset_import: ["" : 17]> Twice (v) => (z) { z = Add (v, v) }"""


def test_foreign_functions_stay_functions() -> None:
    """Such functions are called from functions of modules and are still in the model after folding."""
    body = "g (float[2] x) => (float[2] y) { a = other.Twice (x) b = Tanh (a) y = Neg (b) }"
    model = _tagged(body, {"a": ("/M/A", "a"), "b": ("/M/A", "a")}, functions=FOREIGN, domains=', "other" : 1')
    folded = _fold(model)
    assert {"M.A": 1} == folded.functions
    assert answer(model, x=X) == answer(folded.model, x=X)
    assert ("other", "Twice", "") in folded.model.functions


@pytest.fixture
def functions_file(tmp_path: Path) -> Path:
    """A file with functions."""
    path = tmp_path / "functions.onnx"
    write_model(_fold(_layers(), "class").model, path)
    return path


def test_file_with_functions_is_read_as_its_original_graph(functions_file: Path) -> None:
    """Functions are visible only in the file as written."""
    structure = read_structure(functions_file)
    assert [node.name for node in _layers().graph] == [node.name for node in structure.graph.node]
    assert not structure.functions
    assert 2 == len(read_structure(functions_file, as_written=True).functions)


@pytest.mark.parametrize("damage", ["relative", "cycle", "output"])
def test_damaged_functions_are_refused_in_words(functions_file: Path, damage: str) -> None:
    """No error of a library reaches the user."""
    model = read_structure(functions_file, as_written=True)
    function = model.functions[0]
    if damage == "relative":
        (entry,) = (item for item in function.node[0].metadata_props if item.key == "winml.function.relative")
        entry.value = "{"
    elif damage == "cycle":
        function.node.add(op_type=function.name, domain=function.domain, input=["a"], output=["b"])
    else:
        function.output[0] = "nothing"
    functions_file.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="a graph"):
        read_structure(functions_file)


def _names(model: ir.Model) -> list[tuple[str | None, list[str | None]]]:
    return [(node.name, [value.name for value in node.outputs]) for node in model.graph]


@pytest.mark.parametrize("other", ["wiring", "node name", "value name", "domain", "nothing"])
def test_record_is_not_used_once_another_tool_changed_more_than_metadata(other: str) -> None:
    """Operators in the same order are not yet the same graph."""
    model = _layers()
    record = {"graph": graph_digest(model), "changes": {"0": {"name": "recorded"}}}
    first, second = list(model.graph)[:2]
    if other == "wiring":
        second.replace_input_with(0, model.graph.inputs[0])
    elif other == "node name":
        second.name = "renamed"
    elif other == "value name":
        first.outputs[0].name = "renamed"
    elif other == "domain":
        second.domain = "another"
    model.metadata_props[FUNCTIONS_KEY] = json.dumps(record)
    restore_recorded(model)
    assert (first.name == "recorded") is (other == "nothing")


@pytest.mark.parametrize(
    "damage",
    [
        {"changes": []},
        {"changes": {"99": {}}},
        {"changes": {"-1": {"name": "x"}}},
        {"changes": {"one": {}}},
        {"changes": {"0": None}},
        {"changes": {"0": {"outputs": 3}}},
        {"changes": {"0": {"outputs": ["x", "y"]}}},
        {"changes": {"0": {"outputs": ["c"]}}},
        {"changes": {"0": {"outputs": ["x"]}, "1": {"metadata": {"key": 1}}}},
        {"changes": {"0": {"name": "x"}}, "order": [[0, 10**12]]},
        {"order": 1},
        {"order": [[0]]},
        {"order": [["0", "6"]]},
        {"order": [[3, 3], [0, 3]]},
    ],
    ids=str,
)
def test_damaged_record_has_no_effect(damage: dict[str, object]) -> None:
    """The record is validated as a whole before use."""
    model = _layers()
    model.metadata_props[FUNCTIONS_KEY] = json.dumps({"graph": graph_digest(model), **damage})
    restore_recorded(model)
    assert _names(_layers()) == _names(model)
