"""Fixing the dynamic dimensions of a file, with equal outputs."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from graphs import parse
from winml.modelkit import WinMLExportConfig, export_pytorch
from winml.modelkit.errors import InputError, ModelPathError, OutputExistsError, UsageError
from winml.modelkit.metadata_keys import TAG_KEY
from winml.modelkit.ort.graph_sessions import newest_ir_version
from winml.modelkit.transform.pin import pin_model


class Net(nn.Module):
    """A model with shapes computed in the graph while sizes are dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Flatten all axes after the first."""
        return self.linear(x).reshape(x.shape[0], x.shape[1] * 4)


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    """A file with two open dimensions."""
    config = WinMLExportConfig(dynamic_axes={"x": {0: "batch", 1: "tokens"}})
    return export_pytorch(Net(), tmp_path / "dynamic.onnx", torch.randn(2, 6, 4), config=config).only_part.model_path


def shape(value: onnx.ValueInfoProto) -> list[int | str]:
    """Return a declared shape."""
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_pinned_file_has_fixed_shapes_tags_and_metadata(dynamic: Path, tmp_path: Path) -> None:
    """Every size follows, nothing computes a shape, every node keeps its tag, and the metadata tells the sizes."""
    result = pin_model(dynamic, tmp_path / "static.onnx", {"batch": 3, "tokens": 5})
    model = onnx.load(result.model_path)
    onnx.checker.check_model(model, full_check=True)
    assert [3, 5, 4] == shape(model.graph.input[0])
    assert [3, 20] == shape(model.graph.output[0])
    assert not any(isinstance(size, str) for value in model.graph.value_info for size in shape(value))
    assert "Shape" not in {node.op_type for node in model.graph.node}
    assert all(TAG_KEY in {entry.key for entry in node.metadata_props} for node in model.graph.node)
    told = json.loads({entry.key: entry.value for entry in model.metadata_props}["winml.io.inputs"])
    assert [3, 5, 4] == told[0]["shape"]
    assert result.verification is not None
    assert result.verification.is_verified


def test_pinning_one_dimension_leaves_the_other_open(dynamic: Path, tmp_path: Path) -> None:
    """Names left out stay names."""
    result = pin_model(dynamic, tmp_path / "static.onnx", {"batch_size": 1})
    assert ("tokens",) == result.still_open
    assert ((1, "tokens", 4),) == tuple(spec.shape for spec in result.inputs)
    assert "4*tokens" == result.outputs[0].shape[1]


def test_source_stays_unchanged(dynamic: Path, tmp_path: Path) -> None:
    """Only the output is written."""
    before = dynamic.read_bytes()
    pin_model(dynamic, tmp_path / "static.onnx", {"tokens": 5}, verify=False)
    assert before == dynamic.read_bytes()


def test_unknown_name_existing_output_and_no_model_are_refused(dynamic: Path, tmp_path: Path) -> None:
    """A refused request writes no file."""
    with pytest.raises(UsageError, match="'tokens'"):
        pin_model(dynamic, tmp_path / "static.onnx", {"token": 5})
    (tmp_path / "other.onnx").touch()
    with pytest.raises(OutputExistsError):
        pin_model(dynamic, tmp_path / "other.onnx", {"tokens": 5})
    with pytest.raises(UsageError, match="the input"):
        pin_model(dynamic, dynamic, {"tokens": 5}, overwrite=True)
    with pytest.raises(ModelPathError, match="no such"):
        pin_model(tmp_path / "missing.onnx", tmp_path / "static.onnx", {"tokens": 5})
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    with pytest.raises(InputError):
        pin_model(tmp_path / "broken.onnx", tmp_path / "static.onnx", {"tokens": 5})
    assert not (tmp_path / "static.onnx").exists()


def test_sizes_the_model_does_not_take_are_refused(tmp_path: Path) -> None:
    """No file is written, and the hint asks for other sizes; a refused request names no step."""
    body = """m (float[N, 4] x) => (float[M, 8] y) <int64[2] s = {2, 8}, float[4] w = {1, 2, 3, 4}>
        { a = Mul (x, w) y = Reshape (a, s) }"""
    ir.save(parse(body), tmp_path / "in.onnx")
    with pytest.raises(UsageError, match=r"in\.onnx .* N 3: .*\(Reshape\)") as raised:
        pin_model(tmp_path / "in.onnx", tmp_path / "static.onnx", {"N": 3})
    assert ("", True) == (raised.value.step, "sizes that the model supports" in raised.value.hint)
    assert ["in.onnx"] == [path.name for path in tmp_path.iterdir()]
    result = pin_model(tmp_path / "in.onnx", tmp_path / "static.onnx", {"N": 4})
    assert result.verification is not None
    assert result.verification.is_verified
    assert ((), result.sizes) == (result.still_open, {"N": 4})


def test_invalid_graph_is_refused_and_a_newer_format_is_lowered(dynamic: Path, tmp_path: Path) -> None:
    """The first is refused, the second lowered with a note."""
    model = onnx.load(dynamic)
    model.ir_version = newest_ir_version() + 1
    onnx.save(model, tmp_path / "newer.onnx")
    result = pin_model(tmp_path / "newer.onnx", tmp_path / "static.onnx", {"tokens": 5})
    assert any("IR version" in note for note in result.notes)
    assert newest_ir_version() == onnx.load(result.model_path).ir_version
    model.graph.node[0].input[0] = "nowhere"
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(InputError):
        pin_model(tmp_path / "broken.onnx", tmp_path / "other.onnx", {"tokens": 5})
