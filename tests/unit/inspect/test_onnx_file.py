"""Inspection of any ONNX file without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from winml.modelkit.errors import UsageError
from winml.modelkit.inspect.onnx_inspection import OnnxInspection, inspect_onnx
from winml.modelkit.onnx.module_costs import Cost

FLOAT = TensorProto.FLOAT


def _tag_node(node: onnx.NodeProto, tag: str) -> onnx.NodeProto:
    for key, value in {"winml.hierarchy.tag": tag, "winml.hierarchy.source": "direct"}.items():
        entry = node.metadata_props.add()
        entry.key, entry.value = key, value
    return node


def _make_weight(name: str, *shape: int, dtype: Any = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, dtype), name)


def _make_value(name: str, shape: list[Any] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _two_layer_model(batch: Any = 2) -> onnx.ModelProto:
    """Return two linear layers that share a bias; the second is quantized, and one node has no tag.

    ``/M/A``: hidden = x · a + bias; ``/M/B``: out = hidden · dequantized(b) + bias.
    """
    nodes = [
        _tag_node(helper.make_node("MatMul", ["x", "a"], ["xa"], name="/a/MatMul"), "/M/A"),
        _tag_node(helper.make_node("Add", ["xa", "bias"], ["hidden"], name="/a/Add"), "/M/A"),
        _tag_node(helper.make_node("DequantizeLinear", ["b", "scale"], ["bf"], name="/b/Dequantize"), "/M/B"),
        _tag_node(helper.make_node("MatMul", ["hidden", "bf"], ["hb"], name="/b/MatMul"), "/M/B"),
        _tag_node(helper.make_node("Add", ["hb", "bias"], ["sum"], name="/b/Add"), "/M/B"),
        helper.make_node("Mul", ["sum", "loose"], ["out"], name="Mul"),
    ]
    weights = [
        _make_weight("a", 4, 8), _make_weight("bias", 8), _make_weight("b", 8, 8, dtype=np.int8), _make_weight("scale"),
        _make_weight("loose", 1), _make_weight("unread", 3),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "main", [_make_value("x", [batch, 4])], [_make_value("out", [batch, 8])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="test", ir_version=10)
    helper.set_model_props(model, {"winml.model": '{"class": "M"}', "winml.odd": "{", "author": "ada"})
    return model


def _inspect_model(model: onnx.ModelProto, folder: Path, **options: Any) -> OnnxInspection:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return inspect_onnx(path, **options)


def test_inspect_onnx_describes_the_declarations_of_the_file(tmp_path: Path) -> None:
    """Versions, values, operators and our records are those of the file."""
    inspection = _inspect_model(_two_layer_model(batch="batch"), tmp_path).as_record()
    assert (10, {"ai.onnx": 17}, "test") == (
        inspection["ir_version"],
        inspection["opsets"],
        inspection["producer"]["name"],
    )
    assert [{"name": "x", "shape": ["batch", 4], "dtype": "float32"}] == inspection["inputs"]
    assert [{"name": "out", "shape": ["batch", 8], "dtype": "float32"}] == inspection["outputs"]
    assert {"MatMul": 2, "Add": 2, "DequantizeLinear": 1, "Mul": 1} == inspection["operators"]
    assert {"winml.model": {"class": "M"}, "winml.odd": "{"} == inspection["records"]
    assert {"author": "ada"} == inspection["metadata"]
    assert (tmp_path / "model.onnx").stat().st_size == inspection["size_bytes"]
    assert {"float32": (5, 44, 180), "int8": (1, 64, 64)} == {
        dtype: (group["count"], group["parameters"], group["size_bytes"])
        for dtype, group in inspection["initializers"]["by_dtype"].items()
    }


def test_inspect_onnx_charges_each_weight_once(tmp_path: Path) -> None:
    """A weight belongs to its reader's module, to the deepest common one of several, or to none."""
    inspection = _inspect_model(_two_layer_model(), tmp_path)
    assert {
        "/M": Cost(0, 8, 32, 0, 8, 32),
        "/M/A": Cost(2, 32, 128, 2 * 4 * 8, 32, 128),
        "/M/B": Cost(3, 64, 68, 2 * 8 * 8, 64, 68),
    } == {module.tag: module.own for module in inspection.modules}
    assert Cost(1, 4, 16, 0, 4, 16) == inspection.unclaimed
    assert Cost(5, 104, 228, 192, 104, 228) == inspection.modules[0].total
    assert Cost(6, 108, 244, 192, 108, 244) == inspection.total


def test_inspect_onnx_dynamic_shapes_leave_operations_unknown(tmp_path: Path) -> None:
    """An unknown size makes the count of a product's module unknown, and that of the modules around it."""
    inspection = _inspect_model(_two_layer_model(batch="batch"), tmp_path)
    assert [None, None, None] == [module.total.macs for module in inspection.modules]
    assert 0 == inspection.modules[0].own.macs
    assert inspection.total.macs is None


def test_inspect_onnx_selector_narrows_to_subtrees_with_their_nodes(tmp_path: Path) -> None:
    """A selector gives the named modules, all modules below, and their nodes."""
    inspection = _inspect_model(_two_layer_model(), tmp_path, selector="B")
    assert ["/M/B"] == [module.tag for module in inspection.modules]
    assert ["/b/Dequantize", "/b/MatMul", "/b/Add"] == [node.name for node in inspection.module_nodes]
    everything = _inspect_model(_two_layer_model(), tmp_path, selector="/M")
    assert 3 == len(everything.modules)
    assert 5 == len(everything.module_nodes)


def test_inspect_onnx_unmatched_selector_is_refused(tmp_path: Path) -> None:
    """A selector is also refused if the file has no tree."""
    with pytest.raises(UsageError, match="'/M/C'"):
        _inspect_model(_two_layer_model(), tmp_path, selector="/M/C")
    bare = helper.make_model(helper.make_graph([], "main", [], []))
    with pytest.raises(UsageError, match="no module"):
        _inspect_model(bare, tmp_path, selector="M")


def test_inspect_onnx_record_has_the_same_keys_for_every_file(tmp_path: Path) -> None:
    """A program that reads one record can read all, and every record is JSON."""
    full = _inspect_model(_two_layer_model(), tmp_path, selector="M").as_record(with_hierarchy=True, with_weights=True)
    empty = _inspect_model(helper.make_model(helper.make_graph([], "", [], [])), tmp_path).as_record(
        with_hierarchy=False
    )
    assert list(full) == list(empty)
    assert json.loads(json.dumps(full)) == full
    assert json.loads(json.dumps(empty)) == empty


def _save_external(folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(_two_layer_model(), path, save_as_external_data=True, location="w.data", size_threshold=0)
    return path


def test_inspect_onnx_external_data_is_counted_and_never_opened(tmp_path: Path) -> None:
    """Sizes come from headers, so an unreadable data file gives the same result."""
    path = _save_external(tmp_path)
    expected = inspect_onnx(path)
    (tmp_path / "w.data").chmod(0)
    inspection = inspect_onnx(path)
    assert expected == inspection
    assert (244, ()) == (inspection.total.size_bytes, inspection.notes)
    assert path.stat().st_size + (tmp_path / "w.data").stat().st_size == inspection.size_bytes


def test_inspect_onnx_missing_or_short_data_file_is_noted(tmp_path: Path) -> None:
    """A note names the missing or truncated file, and the inspection goes on."""
    path = _save_external(tmp_path)
    data = tmp_path / "w.data"
    data.write_bytes(b"short")
    assert f"data file {data} is cut off: it has 5 bytes" in inspect_onnx(path).notes[0]
    data.unlink()
    inspection = inspect_onnx(path)
    assert [f"data file {data} is missing: it contains 6 of the weights"] == [*inspection.notes]
    assert (None, 244) == (inspection.files[1].size_bytes, inspection.total.size_bytes)


def test_inspect_onnx_counts_the_files_of_compiled_parts(tmp_path: Path) -> None:
    """They are listed once each, after the data files; a missing file is noted."""
    nodes = [
        helper.make_node(
            "EPContext", [name], [output], domain="com.microsoft", embed_mode=0, ep_cache_context="context.data"
        )
        for name, output in (("x", "h"), ("h", "y"))
    ]
    graph = helper.make_graph(nodes, "compiled", [_make_value("x", [2])], [_make_value("y", [2])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), tmp_path / "model.onnx")
    (context := tmp_path / "context.data").write_bytes(b"compiled")
    inspection = inspect_onnx(tmp_path / "model.onnx")
    assert [context] == [file.path for file in inspection.files[1:]]
    assert (tmp_path / "model.onnx").stat().st_size + 8 == inspection.size_bytes
    context.unlink()
    assert f"data file {context} is missing: it contains compiled parts" in inspect_onnx(tmp_path / "model.onnx").notes


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "C:\\secret", ""])
def test_inspect_onnx_data_file_outside_the_folder_is_not_looked_at(tmp_path: Path, location: str) -> None:
    """A model file cannot make the command look at files elsewhere."""
    model = _two_layer_model()
    tensor = model.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    inspection = _inspect_model(model, tmp_path)
    assert 1 == len(inspection.files)
    assert "not read" in inspection.notes[0]


def test_inspect_onnx_subgraphs_and_functions_count_and_their_runs_do_not(tmp_path: Path) -> None:
    """Nodes and weights of subgraphs and functions count once.

    The number of runs is unknown, and so is the number of products.
    """
    branch = helper.make_graph(
        [_tag_node(helper.make_node("MatMul", ["x", "w"], ["b"], name="/c/MatMul"), "/M/C")],
        "branch", [], [_make_value("b", [2, 4])], [_make_weight("w", 4, 4)],
    )  # fmt: skip
    plain = helper.make_function(
        "local", "Twice", ["v"], ["w"], [helper.make_node("Add", ["v", "v"], ["w"])], [helper.make_opsetid("", 17)]
    )
    square = helper.make_function(
        "local", "Square", ["v"], ["w"], [helper.make_node("MatMul", ["v", "v"], ["w"])], [helper.make_opsetid("", 17)]
    )
    nodes = [
        _tag_node(
            helper.make_node("If", ["condition"], ["y"], name="/If", then_branch=branch, else_branch=branch), "/M"
        ),
        _tag_node(helper.make_node("Twice", ["y"], ["z"], name="/Twice", domain="local"), "/M/T"),
        _tag_node(helper.make_node("Square", ["z"], ["out"], name="/Square", domain="local"), "/M/S"),
    ]
    graph = helper.make_graph(
        nodes,
        "main",
        [_make_value("condition", [], TensorProto.BOOL), _make_value("x", [2, 4])],
        [_make_value("out", None)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    inspection = _inspect_model(helper.make_model(graph, opset_imports=opsets, functions=[plain, square]), tmp_path)
    assert (7, 2, {"local.Twice": 1, "local.Square": 1}) == (
        inspection.total.nodes,
        inspection.subgraph_nodes,
        inspection.functions,
    )
    macs = {module.tag: module.own.macs for module in inspection.modules}
    assert {"/M": 0, "/M/C": None, "/M/T": 0, "/M/S": None} == macs
    assert 32 == next(module.own.parameters for module in inspection.modules if module.tag == "/M/C")
    assert 2 == inspection.unclaimed.nodes


def test_inspect_onnx_newer_versions_are_described_with_a_note(tmp_path: Path) -> None:
    """A file of a future version is described as far as possible."""
    model = _two_layer_model()
    model.ir_version = 99
    model.opset_import[0].version = 999
    inspection = _inspect_model(model, tmp_path)
    assert [
        f"IR version 99 is newer than {onnx.IR_VERSION}, the newest that the installed onnx supports",
        f"opset 999 is newer than {onnx.defs.onnx_opset_version()}, the newest that the installed onnx supports",
    ] == [*inspection.notes[:2]]
    assert 6 == inspection.total.nodes


def test_inspect_onnx_repeated_metadata_keys_are_noted(tmp_path: Path) -> None:
    """A file that onnx.checker rejects is described, with a note."""
    model = _two_layer_model()
    model.metadata_props.add(key="author", value="bob")
    model.graph.node[0].metadata_props.add(key="winml.hierarchy.tag", value="/M/B")
    inspection = _inspect_model(model, tmp_path)
    notes = inspection.notes
    assert 1 == next(module.own.nodes for module in inspection.modules if module.tag == "/M")
    assert notes[0].startswith("the model's metadata has author more than once, which onnx.checker rejects")
    assert notes[1].startswith("1 node(s) have a metadata key more than once")


def test_inspect_onnx_non_tensor_values_are_named(tmp_path: Path) -> None:
    """A sequence, an unknown rank, an unnamed dimension, and an initializer among the inputs are named."""
    sequence = helper.make_tensor_sequence_value_info("list", FLOAT, None)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "main",
        [sequence, _make_value("x", None), _make_value("n", [None, 3]), _make_value("w", [2])],
        [_make_value("y", None)], [_make_weight("w", 2)],
    )  # fmt: skip
    inspection = _inspect_model(helper.make_model(graph), tmp_path)
    assert [("list", "sequence", None), ("x", "float32", None), ("n", "float32", (None, 3))] == [
        (value.name, value.dtype, value.shape) for value in inspection.inputs
    ]


@pytest.mark.parametrize(
    ("data_type", "count", "expected"),
    [
        (TensorProto.INT4, 5, 3), (TensorProto.UINT2, 5, 2), (TensorProto.BOOL, 5, 5), (TensorProto.BFLOAT16, 5, 10),
        (TensorProto.FLOAT8E4M3FN, 5, 5), (TensorProto.COMPLEX64, 5, 40), (TensorProto.DOUBLE, 5, 40), (999, 5, None),
    ],
)  # fmt: skip
def test_inspect_onnx_sizes_follow_from_type_and_shape(
    tmp_path: Path, data_type: int, count: int, expected: int | None
) -> None:
    """Bits are rounded up to whole bytes; an unknown type has an unknown size."""
    tensor = onnx.TensorProto(dims=[count], data_type=data_type, name="w")
    graph = helper.make_graph([], "main", [], [], [tensor])
    assert expected == _inspect_model(helper.make_model(graph), tmp_path).weights[0].size_bytes


def test_inspect_onnx_weight_constants_are_parameters_of_their_reading_module(tmp_path: Path) -> None:
    """Constants with weights count in a graph, a branch and a function.

    A shape, a scalar and an epsilon do not count.
    """

    def constant(name: str, values: Any, tag: str) -> onnx.NodeProto:
        array = np.asarray(values)
        return _tag_node(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)), tag)

    branch = helper.make_graph(
        [
            constant("kernel", np.ones((4, 4), np.float32), "/M/Inner"),
            _tag_node(helper.make_node("MatMul", ["x", "kernel"], ["inner"]), "/M/Inner"),
        ],
        "then", [], [_make_value("inner", None)],
    )  # fmt: skip
    held = constant("held", np.ones((2, 4), np.float32), "/M/Other")
    direct = helper.make_graph([held], "else", [], [_make_value("held", None)])
    nodes = [
        constant("scale", np.ones(4, np.float32), "/M"),
        constant("epsilon", np.float32(1e-5), "/M"),
        constant("shape", np.asarray([2, 4], np.int64), "/M"),
        _tag_node(helper.make_node("If", ["c"], ["chosen"], then_branch=branch, else_branch=direct), "/M"),
        _tag_node(helper.make_node("Mul", ["chosen", "scale"], ["scaled"]), "/M/Scale"),
        _tag_node(helper.make_node("Reshape", ["scaled", "shape"], ["y"]), "/M"),
    ]  # fmt: skip
    inputs = [_make_value("x", [2, 4]), _make_value("c", [], TensorProto.BOOL)]
    graph = helper.make_graph(nodes, "g", inputs, [_make_value("y", [2, 4])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    inspection = _inspect_model(model, tmp_path)
    assert 16 + 8 + 4 == inspection.total.parameters
    own = {module.tag: module.own.parameters for module in inspection.modules}
    assert {"/M/Inner": 16, "/M/Other": 8, "/M/Scale": 4} == {tag: own[tag] for tag in own if own[tag]}
