"""Registry of placements: operators that a provider computes with integers, and their types.

Data only: ``qdq_placement`` applies a placement to a graph. Each placement names its source; formats that the provider
does not run (``ort.quantized_formats``) limit it. Tested providers and providers covered by documentation only:
docs/reference/quantization.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from winml.modelkit.ort.format_keys import DYNAMIC_PRODUCT, HALF_PRODUCT, WeightScales, block_product_key, product_key
from winml.modelkit.registries import Registry

if TYPE_CHECKING:
    import onnx_ir as ir

    from winml.modelkit.ort.quantized_formats import QuantizedFormats
    from winml.modelkit.quantize.precisions import Precision

Role = Literal["weight", "table", "rows", "activation", "bias"]
"""Role of a constant in its operator, which determines type and scale; for ``rows``, only looked-up rows are
dequantized."""
Result = Literal["own", "same", "table", "rows"]
"""Scale of an operator's output: separate, shared with its first input, or of the table of its rows. Rows that are
dequantized at once have no scale."""


@dataclass(frozen=True)
class OperatorRule:
    """Quantization of one operator as an integer unit."""

    inputs: tuple[int, ...] | None = (0,)
    """Indices of the quantized inputs; ``None``: all."""
    weight: int | None = None
    """Index of the input that is a weight if constant."""
    bias: int | None = None
    """Index of the bias, in 32 bits with the scale of the products that it is added to."""
    result: Result = "own"
    is_range: bool = False
    """True if the clipping of its output range replaces the operator, so that it belongs to the preceding unit."""
    takes_activation: bool = False
    """True if a following operator such as Relu can belong to the unit."""
    is_residual: bool = False
    """True if it is a unit only when it adds to the output of a product, without constants: the sum of a residual
    branch."""

    def indices(self, node: ir.Node) -> tuple[int, ...]:
        """Indices of the quantized inputs of a node."""
        count = len(node.inputs)
        positions = range(count) if self.inputs is None else self.inputs
        return tuple(index for index in positions if index < count and node.inputs[index] is not None)

    def role(self, index: int) -> Role:
        """Role of a constant at an input."""
        if self.result == "table" or self.result == "rows":
            return self.result
        return "weight" if index == self.weight else "bias" if index == self.bias else "activation"


_ONE, _ALL = OperatorRule(takes_activation=True), OperatorRule(inputs=None, takes_activation=True)
_SAME = OperatorRule(result="same")
_LAYER = OperatorRule(inputs=(0, 1, 2), weight=1, bias=2, takes_activation=True)
_NORMALIZATION = OperatorRule(inputs=(0, 1, 2), weight=1, bias=2)
_RANGE = OperatorRule(is_range=True)

_PRODUCTS: Mapping[str, OperatorRule] = {
    "Conv": _LAYER, "ConvTranspose": _LAYER, "Gemm": _LAYER,
    "MatMul": OperatorRule(inputs=(0, 1), weight=1, takes_activation=True),
}  # fmt: skip
_REARRANGING = dict.fromkeys(
    ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "MaxPool", "Expand", "Tile",
     "DepthToSpace", "SpaceToDepth", "GatherElements"), _SAME,
)  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """Positions and types of QuantizeLinear and DequantizeLinear for a provider."""

    words: str
    source: str
    """Documentation or tool of the provider: an address, or a Python module."""
    rules: Mapping[str, OperatorRule] = field(default_factory=dict)
    """ONNX operator → rule of its unit; absent operators stay float."""
    activation_bits: tuple[int, ...] = (8, 16)
    """Supported bits of activations."""
    quantizes_outputs: bool = True
    """True if outputs are quantized too; False for inputs alone."""
    symmetric_activations: bool = False
    """True for signed activations with zero point 0; False for unsigned with a zero point."""
    signed_weights: bool | None = None
    """True if weights with one scale are signed; ``None``: set by the precision. Weights with several scales are
    signed."""
    symmetric_weights: bool | None = None
    """True if weights with one scale have no zero point; ``None``: as requested, symmetric by default."""
    channel_axes: Mapping[str, int] = field(default_factory=dict)
    """Operator → weight axis with one scale per channel; other operators have one scale."""
    integer_bias: bool = True
    """True for 32-bit integer biases; False for float."""
    limited: Mapping[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """(operator, bits) → fixed output range."""
    finite_masks: bool = True
    """True if attention masks get a finite minimum in the range of the scores."""
    takes_constant_tables: bool = False
    """True if rows can be looked up in constants only, not in computed tables. Measured: OpenVINO 2026.4, whose ONNX
    importer refuses computed tables."""
    takes_qdq_alone: bool = False
    """True if Q/DQ is the only quantized format that the provider is documented to accept."""
    fusions: tuple[str, ...] = ()
    """Capabilities of the optimizer that create operators of the provider, such as a GELU."""
    formats: QuantizedFormats | None = None
    """Formats that the provider runs, asked or recorded; ``None`` if nothing is known."""

    @property
    def is_by_unit(self) -> bool:
        """True if whole units are quantized; False if only integer kernels of the CPU provider count."""
        return bool(self.rules)

    @property
    def has_bits_by_kind(self) -> bool:
        """True if operators are whole units of integers of 8 and of 16 bits, so that each may have its bits."""
        return self.is_by_unit and self.quantizes_outputs and {8, 16} <= {*self.activation_bits}

    def rule(self, node: ir.Node) -> OperatorRule | None:
        """Rule of a node; ``None`` if it stays float."""
        return self.rules.get(node.op_type) if node.domain in ("", "com.microsoft") else None

    def limits(self, operator: str, bits: int) -> tuple[float, float] | None:
        """Fixed output range of an operator; ``None`` if measured."""
        return self.limited.get((operator, bits))

    @property
    def has_channel_products(self) -> bool:
        """True if weights of products have one scale per channel, as on the CPU."""
        return not self.is_by_unit or "MatMul" in self.channel_axes

    def product_refusal(
        self, weight_bits: int, activation_bits: int, scales: WeightScales, operator: str = "MatMul"
    ) -> str:
        """Return the reason why the provider does not run a quantized product; ``""`` if it does.

        Of a provider without answers, 8-bit and 16-bit weights without blocks are assumed to run.

        Args:
            weight_bits: Bits of the weight.
            activation_bits: Bits of the activations.
            scales: ``tensor``, ``channel`` or ``block``.
            operator: ``MatMul``, ``Gemm``, ``Conv`` or ``ConvTranspose``.
        """
        if self.formats is not None:
            return self.formats.refusal(product_key(weight_bits, activation_bits, scales, operator))
        return "no record says that it does" if self.is_by_unit and (weight_bits < 8 or scales == "block") else ""

    def is_run(self, key: str) -> bool:
        """Return True if the provider is known to run a format (``ort.probe_graphs.PROBES``)."""
        return self.formats is not None and self.formats.answers.get(key) == ""

    def vector_bits(self, operator: str, weight_bits: int, activation_bits: int) -> int:
        """Return the bits of a weight of one dimension, such as that of a normalization: 16 if the provider runs it.

        It has one scale, takes few bytes, and affects all values of the residual stream.

        Args:
            operator: Operator that reads the weight.
            weight_bits: Bits of the weights of the precision.
            activation_bits: Bits of the activations.
        """
        key = product_key(activation_bits, activation_bits, "tensor", operator)
        return max(8, weight_bits, activation_bits if self.is_run(key) else 0)

    def refusal(self, precision: Precision, mode: str) -> str:
        """Return the reason why the provider does not run a precision in a mode, with its source; ``""`` if it does.

        Args:
            precision: Bits of weights and activations.
            mode: A quantization mode.
        """
        if mode == "qdq" and precision.has_bits_by_kind and not self.has_bits_by_kind:
            return "not all of its operators take integers of 8 and 16 bits"
        if mode == "qdq":
            return self._bits_refusal(precision.weight_bits, precision.range_bits)
        if self.takes_qdq_alone and mode != "float":
            return f"it is documented to take quantized operators as Q/DQ only ({self.source})"
        key = _format_key(precision, mode)
        return self._with_source(self.formats.refusal(key) if self.formats is not None and key else "")

    def has_answer(self, precision: Precision) -> bool:
        """Return True if a format of a precision was asked, in any of its modes."""
        if self.formats is None:
            return False
        return any(mode == "qdq" or _format_key(precision, mode) in self.formats.answers for mode in precision.modes)

    def _bits_refusal(self, weight_bits: int, activation_bits: int) -> str:
        """Return the reason why the provider runs no product of these bits in Q/DQ; ``""`` if it runs some."""
        if activation_bits not in self.activation_bits:
            return f"it supports activations with {' or '.join(map(str, self.activation_bits))} bits"
        scales: tuple[WeightScales, ...] = ("channel", "block", "tensor")
        reasons = [self.product_refusal(weight_bits, activation_bits, each) for each in scales]
        return self._with_source(reasons[0]) if all(reasons) else ""

    def _with_source(self, reason: str) -> str:
        """Return a reason with the source of the answers."""
        return f"{reason} ({self.formats.source_words})" if reason and self.formats is not None else reason

    def channel_axis(self, node: ir.Node, index: int) -> int | None:
        """Weight axis with one scale per channel; ``None``: one scale."""
        value = node.inputs[index]
        axis = self.channel_axes.get(node.op_type)
        rank = len(value.shape or ()) if value is not None else 0
        if axis is None or rank < 2:
            return None
        if node.op_type == "Gemm":
            return 0 if node.attributes.get_int("transB", 0) else 1
        return axis % rank if node.op_type != "MatMul" or rank == 2 else None


def _format_key(precision: Precision, mode: str) -> str:
    """Return the key of the format that a mode without Q/DQ writes; ``""`` if no graph asks for it."""
    if mode == "float":
        return HALF_PRODUCT if precision.float_type == "FLOAT16" else ""
    return {"weight-only": block_product_key(precision.weight_bits, 3), "dynamic": DYNAMIC_PRODUCT}.get(mode, "")


BLOCK_OPERATORS = ("MatMul", "Gemm")
"""Products whose weights may have blocks."""

CPU_PLACEMENT = "cpu"
"""Short name of the default placement: for providers without an entry, or if no provider is selected."""

_QNN_RULES: Mapping[str, OperatorRule] = {
    **_PRODUCTS,
    **_REARRANGING,
    **dict.fromkeys(
        ("Add", "Sub", "Mul", "Div", "Min", "Max", "Pow", "Concat", "PRelu", "Sum"), _ALL,
    ),
    **dict.fromkeys(
        ("Relu", "Clip"), _RANGE,
    ),
    **dict.fromkeys(
        ("Abs", "Neg", "Sqrt", "Erf", "Exp", "Log", "Sigmoid", "Tanh", "Gelu", "HardSigmoid", "HardSwish", "Elu",
         "LeakyRelu", "Softmax", "LogSoftmax", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "AveragePool",
         "GlobalAveragePool", "GlobalMaxPool", "Resize", "Sin", "Cos", "Floor", "Ceil", "Round", "Sign",
         "LpNormalization", "CumSum", "Pad"), _ONE,
    ),
    **dict.fromkeys(("LayerNormalization", "InstanceNormalization", "RMSNormalization"), _NORMALIZATION),
    "Where": OperatorRule(inputs=(1, 2)),
    "Gather": OperatorRule(result="table"),
}  # fmt: skip

_UNIT_RANGE = {("Softmax", bits): (0.0, 1.0) for bits in (8, 16)}

_CHANNELS = {"Conv": 0, "ConvTranspose": 1}
_ALL_CHANNELS = {**_CHANNELS, "Gemm": 1, "MatMul": 1}
_RESIDUAL = OperatorRule(inputs=None, is_residual=True)
_INPUTS_ALONE: Mapping[str, OperatorRule] = {
    **_PRODUCTS, "Add": _RESIDUAL, "AveragePool": _ONE, "GlobalAveragePool": _ONE,
}  # fmt: skip

_TENSORRT = Placement(
    "inputs of products, sums and pools, symmetric; outputs and biases stay float",
    "https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html",
    _INPUTS_ALONE,
    activation_bits=(8,),
    quantizes_outputs=False,
    symmetric_activations=True,
    signed_weights=True,
    symmetric_weights=True,
    channel_axes=_ALL_CHANNELS,
    integer_bias=False,
    finite_masks=False,
)

_BUILT_IN: Mapping[str, Placement] = {
    CPU_PLACEMENT: Placement(
        "layers with weights and chains of integer kernels; products return floats",
        "kernels of ONNX Runtime's CPU provider, measured: docs/reference/quantization.md",
        finite_masks=False,
    ),
    "qnn": Placement(
        "every operator a whole unit of integers",
        "onnxruntime.quantization.execution_providers.qnn, "
        "https://onnxruntime.ai/docs/execution-providers/QNN-ExecutionProvider.html",
        _QNN_RULES,
        signed_weights=False,
        symmetric_weights=False,
        channel_axes=_ALL_CHANNELS,
        limited={
            **_UNIT_RANGE,
            # Specified: QNN's 16-bit Sigmoid and Tanh have these scales, 1/65536 and 1/32768.
            ("Sigmoid", 16): (0.0, 65535 / 65536),
            ("Tanh", 16): (-1.0, 32767 / 32768),
        },
        fusions=("gelu_fusion", "layer_norm_fusion"),
    ),
    "openvino": Placement(
        "inputs of products, sums and pools; outputs and biases stay float",
        "https://github.com/openvinotoolkit/nncf/blob/develop/nncf/common/hardware/configs/npu.json",
        {**_INPUTS_ALONE, "Gather": OperatorRule(result="rows")},
        quantizes_outputs=False,
        signed_weights=True,
        symmetric_weights=True,
        channel_axes=_ALL_CHANNELS,
        integer_bias=False,
        finite_masks=False,
        takes_constant_tables=True,
    ),
    "vitisai": Placement(
        "every operator a whole unit of integers, all symmetric (A8W8 and A16W8 of AMD Quark)",
        "https://quark.docs.amd.com/latest/supported_accelerators/ryzenai/tutorial_a8w8_and_a16w8_quantize.html",
        _QNN_RULES,
        symmetric_activations=True,
        signed_weights=True,
        symmetric_weights=True,
        limited=_UNIT_RANGE,
        takes_qdq_alone=True,
    ),
    "tensorrt": _TENSORRT,
    "nvtensorrtrtx": _TENSORRT,
    "dml": Placement(
        "operators that DirectML has integer kernels for; softmax and normalizations stay float",
        "https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md (DmlExecutionProvider), "
        "https://github.com/microsoft/onnxruntime/issues/26882",
        {
            **_REARRANGING,
            **{name: _PRODUCTS[name] for name in ("Conv", "MatMul")},
            **dict.fromkeys(("Relu", "Clip"), _RANGE),
            **dict.fromkeys(("AveragePool", "GlobalAveragePool", "Sigmoid"), _ONE),
            **dict.fromkeys(("Add", "Concat"), _ALL),
            "Gather": OperatorRule(result="rows"),
        },
        activation_bits=(8,),
        signed_weights=True,
        symmetric_weights=True,
        channel_axes=_CHANNELS,
    ),
}


def _problem_of(name: str, placement: Placement) -> str:
    """Reason why a placement of a plug-in package is invalid; empty if valid."""
    if name != name.lower():
        return f"short names are of small letters: {name.lower()}"
    return "" if placement.rules and placement.source else "it has no rules, or names no source"


PLACEMENTS: Registry[Placement] = Registry("placements", "placement", _BUILT_IN, lambda: Placement, _problem_of)
"""Short name of a provider → placement; ``cpu`` for other providers."""


def placement_for(ep: str | None) -> Placement:
    """Return the placement of a provider, by its short name, with the formats that the provider runs."""
    if ep is None or ep not in PLACEMENTS:
        return PLACEMENTS[CPU_PLACEMENT]
    from winml.modelkit.ort.quantized_formats import quantized_formats  # reads files

    return replace(PLACEMENTS[ep], formats=quantized_formats(ep))


def refused_precisions(ep: str | None) -> dict[str, str]:
    """Return name of a precision → reason why a provider runs it in no mode; ``""`` if it does.

    Precisions that no graph asks for are omitted.
    """
    from winml.modelkit.quantize.precisions import PRECISIONS

    placement = placement_for(ep)
    refusals: dict[str, str] = {}
    for name, precision in PRECISIONS.items():
        if placement.has_answer(precision):
            reasons = [placement.refusal(precision, mode) for mode in precision.modes]
            refusals[name] = reasons[0] if all(reasons) else ""
    return refusals
