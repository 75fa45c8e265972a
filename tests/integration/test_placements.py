"""Quantized files for the placement rules of providers: integer units, and outputs near the source.

Each record of ``quantize/placements.py`` is tried on one small network; QNN's also on its plug-in if installed, in
``test_compilers.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.errors import UsageError
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.placements import PLACEMENTS
from winml.modelkit.quantize.verb import quantize_onnx

LEAST_DB = {"w8a8": 15.0, "w8a16": 35.0, "mixed": 25.0, "w4a16": 10.0, "w4a8": 10.0}
"""Chosen 10 dB below the SQNR with the placement that quantizes most."""
Q, D = "QuantizeLinear", "DequantizeLinear"


class Mixer(nn.Module):
    """The parts of encoders: a table, a normalization, attention, a GELU and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.up, self.down, self.activation = nn.Linear(32, 64), nn.Linear(64, 32), nn.GELU()
        self.head = nn.Linear(32, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return a row of scores for each token."""
        x = self.norm(self.table(ids))
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 32**0.5
        scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
        x = x + torch.softmax(scores, -1) @ self.value(x)
        return self.head(x + self.down(self.activation(self.up(x))))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network as a file."""
    path = tmp_path_factory.mktemp("source") / "model.onnx"
    mask = torch.ones(1, 12, dtype=torch.int64)
    mask[0, 9:] = 0
    config = WinMLExportConfig(exporter="torchscript", verify=False)
    HTPExporter(config).export(Mixer().eval(), path, {"ids": torch.arange(12)[None] * 4, "mask": mask})
    return path


def quantized(source: Path, folder: Path, **options: Any) -> onnx.ModelProto:
    """Quantize the source with verification, check the file, and return its model."""
    path = folder / "q.onnx"
    limit = LEAST_DB[options.get("precision", "w8a8")]
    quantize_onnx(source, path, mode="qdq", min_sqnr_db=limit, **{"precision": "w8a8", **options})
    onnx.checker.check_model(str(path))
    return onnx.load(path)


class Graph:
    """Producers and readers of the values of a file."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.nodes = list(model.graph.node)
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.stored = {item.name: item for item in model.graph.initializer}

    def operators(self, *names: str) -> list[onnx.NodeProto]:
        """Return the nodes of these operators."""
        return [node for node in self.nodes if node.op_type in names]

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value."""
        return [node for node in self.nodes if name in node.input]

    def reads_integers(self, node: onnx.NodeProto, index: int) -> bool:
        """Return True if an input is dequantized immediately before."""
        maker = self.makers.get(node.input[index])
        return maker is not None and maker.op_type == D

    def is_quantized_behind(self, node: onnx.NodeProto) -> bool:
        """Return True if every reader of the output quantizes it first."""
        readers = self.readers(node.output[0])
        return bool(readers) and all(reader.op_type == Q for reader in readers)


@pytest.mark.parametrize("ep", ["qnn", "vitisai"])
@pytest.mark.parametrize("precision", ["w8a8", "w8a16"])
def test_every_operator_is_a_unit_of_integers(ep: str, precision: str, source: Path, tmp_path: Path) -> None:
    """Products, normalizations, attention and GELU read and write integers; no mask contains infinity."""
    graph = Graph(quantized(source, tmp_path, ep=ep, precision=precision))
    counted = 0
    for node in graph.operators("MatMul", "Gemm", "LayerNormalization", "Softmax", "Gelu", "Add"):
        assert graph.reads_integers(node, 0), node.name
        assert graph.is_quantized_behind(node), node.name
        counted += 1
    assert counted >= 12
    for name, item in graph.stored.items():
        assert np.isfinite(numpy_helper.to_array(item).astype(np.float64)).all(), name
    is_symmetric = PLACEMENTS[ep].symmetric_activations
    zeros = [numpy_helper.to_array(graph.stored[node.input[2]]) for node in graph.operators(Q)]
    assert is_symmetric == all(not zero.any() for zero in zeros)


def test_product_weights_for_qnn_have_a_scale_for_each_channel(source: Path, tmp_path: Path) -> None:
    """Weights are signed and symmetric, as QNN requires with several scales; products of activations have one."""
    graph = Graph(quantized(source, tmp_path, ep="qnn", precision="w8a16"))
    makers = [graph.makers[node.input[1]] for node in graph.operators("MatMul", "Gemm")]
    weights = [maker for maker in makers if maker.input[0] in graph.stored]
    assert 6 == len(weights)
    for maker in weights:
        integers, scale = (graph.stored[name] for name in maker.input[:2])
        axis = next(attribute.i for attribute in maker.attribute if attribute.name == "axis")
        assert (onnx.TensorProto.INT8, [integers.dims[axis]]) == (integers.data_type, list(scale.dims))
        assert not numpy_helper.to_array(graph.stored[maker.input[2]]).any()


def weight_makers(graph: Graph) -> list[onnx.NodeProto]:
    """Return the DequantizeLinear nodes of the weights of products."""
    makers = [graph.makers[node.input[1]] for node in graph.operators("MatMul", "Gemm")]
    return [maker for maker in makers if maker.input[0] in graph.stored]


@pytest.mark.parametrize(
    ("options", "dtype", "block"),
    [
        ({"precision": "w4a16"}, onnx.TensorProto.INT4, 32),
        ({"precision": "w8a16", "block_size": 16}, onnx.TensorProto.INT8, 16),
        ({"precision": "w4a8"}, onnx.TensorProto.INT4, None),
        ({"precision": "w8a8", "per_channel": False}, onnx.TensorProto.UINT8, None),
    ],
)
def test_product_weights_for_qnn_have_requested_blocks_that_it_runs(
    options: dict[str, Any], dtype: int, block: int | None, source: Path, tmp_path: Path
) -> None:
    """QNN runs blocks with 16-bit activations only; vectors and tables have 8 bits or more."""
    graph = Graph(quantized(source, tmp_path, ep="qnn", **options))
    makers = weight_makers(graph)
    assert 6 == len(makers)
    for maker in makers:
        integers, scale = (graph.stored[name] for name in maker.input[:2])
        attributes = {attribute.name: attribute.i for attribute in maker.attribute}
        assert (dtype, block) == (integers.data_type, attributes.get("block_size"))
        depth, width = integers.dims
        expected = [depth // block, width] if block else [width] if options.get("per_channel", True) else []
        assert expected == list(scale.dims)
    vectors = [graph.makers[node.input[1]] for node in graph.operators("LayerNormalization")]
    assert all(graph.stored[maker.input[0]].data_type != onnx.TensorProto.INT4 for maker in vectors)


def test_blocks_that_a_provider_does_not_run_are_refused(source: Path, tmp_path: Path) -> None:
    """The message states the reason of the provider, and a provider without answers is not assumed to run them."""
    for ep, precision, words in (("qnn", "w8a8", "INT16"), ("vitisai", "w8a16", "no record")):
        with pytest.raises(UsageError, match=words):
            quantized(source, tmp_path, ep=ep, precision=precision, block_size=16)


def test_blocks_without_a_provider_are_near_the_source(source: Path, tmp_path: Path) -> None:
    """The CPU provider computes with the dequantized weights."""
    graph = Graph(quantized(source, tmp_path, precision="w4a16"))
    blocks = [attribute.i for node in weight_makers(graph) for attribute in node.attribute if attribute.name != "axis"]
    assert [32] * 6 == blocks


def test_mixed_has_attention_in_8_bits_and_sums_in_16(source: Path, tmp_path: Path) -> None:
    """Bits follow the kind of a value; the record counts both; ``activation_bits`` replaces the bits of a kind."""
    graph = Graph(quantized(source, tmp_path, ep="qnn", precision="mixed"))

    def bits_behind(operator: str) -> set[str]:
        """Return the types of the integers written behind an operator."""
        makers = [reader for node in graph.operators(operator) for reader in graph.readers(node.output[0])]
        return {graph.stored[maker.input[2]].data_type for maker in makers if maker.op_type == Q}

    eight, sixteen = {onnx.TensorProto.UINT8}, {onnx.TensorProto.UINT16}
    assert (eight, sixteen, sixteen) == tuple(map(bits_behind, ("Softmax", "LayerNormalization", "Gelu")))
    path = tmp_path / "wide.onnx"
    options = {"mode": "qdq", "ep": "qnn", "precision": "mixed", "min_sqnr_db": LEAST_DB["mixed"]}
    for bits, expected in (({}, {8, 16}), ({"attention": 16}, {16})):
        record = quantize_onnx(source, path, overwrite=True, activation_bits=bits, **options)
        assert expected == {count.bits for count in record.activations}
        assert any(count.kind == "attention" and count.values > 5 for count in record.activations)
    with pytest.raises(UsageError, match="mixed"):
        quantize_onnx(source, path, mode="qdq", precision="mixed", overwrite=True)
    with pytest.raises(UsageError, match=r"activation.bits"):
        quantize_onnx(source, path, mode="qdq", precision="w8a8", activation_bits={"residual": 16}, overwrite=True)


@pytest.mark.parametrize(("ep", "precision"), [("qnn", "w4a16"), (None, "w4a16"), ("qnn", "w4a8"), (None, "w8a16")])
def test_weights_of_gptq_have_smaller_errors_of_outputs(
    ep: str | None, precision: str, source: Path, tmp_path: Path
) -> None:
    """Rounding by data instead of to nearest; scales stay positive and zero points zero."""
    path, decibels = tmp_path / "q.onnx", []
    for algorithm in ("rtn", "gptq"):
        options = {"mode": "qdq", "ep": ep, "precision": precision, "min_sqnr_db": LEAST_DB[precision]}
        record = quantize_onnx(source, path, algorithm=algorithm, overwrite=True, **options)
        assert record.fidelity is not None
        decibels.append(record.fidelity.worst.sqnr_db)
    assert decibels[1] > decibels[0]
    graph = Graph(onnx.load(path))
    makers = [maker for maker in weight_makers(graph) if maker.op_type == D]
    assert len(makers) == 6
    for maker in makers:
        assert (numpy_helper.to_array(graph.stored[maker.input[1]]) > 0).all()
        assert not numpy_helper.to_array(graph.stored[maker.input[2]]).any()


def test_provider_with_other_integer_operators_is_not_limited_to_qdq(source: Path, tmp_path: Path) -> None:
    """QNN takes MatMulNBits; for VitisAI no source claims it."""
    notes = {
        ep: quantize_onnx(source, tmp_path / f"{ep}.onnx", precision="int4", ep=ep, verify=False).notes
        for ep in ("qnn", "vitisai")
    }
    assert {"qnn": False, "vitisai": True} == {ep: any("Q/DQ only" in note for note in notes[ep]) for ep in notes}


@pytest.mark.parametrize("ep", ["tensorrt", "nvtensorrtrtx", "openvino"])
def test_inputs_of_products_alone_are_integers(ep: str, source: Path, tmp_path: Path) -> None:
    """Outputs and biases stay float; weights have a scale for each channel."""
    graph = Graph(quantized(source, tmp_path, ep=ep))
    products = graph.operators("MatMul", "Gemm")
    assert products
    for node in products:
        assert graph.reads_integers(node, 0), node.name
        assert graph.reads_integers(node, 1), node.name
    layers = [node for node in products if node.input[1] in graph.makers]
    axes = [graph.makers[node.input[1]] for node in layers if graph.makers[node.input[1]].input[0] in graph.stored]
    assert axes
    assert all(graph.stored[maker.input[1]].dims for maker in axes)
    assert "int32" not in {numpy_helper.to_array(item).dtype.name for item in graph.stored.values() if item.dims}
    assert all(graph.reads_integers(node, 0) is False for node in graph.operators("Softmax"))


def test_dml_leaves_normalizations_float(source: Path, tmp_path: Path) -> None:
    """DirectML has no integer kernels for normalizations."""
    graph = Graph(quantized(source, tmp_path, ep="dml"))
    assert all(graph.reads_integers(node, 0) for node in graph.operators("MatMul"))
    assert all(node.input[1] in graph.stored for node in graph.operators("LayerNormalization"))


@pytest.mark.parametrize("ep", ["qnn", "vitisai", "tensorrt", "openvino", "dml"])
def test_weight_is_dequantized_for_units_alone(ep: str, source: Path, tmp_path: Path) -> None:
    """A module may keep more bits and another stay float: the weight of a float module is not quantized."""
    rules = {"/Mixer/Linear.up": "w8a16"} if 16 in PLACEMENTS[ep].activation_bits else {}
    graph = Graph(quantized(source, tmp_path, ep=ep, per_module=rules))
    for node in graph.operators(D):
        if node.input[0] not in graph.stored:
            continue
        for reader in graph.readers(node.output[0]):
            first = 1 if reader.op_type == "Where" else 0  # input 0 is the condition
            others = [i for i, name in enumerate(reader.input) if i >= first and name and name != node.output[0]]
            is_data = [graph.reads_integers(reader, index) for index in others if reader.input[index] in graph.makers]
            assert all(is_data), f"{reader.op_type} {reader.name} reads floats beside an expanded weight"


def test_placement_of_the_cpu_is_that_without_a_provider(source: Path, tmp_path: Path) -> None:
    """The files are equal byte by byte."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, named = (
        quantized(source, tmp_path / folder, **options).SerializeToString()
        for folder, options in (("a", {}), ("b", {"ep": "cpu"}))
    )
    feeds = {"ids": np.arange(12, dtype=np.int64)[None], "mask": np.ones((1, 12), np.int64)}
    answers = [Session(tmp_path / folder / "q.onnx").run(feeds) for folder in ("a", "b")]
    assert len(plain) <= len(named) + 64
    for name, value in answers[0].items():
        assert np.array_equal(value, answers[1][name])


def test_bits_that_a_provider_does_not_take_are_refused(source: Path, tmp_path: Path) -> None:
    """The message names the supported bits."""
    with pytest.raises(UsageError, match=r"w8a16.*tensorrt") as caught:
        quantized(source, tmp_path, ep="tensorrt", precision="w8a16")
    assert "w8a8" in (caught.value.hint or "")
