"""Tiny graphs of quantized operators, which show the formats that an execution provider runs.

Each graph asks about one format: bits of weights and activations, values that share a scale, or one fused operator. It
has seeded weights and inputs of fixed sizes. Conversions of the graph's own inputs and outputs are named by
:data:`EDGES`: providers may leave them to the CPU. Asked by ``quantized_formats``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from winml.modelkit.arrays import Array
from winml.modelkit.ort.format_keys import (
    DYNAMIC_PRODUCT,
    HALF_PRODUCT,
    WeightScales,
    block_product_key,
    product_key,
)

EDGES = frozenset({"convert_input", "convert_output"})
"""Names of the nodes that convert the input and the output of a graph."""
_OPSET = 21
"""Specified: the first opset whose DequantizeLinear takes blocks, 4-bit and 16-bit integers."""
_CONTRIB = "com.microsoft"
_ROWS, _DEPTH, _WIDTH = 8, 64, 32
_BLOCK = 32
_TYPES: Mapping[int, int] = {4: TensorProto.INT4, 8: TensorProto.INT8, 16: TensorProto.INT16}
"""Bits of a weight → its type; signed, as providers require with several scales."""
_UNSIGNED: Mapping[int, int] = {4: TensorProto.UINT4, 8: TensorProto.UINT8}
_ACTIVATIONS: Mapping[int, int] = {8: TensorProto.UINT8, 16: TensorProto.UINT16}


@dataclass(frozen=True)
class Probe:
    """One format of an operator, and the graph that asks for it."""

    words: str
    """The format, for people."""
    make: Callable[[], onnx.ModelProto]


@dataclass
class _Builder:
    """A graph under construction with one float input ``x``."""

    shape: Sequence[int] = (1, _ROWS, _DEPTH)
    opset: int = _OPSET
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def draw(self, *shape: int) -> Array:
        """Draw float32 values of a weight."""
        return (self.random.standard_normal(shape) / 4).astype(np.float32)

    def constant(self, name: str, values: Array | onnx.TensorProto) -> str:
        """Add a constant; return its name."""
        tensor = values if isinstance(values, onnx.TensorProto) else numpy_helper.from_array(values, name)
        self.constants.append(tensor)
        return name

    def node(self, operator: str, inputs: Sequence[str], output: str, name: str = "", **attributes: Any) -> str:
        """Add a node of one output; return the output's name."""
        domain, _, operator = operator.rpartition(":")
        self.nodes.append(
            helper.make_node(operator, list(inputs), [output], name or f"make_{output}", domain=domain, **attributes)
        )
        return output

    def convert(self, value: str, bits: int, edge: str = "", low: float = -4.0, high: float = 4.0) -> str:
        """Quantize and dequantize an activation; ``edge`` names its conversion at an input or output of the graph."""
        scale = self.constant(f"{value}_scale", np.array((high - low) / (2**bits - 1), np.float32))
        dtype = helper.tensor_dtype_to_np_dtype(_ACTIVATIONS[bits])
        zero = self.constant(f"{value}_zero", np.array(round(-low / (high - low) * (2**bits - 1)), dtype))
        names = {"input": ("convert_input", ""), "output": ("", "convert_output")}.get(edge, ("", ""))
        integers = self.node("QuantizeLinear", [value, scale, zero], f"{value}_integers", names[0])
        result = "y" if edge == "output" else f"{value}_dequantized"
        return self.node("DequantizeLinear", [integers, scale, zero], result, names[1])

    def weight(self, values: Array, bits: int, scales: str, axis: int = 1, *, is_signed: bool = True) -> str:
        """Add a weight that is dequantized; ``scales``: ``tensor``, ``channel`` or ``block``."""
        limit = 2 ** (bits - 1) - 1
        attributes: dict[str, Any] = {}
        if scales == "block":
            blocks = values.reshape(-1, _BLOCK, values.shape[1])
            scale = np.abs(blocks).max(1) / limit
            spread, attributes = np.repeat(scale, _BLOCK, 0), {"axis": 0, "block_size": _BLOCK}
        elif scales == "channel":
            others = tuple(dimension for dimension in range(values.ndim) if dimension != axis)
            spread = np.abs(values).max(others, keepdims=True) / limit
            scale, attributes = spread.reshape(-1), {"axis": axis}
        else:
            scale = spread = np.abs(values).max() / limit
        integers = np.clip(np.rint(values / spread), -limit, limit).astype(int)
        scale = np.asarray(scale, np.float32)
        dtype, middle = (_TYPES[bits], 0) if is_signed else (_UNSIGNED[bits], limit + 1)
        stored = self._integers("weight", integers + middle, dtype), self.constant("weight_scale", scale)
        zero = self._integers("weight_zero", np.full(scale.shape, middle), dtype)
        return self.node("DequantizeLinear", [*stored, zero], "weight_dequantized", **attributes)

    def bias(self, width: int) -> str:
        """Add a 32-bit bias with the scale of the products of ``x`` and the weight."""
        by_name = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.constants if "scale" in tensor.name}
        scale = np.asarray(by_name["weight_scale"] * by_name["x_scale"], np.float32)
        stored = [
            self.constant("bias", np.rint(self.draw(width) / scale).astype(np.int32)),
            self.constant("bias_scale", scale),
            self.constant("bias_zero", np.zeros(scale.shape, np.int32)),
        ]
        return self.node("DequantizeLinear", stored, "bias_dequantized", axis=0)

    def _integers(self, name: str, values: Array, dtype: int) -> str:
        """Add integers of a type."""
        return self.constant(name, helper.make_tensor(name, dtype, values.shape, values.reshape(-1).tolist()))

    def finish(
        self, dtype: int = TensorProto.FLOAT, inputs: Sequence[onnx.ValueInfoProto] = (), shape: Sequence[int] = ()
    ) -> onnx.ModelProto:
        """Return the model with output ``y``, whose shape is inferred unless stated."""
        values = inputs or [helper.make_tensor_value_info("x", dtype, self.shape)]
        output = helper.make_tensor_value_info("y", dtype, shape or None)
        graph = helper.make_graph(self.nodes, "probe", values, [output], self.constants)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(_CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return model if shape else onnx.shape_inference.infer_shapes(model)


def _product(
    weight_bits: int, activation_bits: int, scales: str, operator: str = "MatMul", *, has_float_bias: bool = False
) -> onnx.ModelProto:
    """Create a product of quantized activations and a quantized weight; a Gemm has a bias of 32 bits, or of floats."""
    builder = _Builder(shape=(_ROWS, _DEPTH) if operator == "Gemm" else (1, _ROWS, _DEPTH))
    data = builder.convert("x", activation_bits, "input")
    values = builder.draw(_DEPTH, _WIDTH)
    inputs = [data, builder.weight(values, weight_bits, scales)]
    if operator == "Gemm":
        is_float = has_float_bias or scales == "block"  # sums of blocks have no common scale
        inputs.append(builder.constant("bias", builder.draw(_WIDTH)) if is_float else builder.bias(_WIDTH))
    product = builder.node(operator, inputs, "product")
    builder.convert(product, activation_bits, "output", -16.0, 16.0)
    return builder.finish()


def _convolution(weight_bits: int, activation_bits: int, scales: str, operator: str) -> onnx.ModelProto:
    """Create a convolution, plain or transposed, of quantized activations and a quantized weight."""
    builder = _Builder(shape=(1, 8, 16, 16))
    data = builder.convert("x", activation_bits, "input")
    axis = int(operator == "ConvTranspose")  # of the output channels
    shape = (8, 16, 3, 3) if axis else (16, 8, 3, 3)
    weight = builder.weight(builder.draw(*shape), weight_bits, scales, axis=axis)
    result = builder.node(operator, [data, weight], "product", kernel_shape=[3, 3])
    builder.convert(result, activation_bits, "output", -16.0, 16.0)
    return builder.finish()


def _normalization(weight_bits: int, activation_bits: int) -> onnx.ModelProto:
    """Create a LayerNormalization of quantized activations, a quantized weight and a 32-bit bias."""
    builder = _Builder()
    data = builder.convert("x", activation_bits, "input")
    weight = builder.weight(builder.draw(_DEPTH) + 1, weight_bits, "tensor", is_signed=weight_bits == 16)
    builder.node("LayerNormalization", [data, weight, builder.bias(_DEPTH)], "norm", axis=-1)
    builder.convert("norm", activation_bits, "output")
    return builder.finish()


def _block_product(bits: int, rank: int) -> onnx.ModelProto:
    """Create a MatMulNBits of a float activation."""
    builder = _Builder(shape=(1, _ROWS, _DEPTH)[3 - rank :])
    blocks = _DEPTH // _BLOCK
    packed = builder.random.integers(0, 256, (_WIDTH, blocks, _BLOCK * bits // 8)).astype(np.uint8)
    scales = np.full((_WIDTH, blocks), 1 / 2 ** (bits + 1), np.float32)
    inputs = ["x", builder.constant("weight", packed), builder.constant("scales", scales)]
    builder.node(f"{_CONTRIB}:MatMulNBits", inputs, "y", K=_DEPTH, N=_WIDTH, bits=bits, block_size=_BLOCK)
    return builder.finish(shape=[*builder.shape[:-1], _WIDTH])


def _dynamic_product() -> onnx.ModelProto:
    """Create a product of 8-bit weights and activations whose ranges are computed in each run."""
    builder = _Builder()
    names = ["x_integers", "x_scale", "x_zero"]
    builder.nodes.append(helper.make_node("DynamicQuantizeLinear", ["x"], names, "make_integers"))
    integers = np.clip(np.rint(builder.draw(_DEPTH, _WIDTH) * 100), -127, 127).astype(np.int8)
    inputs = [names[0], builder.constant("weight", integers), names[2]]
    product = builder.node("MatMulInteger", [*inputs, builder.constant("weight_zero", np.array(0, np.int8))], "sums")
    floats = builder.node("Cast", [product], "floats", to=TensorProto.FLOAT)
    scale = builder.constant("weight_scale", np.array(0.01, np.float32))
    builder.node("Mul", [floats, builder.node("Mul", [names[1], scale], "scale")], "y")
    return builder.finish()


def _weight_alone(bits: int, scales: str) -> onnx.ModelProto:
    """Create a product of a float activation and a weight that is dequantized."""
    builder = _Builder()
    builder.node("MatMul", ["x", builder.weight(builder.draw(_DEPTH, _WIDTH), bits, scales)], "y")
    return builder.finish()


def _lookup(bits: int) -> onnx.ModelProto:
    """Create a lookup in a quantized table."""
    builder = _Builder()
    table = builder.convert(builder.constant("table", builder.draw(_ROWS, _DEPTH)), bits)
    rows = builder.node("Gather", [table, "ids"], "rows")
    builder.convert(rows, bits, "output")
    return builder.finish(inputs=[helper.make_tensor_value_info("ids", TensorProto.INT64, [1, _ROWS])])


def _block_lookup(bits: int) -> onnx.ModelProto:
    """Create a lookup in a table with blocks."""
    builder = _Builder()
    per_byte = 8 // bits
    packed = builder.random.integers(0, 256, (_ROWS, _DEPTH // per_byte)).astype(np.uint8)
    scales = builder.constant("scales", np.full((_ROWS, _DEPTH // _BLOCK), 1 / 2**bits, np.float32))
    inputs = [builder.constant("table", packed), "ids", scales]
    attributes: dict[str, Any] = {"gather_axis": 0, "quantize_axis": 1, "bits": bits, "block_size": _BLOCK}
    builder.node(f"{_CONTRIB}:GatherBlockQuantized", inputs, "y", **attributes)
    return builder.finish(
        inputs=[helper.make_tensor_value_info("ids", TensorProto.INT64, [1, _ROWS])], shape=[1, _ROWS, _DEPTH]
    )


def _row_lookup() -> onnx.ModelProto:
    """Create a lookup in a table of 8-bit integers with one scale per row, by operators of ONNX."""
    builder = _Builder()
    table = builder.constant("table", builder.random.integers(-127, 128, (_ROWS, _DEPTH)).astype(np.int8))
    scales = builder.constant("scales", np.full((_ROWS, 1), 0.01, np.float32))
    integers = builder.node("Gather", [table, "ids"], "integers")
    floats = builder.node("Cast", [integers], "floats", to=TensorProto.FLOAT)
    builder.node("Mul", [floats, builder.node("Gather", [scales, "ids"], "scale")], "y")
    return builder.finish(inputs=[helper.make_tensor_value_info("ids", TensorProto.INT64, [1, _ROWS])])


def _half_product() -> onnx.ModelProto:
    """Create a product in float16."""
    builder = _Builder()
    builder.node("MatMul", ["x", builder.constant("weight", builder.draw(_DEPTH, _WIDTH).astype(np.float16))], "y")
    return builder.finish(TensorProto.FLOAT16)


def _attention(operator: str) -> onnx.ModelProto:
    """Create a fused attention of one input as queries, keys and values."""
    is_standard = ":" not in operator
    builder = _Builder(opset=23 if is_standard else _OPSET)
    heads: dict[str, Any] = {"q_num_heads": 4, "kv_num_heads": 4} if is_standard else {"num_heads": 4}
    builder.node(operator, ["x", "x", "x"], "y", **heads)
    return builder.finish(shape=builder.shape)


def _experts() -> onnx.ModelProto:
    """Create a mixture of experts with float weights."""
    builder = _Builder(shape=(_ROWS, _DEPTH))
    router = builder.node("MatMul", ["x", builder.constant("router", builder.draw(_DEPTH, 4))], "scores")
    up = builder.constant("up", builder.draw(4, _WIDTH, _DEPTH))
    down = builder.constant("down", builder.draw(4, _DEPTH, _WIDTH))
    builder.node(f"{_CONTRIB}:MoE", ["x", router, up, "", down], "y", k=2, activation_type="relu")
    return builder.finish(shape=builder.shape)


_SCALES: Mapping[WeightScales, str] = {"tensor": "one scale", "channel": "a scale for each channel", "block": "blocks"}
"""Values of a weight that share a scale → its words."""
_CHANNEL: tuple[WeightScales, ...] = ("channel",)


def _product_probes() -> dict[str, Probe]:
    """Create the probes of products and convolutions, for each combination of bits and scales."""
    probes: dict[str, Probe] = {}
    for weights, activations in ((8, 8), (8, 16), (16, 16), (4, 8), (4, 16)):
        for operator in ("MatMul", "Gemm", "Conv", "ConvTranspose"):
            create, kinds = (_product, tuple(_SCALES)) if operator in ("MatMul", "Gemm") else (_convolution, _CHANNEL)
            for scales in kinds:
                make = functools.partial(create, weights, activations, scales, operator)
                words = f"{operator}, {weights}-bit weights with {_SCALES[scales]}, {activations}-bit activations"
                probes[product_key(weights, activations, scales, operator)] = Probe(words, make)
    return probes


PROBES: Mapping[str, Probe] = {
    **_product_probes(),
    **{
        f"Gemm/w8a{bits}/channel/float bias": Probe(
            f"Gemm, 8-bit weights with a scale for each channel, {bits}-bit activations, float bias",
            lambda bits=bits: _product(8, bits, "channel", "Gemm", has_float_bias=True),  # type: ignore[misc]
        )
        for bits in (8, 16)
    },
    **{
        product_key(weights, activations, "tensor", "LayerNormalization"): Probe(
            f"LayerNormalization, {weights}-bit weights, {activations}-bit activations",
            lambda of=(weights, activations): _normalization(*of),  # type: ignore[misc]
        )
        for weights, activations in ((8, 8), (8, 16), (16, 16), (4, 8), (4, 16))
    },
    **{
        block_product_key(bits, rank): Probe(
            f"MatMulNBits, {bits} bits, float activations of {rank} dimensions",
            lambda of=(bits, rank): _block_product(*of),  # type: ignore[misc]
        )
        for bits in (2, 4, 8)
        for rank in (2, 3)
    },
    **{
        f"MatMul/w{bits}/block": Probe(
            f"MatMul, {bits}-bit weights with blocks, float activations",
            lambda bits=bits: _weight_alone(bits, "block"),  # type: ignore[misc]
        )
        for bits in (4, 8)
    },
    **{
        f"Gather/a{bits}": Probe(f"Gather of a table in {bits} bits", lambda bits=bits: _lookup(bits))  # type: ignore[misc]
        for bits in (8, 16)
    },
    **{
        f"GatherBlockQuantized/{bits}": Probe(
            f"GatherBlockQuantized, {bits} bits",
            lambda bits=bits: _block_lookup(bits),  # type: ignore[misc]
        )
        for bits in (4, 8)
    },
    "Gather/rows": Probe("Gather of 8-bit rows with one scale each (Cast, Mul)", _row_lookup),
    HALF_PRODUCT: Probe("MatMul in float16", _half_product),
    DYNAMIC_PRODUCT: Probe("MatMulInteger, 8-bit weights, activations quantized in each run", _dynamic_product),
    "Attention": Probe("Attention of ONNX (opset 23)", lambda: _attention("Attention")),
    "MultiHeadAttention": Probe(
        "MultiHeadAttention of ONNX Runtime", lambda: _attention(f"{_CONTRIB}:MultiHeadAttention")
    ),
    "MoE": Probe("MoE, a mixture of experts", _experts),
}
"""Key of a format → its probe."""
