"""Weights of 4 or 8 bits in blocks, quantized once while they are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

from blocked_graphs import floats, sqnr_db, task_for, weighted
from graphs import operators, tags
from winml.modelkit.errors import QuantizeError
from winml.modelkit.inspect.onnx_inspection import inspect_onnx
from winml.modelkit.onnx.files import writing
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.engines import block_quantizers as weight_matrices
from winml.modelkit.quantize.engines.block_quantizers import BlockFormat, quantize_blocks
from winml.modelkit.quantize.engines.weight_only import PackedWeight, quantize_weights

PRODUCT = "m (float[2,64] x) => (float[2,48] y) <float[1] w = {0}> { y = MatMul (x, w) }"
GEMM = """m (float[2,64] x) => (float[2,48] y) <float[1] w = {0}, float[1] wb = {0}> {
    y = Gemm <transB = 1> (x, w, wb)
}"""
TIED = """m (int64[2,5] ids) => (float[2,5,80] y) <float[1] w = {0}> {
    e = Gather (w, ids)
    t = Transpose <perm = [1, 0]> (w)
    y = MatMul (e, t)
}"""
IDS = np.arange(10).reshape(2, 5) * 7 % 80

LEAST_DB = {"int4": 17.0, "int8": 38.0}
"""Rounding normal values to 4 and 8 bits in blocks leaves 21 and 43 dB; half of the error is lost to chance here."""


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"block_size": 16}, {"block_size": 128}], ids=str)
def test_product_becomes_one_in_blocks(precision: str, options: dict[str, int]) -> None:
    """The node becomes MatMulNBits with the same tag; the float weight is removed, and the outputs stay close."""
    model = weighted(PRODUCT, w=(64, 48))
    quantized = quantize_weights(model, task_for(model, precision, **options))
    assert ["MatMulNBits"] == operators(quantized)
    assert [("/M/MatMul", "direct")] == tags(quantized)
    assert "w" not in quantized.graph.initializers
    assert ["MatMul"] == operators(model)
    assert sqnr_db(model, quantized, x=floats(2, 64)) > LEAST_DB[precision]


@pytest.mark.parametrize("source", [PRODUCT, GEMM], ids=["MatMul", "Gemm"])
def test_product_of_two_dimensions_gets_a_third_for_a_provider_that_requires_it(source: str) -> None:
    """QNN runs MatMulNBits of three dimensions only; all nodes keep the module, and the outputs are equal."""
    arrays: dict[str, tuple[int, ...]] = {"w": (64, 48)} if source is PRODUCT else {"w": (48, 64), "wb": (48,)}
    model = weighted(source, **arrays)
    plain, padded = (quantize_weights(model, task_for(model, "int4", ep=ep)) for ep in (None, "qnn"))
    assert ["Unsqueeze", "MatMulNBits", "Squeeze"] == operators(padded)
    assert sqnr_db(plain, padded, x=floats(2, 64)) > 100


@pytest.mark.parametrize("algorithm", ["rtn", "hqq", "k_quant"])
def test_algorithms_of_onnxruntime_give_runnable_weights(algorithm: str) -> None:
    """Every algorithm gives a weight that ONNX Runtime runs, even if no block size divides the depth."""
    model = weighted(PRODUCT.replace("2,64", "2,70"), w=(70, 48))
    quantized = quantize_weights(model, task_for(model, "int4", algorithm=algorithm))
    assert ["MatMulNBits"] == operators(quantized)
    assert sqnr_db(model, quantized, x=floats(2, 70)) > LEAST_DB["int4"]


def test_gemm_keeps_its_bias() -> None:
    """A weight that is stored with output channels first, and a bias, become one node."""
    model = weighted(GEMM, w=(48, 64), wb=(48,))
    quantized = quantize_weights(model, task_for(model, "int8"))
    assert ["MatMulNBits"] == operators(quantized)
    assert sqnr_db(model, quantized, x=floats(2, 64)) > LEAST_DB["int8"]


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("m (float[2,2,64] x) => (float[2,2,48] y) <float[1] w = {0}> { y = MatMul (x, w) }", (2, 64, 48)),
        ("m (float[48,2] x) => (float[64,2] y) <float[1] w = {0}> { y = MatMul (w, x) }", (64, 48)),
        ("m (float[2,64] x) => (float[2,48] y) <float[1] w = {0}> { y = Gemm <alpha = 2.0> (x, w) }", (64, 48)),
        ("m (int64[2] x) => (float[64,2] y) <float[1] w = {0}> { y = Gather <axis = 1> (w, x) }", (64, 48)),
        ("m (int64[2] x) => (float[2,40] y) <float[1] w = {0}> { y = Gather (w, x) }", (64, 40)),
    ],
    ids=["batched", "weight on the left", "scaled", "columns", "odd rows"],
)
def test_node_without_a_form_in_blocks_stays(body: str, shape: tuple[int, ...]) -> None:
    """Its weight stays float."""
    model = weighted(body, w=shape)
    quantized = quantize_weights(model, task_for(model, "int4"))
    assert operators(model) == operators(quantized)
    assert ["w"] == list(quantized.graph.initializers)


def test_table_takes_the_largest_block_that_divides_its_rows() -> None:
    """A row of 48 values has three blocks of 16."""
    model = weighted("m (int64[2] x) => (float[2,48] y) <float[1] w = {0}> { y = Gather (w, x) }", w=(80, 48))
    quantized = quantize_weights(model, task_for(model, "int4"))
    assert ["GatherBlockQuantized"] == operators(quantized)
    assert 16 == quantized.graph[0].attributes["block_size"].as_int()
    table = quantized.graph[0].inputs[0]
    assert table is not None
    assert table.is_initializer()
    assert (80, 24) == tuple(table.shape or ())
    assert sqnr_db(model, quantized, x=[3, 79]) > LEAST_DB["int4"]


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_tied_table_is_quantized_once(precision: str, tmp_path: Path) -> None:
    """The embedding and the head read the same values, and the weight is read once while the file is written."""
    model = weighted(TIED, w=(80, 64))
    reads: list[str] = []
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None

    def read() -> ir.TensorProtocol:
        reads.append("w")
        return tensor

    model.graph.initializers["w"].const_value = ir.LazyTensor(read, tensor.dtype, tensor.shape, name="w")
    quantized = quantize_weights(model, task_for(model, precision))
    assert ["Reshape", "GatherBlockQuantized", "MatMulNBits"] == operators(quantized)
    for external in (True, False):
        write_model(quantized, tmp_path / "q.onnx", external=external)
    assert ["w", "w"] == reads
    assert sqnr_db(model, quantized, ids=IDS) > LEAST_DB[precision]


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_tied_table_for_openvino_is_two_constants_and_one_range_of_bytes(precision: str, tmp_path: Path) -> None:
    """OpenVINO accepts constants only; the data file is as large as with one constant, also when rewritten."""
    model = weighted(TIED, w=(80, 64))
    quantized = quantize_weights(model, task_for(model, precision, ep="openvino"))
    assert ["GatherBlockQuantized", "MatMulNBits"] == operators(quantized)
    _, data = write_model(quantized, tmp_path / "q.onnx", external=True)
    read = load_by_reference(tmp_path / "q.onnx")
    _, again = write_model(read, tmp_path / "again.onnx", external=True)
    _, one = write_model(quantize_weights(model, task_for(model, precision)), tmp_path / "one.onnx", external=True)
    assert one.read_bytes() == data.read_bytes() == again.read_bytes()
    answers = [Session(tmp_path / name).run({"ids": IDS})["y"] for name in ("one.onnx", "q.onnx", "again.onnx")]
    assert all(np.array_equal(answers[0], answer) for answer in answers)
    tables = [value for name, value in quantized.graph.initializers.items() if name.startswith("w_Q")]
    assert [3, 2] == [len(value.shape or ()) for value in tables]
    counted = [inspect_onnx(tmp_path / name).total.weight_parameters for name in ("one.onnx", "q.onnx")]
    assert [80 * 64] * 2 == counted
    assert sqnr_db(model, quantized, ids=IDS) > LEAST_DB[precision]


def test_existing_names_are_not_reused() -> None:
    """Values that already have the names of the new weight and of the reshaped table keep their names."""
    body = TIED.replace("e = Gather (w, ids)", "w_Q4 = Identity (ids)  w_Q4_2_table = Gather (w, w_Q4)")
    model = weighted(body.replace("(e, t)", "(w_Q4_2_table, t)"), w=(80, 64))
    quantized = quantize_weights(model, task_for(model, "int4", "Gather", "MatMul"))
    names = [value.name for node in quantized.graph for value in node.outputs] + list(quantized.graph.initializers)
    assert len(names) == len(set(names))
    assert sqnr_db(model, quantized, ids=IDS) > LEAST_DB["int4"]


def test_tied_table_of_a_float_embedding_stays_beside_the_head() -> None:
    """Only the head gets few bits; the table stays for the embedding."""
    model = weighted(TIED, w=(80, 64))
    quantized = quantize_weights(model, task_for(model, "int4", "MatMul"))
    assert ["Gather", "MatMulNBits"] == operators(quantized)
    assert "w" in quantized.graph.initializers


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_weight_read_in_slabs_is_the_same(
    precision: str, is_transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight in a file, of which a few rows are in memory at a time, gives the bytes of the whole one."""
    model = weighted(PRODUCT, w=(130, 48))
    whole = quantize_weights(model, task_for(model, precision, block_size=16))
    value = model.graph.initializers["w"]
    assert value.const_value is not None
    array = value.const_value.numpy()
    (tmp_path / "w.bin").write_bytes(bytes(8) + (array.T if is_transposed else array).tobytes())
    stored = StoredValues(tmp_path / "w.bin", 8, ir.DataType.FLOAT, (48, 130) if is_transposed else (130, 48))
    value.const_value = StoredTensor(stored, permutation=(1, 0) if is_transposed else None, name="w")
    monkeypatch.setattr(weight_matrices, "SLAB_ELEMENTS", 1)
    slabs = quantize_weights(model, task_for(model, precision, block_size=16))
    parts = [value.const_value for value in slabs.graph.initializers.values()]
    assert 3 == len(parts)
    for part in parts:
        assert part is not None
        expected = whole.graph.initializers[part.name or ""].const_value
        assert expected is not None
        assert expected.tobytes() == part.tobytes()


@pytest.mark.parametrize(
    ("bits", "block_size", "depth"), [(4, 32, 96), (4, 16, 4096), (8, 64, 192), (4, 32, 100), (8, 16, 33)]
)
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_rounded_blocks_equal_onnxruntime(bits: int, block_size: int, depth: int, is_symmetric: bool) -> None:
    """Bit for bit, in either memory order: zeros, one sign only, equal ends, halves, subnormal scales."""
    matrix = np.random.default_rng(6).standard_normal((depth, 12)).astype(np.float32)
    matrix[:, 0], matrix[:, 1], matrix[:, 2] = 0, np.abs(matrix[:, 1]), -np.abs(matrix[:, 2])
    matrix[:, 3] = np.where(np.arange(depth) % 2, 1, -1)
    matrix[:, 4] = np.round(matrix[:, 4] * 4) / 8
    matrix[:, 5] *= 1e-40
    config = DefaultWeightOnlyQuantConfig(block_size=block_size, is_symmetric=is_symmetric, bits=bits)
    packed, scales, zero_points = DefaultWeightOnlyQuantizer(config).qbits_block_quant(matrix)
    form = BlockFormat(bits, block_size, is_symmetric=is_symmetric, algorithm="rtn")
    for ordered in (matrix, np.asfortranarray(matrix)):
        blocks = quantize_blocks(ordered, form)
        assert packed.tobytes() == blocks.packed.tobytes()
        assert scales.tobytes() == blocks.scales.tobytes()
        assert (b"" if is_symmetric else zero_points.tobytes()) == (
            b"" if blocks.zero_points is None else blocks.zero_points.tobytes()
        )


def test_weights_written_side_by_side_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads write values, scales and zero points of a weight; the file equals that of one thread."""
    shapes = {f"w{number}": (256, 192) for number in range(6)}
    body = "".join(f"y{number} = MatMul (x, w{number}) " for number in range(6))
    outputs = ", ".join(f"float[N, 192] y{number}" for number in range(6))
    declared = ", ".join(f"float[1] {name} = {{0}}" for name in shapes)
    model = weighted(f"m (float[N, 256] x) => ({outputs}) <{declared}> {{ {body} }}", **shapes)
    computed = []
    compute = PackedWeight.compute
    monkeypatch.setattr(PackedWeight, "compute", lambda weight: computed.append(weight) or compute(weight))
    _, data = write_model(quantize_weights(model, task_for(model, "int4")), tmp_path / "two.onnx", external=True)
    assert 6 == len(computed) == len(set(computed))
    monkeypatch.setattr(writing, "WRITING_THREADS", 1)
    _, alone = write_model(quantize_weights(model, task_for(model, "int4")), tmp_path / "one.onnx", external=True)
    assert alone.read_bytes() == data.read_bytes()


def test_nan_is_refused_by_a_thread_that_writes(tmp_path: Path) -> None:
    """The error names the module."""
    model = weighted(PRODUCT, w=(128, 192))
    array = model.graph.initializers["w"].const_value.numpy().copy()  # type: ignore[union-attr]
    array[5, 7] = np.nan
    model.graph.initializers["w"].const_value = ir.tensor(array, name="w")
    with pytest.raises(QuantizeError, match=r"w has .*NaN"):
        write_model(quantize_weights(model, task_for(model, "int4")), tmp_path / "model.onnx", external=True)
