"""Reading of models without their weights, and refusals of other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from e2e.in_process import run_here
from graphs import parse
from winml.modelkit.errors import InputError, ModelPathError
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.files.reading import MIN_SKIPPED_BYTES, read_referring, read_structure

LARGE = MIN_SKIPPED_BYTES


def _model_with_large_tensors() -> onnx.ModelProto:
    """Return a model with large tensors in all positions, and a small one."""
    large = np.arange(LARGE, dtype=np.float32)
    branch = helper.make_graph(
        [helper.make_node("Identity", ["inner"], ["branch_out"])],
        "branch",
        [],
        [helper.make_tensor_value_info("branch_out", TensorProto.FLOAT, [LARGE])],
        [numpy_helper.from_array(large, "inner")],
    )
    nodes = [
        helper.make_node("Constant", [], ["constant"], value=numpy_helper.from_array(large, "value")),
        helper.make_node("If", ["condition"], ["chosen"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["chosen", "raw"], ["y"], name="/layer/Add"),
    ]
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(large, "sparse"),
        numpy_helper.from_array(np.arange(LARGE, dtype=np.int64), "indices"),
        [2 * LARGE],
    )
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("condition", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [LARGE])],
        [
            numpy_helper.from_array(large, "raw"),
            helper.make_tensor("floats", TensorProto.FLOAT, [LARGE], large.tolist()),
            helper.make_tensor("halves", TensorProto.FLOAT16, [LARGE], large.astype(np.float16)),
            helper.make_tensor("integers", TensorProto.INT64, [LARGE], list(range(LARGE))),
            helper.make_tensor("words", TensorProto.STRING, [LARGE], ["word"] * LARGE),
            numpy_helper.from_array(np.array([2, 3], np.int64), "small"),
        ],
        sparse_initializer=[sparse],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    helper.set_model_props(model, {"key": "v" * LARGE})
    return model


def _remove_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the expected structure, made by removing the values."""

    def strip(tensor: onnx.TensorProto) -> None:
        if tensor.ByteSize() >= MIN_SKIPPED_BYTES:
            for field in ("raw_data", "float_data", "int32_data", "int64_data"):
                tensor.ClearField(field)

    def strip_graph(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            strip(tensor)
        for sparse in graph.sparse_initializer:
            strip(sparse.values)
            strip(sparse.indices)
        for attribute in (attribute for node in graph.node for attribute in node.attribute):
            strip(attribute.t)
            if attribute.HasField("g"):
                strip_graph(attribute.g)

    copy = onnx.ModelProto.FromString(model.SerializeToString())
    strip_graph(copy.graph)
    return copy


def test_read_structure_keeps_all_fields_but_values_of_large_tensors(tmp_path: Path) -> None:
    """The structure is the model without the values of tensors of a page or more, at every depth."""
    path = tmp_path / "model.onnx"
    onnx.save(_model_with_large_tensors(), path)
    read = read_structure(path)
    assert _remove_values(_model_with_large_tensors()) == read
    assert read.ByteSize() < path.stat().st_size / 2


def test_read_structure_of_unpacked_values_skips_values(tmp_path: Path) -> None:
    """Values written one field each, as protobuf also allows, are left out as well."""
    tensor = onnx.TensorProto(dims=[LARGE], data_type=TensorProto.INT64, name="w").SerializeToString()
    tensor += b"\x38\x05" * LARGE  # field 7, a varint, LARGE times
    size = len(tensor)
    graph = b"\x2a" + bytes([size & 0x7F | 0x80, size >> 7 & 0x7F]) + tensor
    assert size < 1 << 14
    length = len(graph)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x0a\x3a" + bytes([length & 0x7F | 0x80, length >> 7 & 0x7F]) + graph)
    assert LARGE == len(onnx.load(path).graph.initializer[0].int64_data)
    assert [onnx.TensorProto(dims=[LARGE], data_type=7, name="w")] == list(read_structure(path).graph.initializer)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_read_structure_of_truncated_file_reports_the_truncation(tmp_path: Path, share: float) -> None:
    """An interrupted download is distinguished from a file of another kind."""
    content = _model_with_large_tensors().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(InputError, match="cut off"):
        read_structure(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"hello world\n", "ONNX file"),
        (b'{"model_type": "bert"}', "ONNX file"),
        (b"PK\x03\x04" + bytes(100), "ONNX file"),
        (bytes(5000), "ONNX file"),
        (b"\x08\x0a", "ONNX file"),
        (b"\xff" * 5000, "ONNX file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
    ],
)
def test_read_structure_of_another_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """The refusal is one sentence with the name of the file, for any bytes."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as caught:
        read_structure(path)
    assert str(path) in caught.value.message


def test_read_structure_with_damage_inside_is_refused(tmp_path: Path) -> None:
    """A damaged byte in a length raises an error for the user, not a traceback."""
    content = _model_with_large_tensors().SerializeToString()
    path = tmp_path / "model.onnx"
    graph_start = content.index(b"\x3a")
    refused = 0
    for offset in range(40):
        damaged = bytearray(content)
        damaged[graph_start + offset] ^= 0xFF
        path.write_bytes(damaged)
        try:
            read_structure(path)
        except InputError:
            refused += 1
    assert refused


def test_read_structure_of_messages_without_end_is_refused(tmp_path: Path) -> None:
    """Graphs inside graphs inside graphs end the reading, not the process."""
    inner = bytes(MIN_SKIPPED_BYTES)
    for _ in range(300):
        for key in (b"\x32", b"\x2a", b"\x0a"):  # graph in attribute in node in graph
            inner = key + _encode_varint(len(inner)) + inner
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x3a" + _encode_varint(len(inner)) + inner)
    with pytest.raises(InputError, match="ONNX file, or"):
        read_structure(path)


def _encode_varint(number: int) -> bytes:
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def test_read_structure_without_a_file_names_the_path(tmp_path: Path) -> None:
    """A missing file and a directory are wrong usage."""
    with pytest.raises(ModelPathError, match="no such"):
        read_structure(tmp_path / "missing.onnx")
    with pytest.raises(ModelPathError, match="directory"):
        read_structure(tmp_path)


def test_read_referring_records_the_offset_of_large_initializers(tmp_path: Path) -> None:
    """The bytes of an initializer are found at its offset; other tensors have their values."""
    model = _model_with_large_tensors()
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())

    referring = read_referring(path)

    found = [*referring.graph.initializer, *referring.graph.node[1].attribute[0].g.initializer]
    originals = [*model.graph.initializer, *model.graph.node[1].attribute[0].g.initializer]
    outside = 0
    for tensor, original in zip(found, originals, strict=True):
        place = {entry.key: entry.value for entry in tensor.external_data}
        if not place:
            assert tensor == original
            continue
        outside += 1
        assert place["location"] == path.name
        start, length = int(place["offset"]), int(place["length"])
        assert path.read_bytes()[start : start + length] == original.raw_data
    assert outside == sum(len(tensor.raw_data) >= MIN_SKIPPED_BYTES for tensor in originals)
    assert referring.graph.node[0] == model.graph.node[0]
    assert referring.graph.sparse_initializer == model.graph.sparse_initializer


def test_opset_of_the_long_domain_is_the_opset_of_the_graph(tmp_path: Path) -> None:
    """``ai.onnx`` is the empty domain, which ONNX Runtime reads, too; also in subgraphs."""
    model = parse(
        """m (float[2] x, bool c) => (float[2] y) { y = If (c) <
            then_branch = t () => (float[2] p) { p = Relu (x) },
            else_branch = e () => (float[2] q) { q = Neg (x) }> }""",
        opset=11,
    )
    proto = ir.to_proto(model)
    proto.opset_import[0].domain = "ai.onnx"
    proto.graph.node[0].domain = "ai.onnx"
    proto.graph.node[0].attribute[0].g.node[0].domain = "ai.onnx"
    onnx.save(proto, tmp_path / "model.onnx")
    loaded = load_by_reference(tmp_path / "model.onnx")
    assert {"": 11} == loaded.opset_imports
    assert {""} == {node.domain for node in loaded.graph.all_nodes()}
    assert 0 == run_here("optimize", "-m", tmp_path / "model.onnx", "-o", tmp_path / "new.onnx", "--opset", "17").code
