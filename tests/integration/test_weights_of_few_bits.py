"""Files with few-bit weights: written from files, verified, and with the precision of each module on its nodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.errors import QuantizeError, UsageError
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx.stage import all_nodes
from winml.modelkit.quantize import file_quantization as flow
from winml.modelkit.quantize.records import QuantizedFile
from winml.modelkit.quantize.verb import quantize_onnx
from winml.modelkit.tags.tagging import NodeTag, read_tag, write_tag

MODULES = ("embedding", "attention", "feed_forward", "norm", "head")
BODY = """m (int64[batch,length] ids) => (float[batch,length,96] y)
    <float[1] w0 = {0}, float[1] w1 = {0}, float[1] w2 = {0}, float[1] w3 = {0}, float[1] w4 = {0}> {
    a = Gather (w0, ids)
    b = MatMul (a, w1)
    c = MatMul (b, w2)
    d = Mul (c, w3)
    y = MatMul (d, w4)
}"""
SHAPES = {"w0": (96, 64), "w1": (64, 64), "w2": (64, 64), "w3": (64,), "w4": (64, 96)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of five modules with its weights in a data file."""
    model = parse(BODY)
    generator = np.random.default_rng(1)
    for name, shape in SHAPES.items():
        value = model.graph.initializers[name]
        array = (generator.standard_normal(shape) / 8).astype(np.float32)
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(shape)
    for node, module in zip(model.graph, MODULES, strict=True):
        write_tag(node, NodeTag(f"/M/{module}", module, "direct"))
    ir.save(model, tmp_path / "m.onnx", external_data="m.data")
    return tmp_path / "m.onnx"


def _records(path: Path) -> dict[str, set[tuple[str, str, int | None]]]:
    """Return module → (precision, kind, block size) on its nodes."""
    found: dict[str, set[tuple[str, str, int | None]]] = {}
    for node in all_nodes(ir.load(path)):
        if (text := node.metadata_props.get(QUANTIZATION_KEY)) is not None and (tag := read_tag(node)) is not None:
            record = json.loads(text)
            found.setdefault(tag.module, set()).add((record["precision"], record["kind"], record.get("block_size")))
    return found


def _actual(result: QuantizedFile) -> dict[str, str]:
    return {module.tag.rsplit("/", 1)[-1]: module.actual for module in result.modules}


def test_modes_mix_in_one_file(source: Path, tmp_path: Path) -> None:
    """Four precisions of four modes are in one verified graph; every node has a tag, and changed nodes a record."""
    result = quantize_onnx(
        source,
        tmp_path / "q.onnx",
        precision="fp16",
        per_module={"feed_forward": "int4", "attention": "int8", "head": "fp32"},
    )
    assert {"embedding": "fp16", "attention": "int8", "feed_forward": "int4", "head": "fp32"} == _actual(result)
    assert result.fidelity is not None
    assert result.fidelity.worst.sqnr_db > 10
    assert result.coverage.nodes == result.coverage.tagged
    records = _records(tmp_path / "q.onnx")
    assert {("int4", "operator", 32)} == records["feed_forward"]
    assert ("int8", "operator", None) in records["attention"]
    assert {("fp16", "operator", None)} == records["norm"]
    # A reader of the 8-bit embedding converts it itself.
    assert {("fp16", "operator", None), ("int8", "activation", None)} == records["embedding"]
    assert "head" not in records


@pytest.mark.parametrize(("precision", "kind"), [("int4", "operator"), ("fp16", "operator"), ("bf16", "weight")])
def test_nodes_record_their_precision(source: Path, tmp_path: Path, precision: str, kind: str) -> None:
    """The records of the nodes agree with the summary of the modules."""
    result = quantize_onnx(source, tmp_path / "q.onnx", precision=precision)
    size = 32 if precision == "int4" else None
    assert {"embedding", "attention", "feed_forward", "head"} == set(_actual(result))
    assert {precision} == set(_actual(result).values())
    assert (precision, kind, size) in _records(tmp_path / "q.onnx")["head"]


def test_source_that_does_not_fit_into_memory_is_not_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written, and the record gives the reason for the missing verification."""
    monkeypatch.setattr(flow, "available_bytes", lambda: 1000)
    result = quantize_onnx(source, tmp_path / "q.onnx", precision="int4")
    assert result.fidelity is None
    assert "Not verified" in "".join(result.notes)
    assert (tmp_path / "q.onnx").exists()


def test_weights_beyond_float16_are_counted(source: Path, tmp_path: Path) -> None:
    """The notes have the number of values that float16 cannot represent."""
    model = ir.load(source)
    values = np.full((64,), 1e-3, np.float32)
    values[:3] = 1e5
    model.graph.initializers["w3"].const_value = ir.tensor(values, name="w3")
    ir.save(model, tmp_path / "large.onnx", external_data="large.data")
    result = quantize_onnx(tmp_path / "large.onnx", tmp_path / "q.onnx", precision="fp16", verify=False)
    assert "3 weight values" in "".join(result.notes)


def test_block_size_that_no_kernel_has_is_refused(source: Path, tmp_path: Path) -> None:
    """The refusal comes before the file is read."""
    with pytest.raises(UsageError, match="block_size"):
        quantize_onnx(source, tmp_path / "q.onnx", precision="int4", block_size=48)


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize(("precision", "name"), [("int4", "w1"), ("int8", "w1"), ("fp16", "w3"), ("bf16", "w1")])
def test_non_finite_weight_is_refused_with_its_module(
    source: Path, tmp_path: Path, precision: str, name: str, external: bool
) -> None:
    """Nothing is written, with or without verification."""
    model = ir.load(source)
    value = model.graph.initializers[name]
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    array.reshape(-1)[3] = np.nan
    value.const_value = ir.tensor(array, name=name)
    ir.save(model, tmp_path / "nan.onnx", external_data="nan.data")
    module = "/M/norm" if name == "w3" else "/M/attention"
    mode = {"int8": "weight-only"}.get(precision)
    with pytest.raises(QuantizeError, match=f"weight {name} .*NaN.*: module {module}, node "):
        quantize_onnx(
            tmp_path / "nan.onnx",
            tmp_path / "q.onnx",
            precision=precision,
            mode=mode,
            verify=False,
            external_data=external,
        )
    assert not list(tmp_path.glob("q*"))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_file_of_float16_weights_is_refused(source: Path, tmp_path: Path, precision: str) -> None:
    """The weights would not change, so no result is written."""
    quantize_onnx(source, tmp_path / "half.onnx", precision="fp16")
    with pytest.raises(QuantizeError, match="float16"):
        quantize_onnx(tmp_path / "half.onnx", tmp_path / "q.onnx", precision=precision)
    assert not (tmp_path / "q.onnx").exists()


def test_former_float16_weights_are_recorded(source: Path, tmp_path: Path) -> None:
    """Float32 weights of a mixed file become bfloat16, and float16 weights stay float16."""
    quantize_onnx(source, tmp_path / "half.onnx", precision="fp16", include=["attention"])
    result = quantize_onnx(tmp_path / "half.onnx", tmp_path / "q.onnx", precision="bf16", exclude=["feed_forward"])
    expected = {"embedding": "bf16", "attention": "fp16", "feed_forward": "fp32", "head": "bf16"}
    assert expected == _actual(result)
    records = _records(tmp_path / "q.onnx")
    assert {("bf16", "weight", None)} == records["head"] == records["embedding"]
    assert {("fp16", "operator", None)} == records["attention"]  # from the first quantization


def test_lookup_of_few_bits_has_the_record_and_not_its_reshape(source: Path, tmp_path: Path) -> None:
    """The preceding reshape is no quantized operator."""
    quantize_onnx(source, tmp_path / "q.onnx", precision="int4", include=["embedding"])
    marked = [
        node.op_type for node in all_nodes(ir.load(tmp_path / "q.onnx")) if QUANTIZATION_KEY in node.metadata_props
    ]
    assert ["GatherBlockQuantized"] == marked
    assert {("int4", "operator", 32)} == _records(tmp_path / "q.onnx")["embedding"]


def test_weights_without_a_search_are_counted(source: Path, tmp_path: Path) -> None:
    """Zero points between the steps have no kernel for a table; the note counts the weights."""
    result = quantize_onnx(source, tmp_path / "q.onnx", precision="int4", algorithm="hqq")
    assert "1 of 4 weights" in "".join(result.notes)
    searched = quantize_onnx(source, tmp_path / "s.onnx", precision="int4", algorithm="hqq", exclude=["embedding"])
    assert "hqq" not in "".join(searched.notes)
