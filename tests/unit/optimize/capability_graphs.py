"""Graphs for each capability: one that must change, and a similar one that must not.

Every graph is small, and its weights are distinct. ``near_miss`` names the difference in a word.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CapabilityCase:
    """Graphs and expected result of one capability."""

    capability: str
    graph: str
    made: str
    """Operators of the result, in alphabetical order; foreign operators with their domain."""
    near_miss: str
    opset: int = 17
    changes_numbers: bool = False

    @property
    def expected(self) -> list[str]:
        """Return the operators as a list."""
        return self.made.split()


def _matmul_graph(rest: str, extra: str = "") -> str:
    return f"m (float[2, 3] x{extra}) => (float[2, 4] y) <float[3, 4] w1, float[4] w2> {{ {rest} }}"


_CONV = "float[4, 3, 3, 3] w1, float[4] w2"


def _conv_graph(rest: str, weights: str = "", inputs: str = "") -> str:
    return f"m (float[1, 3, 6, 6] x{inputs}) => (float[1, 4, 4, 4] y) <{_CONV}{weights}> {{ {rest} }}"


_BATCH_NORM = ", float[4] w3, float[4] w4, float[4] mean = {0.1, 0.2, 0.3, 0.4}, float[4] var = {1, 2, 3, 4}"


def _reshape_graph(first: str, second: str) -> str:
    return f"""m (float[N, S, 8] x) => (float[A, B, C, D] y)
        <int64 i0 = {{0}}, int64 i1 = {{1}}, int64[1] axes = {{0}}, int64[2] tail = {{2, 4}}>
        {{ s = Shape (x) a = Gather (s, {first}) b = Unsqueeze (a, axes)
          t = Shape (x) c = Gather (t, {second}) d = Unsqueeze (c, axes)
          shape = Concat <axis = 0> (b, d, tail) y = Reshape (x, shape) }}"""


def _gelu_graph(root: str) -> str:
    return f"""m (float[2, 4] x) => (float[2, 4] y) <float root = {{{root}}}, float one = {{1}}, float half = {{0.5}}>
        {{ a = Div (x, root) b = Erf (a) c = Add (b, one) d = Mul (x, c) y = Mul (d, half) }}"""


def _layer_norm(axis: int) -> str:
    return f"""m (float[2, 3, 4] x) => (float[2, 3, 4] y)
        <float two = {{2}}, float epsilon = {{0.00001}}, float[4] w1, float[4] w2>
        {{ mean = ReduceMean <axes = [-1]> (x) d = Sub (x, mean) p = Pow (d, two) v = ReduceMean <axes = [{axis}]> (p)
          e = Add (v, epsilon) s = Sqrt (e) n = Div (d, s) g = Mul (n, w1) y = Add (g, w2) }}"""


def _fast_gelu(cubic: str) -> str:
    return f"""m (float[2, 4] x) => (float[2, 4] y) <float three = {{3}}, float c = {{{cubic}}},
            float root = {{0.7978845834732056}}, float one = {{1}}, float half = {{0.5}}>
        {{ p = Pow (x, three) q = Mul (p, c) s = Add (x, q) t = Mul (s, root) u = Tanh (t) v = Add (u, one)
          h = Mul (x, half) r = Mul (h, v) y = Abs (r) }}"""


def _gather_graph(third: str) -> str:
    return f"""m (float[2, 3] x) => (float[2] a, float[2] b, float[2] c)
        <int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{{third}}}>
        {{ a = Gather <axis = 1> (x, i0) b = Gather <axis = 1> (x, i1) c = Gather <axis = 1> (x, i2) }}"""


def _dynamic_quantized(scaled: str) -> str:
    return f"""m (float[2, 3] x) => (float[2, 4] y)
        <uint8[3, 4] b = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}, uint8 zero = {{5}}, float scale = {{0.5}}>
        {{ q, s, z = DynamicQuantizeLinear (x) i = MatMulInteger (q, b, z, zero) f = Cast <to = 1> (i)
          t = Mul (s, scale) y = {scaled} }}"""


def _quantized_graph(operator: str) -> str:
    return f"""m (uint8[2, 3] x) => (uint8[2, 3] y) <float scale = {{0.1}}, uint8 zero = {{10}}>
        {{ a = DequantizeLinear (x, scale, zero) b = {operator} (a) y = QuantizeLinear (b, scale, zero) }}"""


CASES = (
    CapabilityCase(
        "constant_folding",
        "m (float[2] x) => (float[2] y) <float[2] w1, float[2] w2> { c = Sub (w1, w2) y = Mul (x, c) }",
        "Mul",
        near_miss="m (float[2] x) => (float[2] y) <float[2] w1, float[2] w2> { c = Sub (x, w2) y = Mul (w1, c) }",
    ),
    CapabilityCase(
        "common_subexpression_elimination",
        "m (float[2] x) => (float[2] y) { a = Relu (x) b = Relu (x) y = Add (a, b) }",
        "Add Relu",
        near_miss="m (float[2] x) => (float[2] y) { a = Relu (x) b = Abs (x) y = Add (a, b) }",
    ),
    CapabilityCase(
        "noop_elimination",
        "m (float[2] x) => (float[2] y) <float zero = {0}> { a = Relu (x) b = Add (a, zero) y = Abs (b) }",
        "Abs Relu",
        near_miss="m (float[2] x) => (float[2] y) <float zero = {1}> { a = Relu (x) b = Add (a, zero) y = Abs (b) }",
    ),
    CapabilityCase("reshape_fusion", _reshape_graph("i0", "i1"), "Reshape", near_miss=_reshape_graph("i1", "i0")),
    CapabilityCase(
        "transpose_elimination",
        "m (float[2, 3] x) => (float[2, 3] y)"
        "{ a = Transpose <perm = [1, 0]> (x) b = Relu (a) y = Transpose <perm = [1, 0]> (b) }",
        "Relu",
        near_miss="m (float[2, 3] x) => (float[3, 2] y) { a = Relu (x) y = Transpose <perm = [1, 0]> (a) }",
    ),
    CapabilityCase(
        "gemm_sum_fusion",
        _matmul_graph("a = Gemm (x, w1) y = Sum (a, z)", ", float[2, 4] z"),
        "Gemm",
        near_miss=_matmul_graph("a = Gemm (x, w1, w2) y = Sum (a, z)", ", float[2, 4] z"),
    ),
    CapabilityCase(
        "gemm_transpose_fusion",
        "m (float[3, 2] x) => (float[2, 4] y) <float[3, 4] w1, float[4] w2> { a = Transpose (x) y = Gemm (a, w1, w2) }",
        "Gemm",
        near_miss=_matmul_graph("a = Relu (x) y = Gemm (a, w1, w2)"),
    ),
    CapabilityCase(
        "matmul_batch_norm_fusion",
        "m (float[2, 3] x) => (float[2, 4] y) <float[3, 4] w1"
        + _BATCH_NORM
        + "> { a = MatMul (x, w1) y = BatchNormalization (a, w3, w4, mean, var) }",
        "Gemm",
        near_miss="m (float[2, 3] x) => (float[2, 4] y, float[2, 4] a) <float[3, 4] w1"
        + _BATCH_NORM
        + "> { a = MatMul (x, w1) y = BatchNormalization (a, w3, w4, mean, var) }",
    ),
    CapabilityCase(
        "conv_batch_norm_fusion",
        _conv_graph("a = Conv (x, w1, w2) y = BatchNormalization (a, w3, w4, mean, var)", _BATCH_NORM),
        "Conv",
        near_miss=_conv_graph(
            "a = Conv (x, w1, w2) b = Relu (a) y = BatchNormalization (b, w3, w4, mean, var)", _BATCH_NORM
        ),
    ),
    CapabilityCase(
        "conv_add_fusion",
        _conv_graph("a = Conv (x, w1, w2) y = Add (a, w3)", ", float[1, 4, 1, 1] w3"),
        "Conv",
        near_miss=_conv_graph("a = Conv (x, w1, w2) y = Add (a, z)", inputs=", float[1, 4, 1, 1] z"),
    ),
    CapabilityCase(
        "conv_mul_fusion",
        _conv_graph("a = Conv (x, w1, w2) y = Mul (a, w3)", ", float[1, 4, 1, 1] w3"),
        "Conv",
        near_miss=_conv_graph("a = Conv (x, w1, w2) y = Mul (a, z)", inputs=", float[1, 4, 1, 1] z"),
    ),
    CapabilityCase(
        "pad_fusion",
        "m (float[1, 3, 4, 4] x) => (float[1, 4, 4, 4] y) <" + _CONV + ", int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}>"
        "{ a = Pad (x, pads) y = Conv <pads = [0, 0, 0, 0]> (a, w1, w2) }",
        "Conv",
        near_miss="m (float[1, 3, 4, 4] x) => (float[1, 4, 4, 4] y) <"
        + _CONV
        + ", int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}>"
        '{ a = Pad <mode = "reflect"> (x, pads) y = Conv <pads = [0, 0, 0, 0]> (a, w1, w2) }',
    ),
    CapabilityCase(
        "relu_clip_fusion",
        "m (float[4] x) => (float[4] y) <float low = {-1}, float high = {1.5}>{ a = Relu (x) y = Clip (a, low, high) }",
        "Clip",
        near_miss="m (float[4] x) => (float[4] y) <float low = {-1}, float high = {1.5}>"
        "{ a = Abs (x) y = Clip (a, low, high) }",
    ),
    CapabilityCase(
        "div_mul_fusion",
        "m (float[4] x, float[4] z) => (float[4] y) <float one = {1}> { a = Div (one, x) y = Mul (a, z) }",
        "Div",
        near_miss="m (float[4] x, float[4] z) => (float[4] y) <float one = {2}> { a = Div (one, x) y = Mul (a, z) }",
    ),
    CapabilityCase(
        "not_where_fusion",
        "m (float[4] x, float[4] z) => (float[4] y) { c = Less (x, z) n = Not (c) y = Where (n, x, z) }",
        "Less Where",
        near_miss="m (float[4] x, float[4] z) => (float[4] y, bool[4] n)"
        "{ c = Less (x, z) n = Not (c) y = Where (n, x, z) }",
        opset=15,  # ONNX Runtime 1.23 does not know the Where of opset 16 here
    ),
    CapabilityCase(
        "gelu_fusion", _gelu_graph("1.4142135381698608"), "com.microsoft:Gelu", near_miss=_gelu_graph("1.5")
    ),
    CapabilityCase("layer_norm_fusion", _layer_norm(-1), "LayerNormalization", near_miss=_layer_norm(1)),
    CapabilityCase(
        "fast_gelu_fusion",
        _fast_gelu("0.044714998453855515"),
        "Abs com.microsoft:FastGelu",
        near_miss=_fast_gelu("0.05"),
    ),
    CapabilityCase(
        "quick_gelu_fusion",
        "m (float[4] x) => (float[4] y) <float alpha = {1.702}> { a = Mul (x, alpha) s = Sigmoid (a) y = Mul (x, s) }",
        "com.microsoft:QuickGelu",
        near_miss="m (float[4] x, float[4] z) => (float[4] y) <float alpha = {1.702}>"
        "{ a = Mul (z, alpha) s = Sigmoid (a) y = Mul (x, s) }",
    ),
    CapabilityCase(
        "bias_gelu_fusion",
        "m (float[2, 3, 4] x) => (float[2, 3, 4] y) <float[4] w1> { a = Add (x, w1) y = com.microsoft.Gelu (a) }",
        "com.microsoft:BiasGelu",
        near_miss="m (float[2, 3, 4] x) => (float[2, 3, 4] y) <float[3, 4] w1>"
        "{ a = Add (x, w1) y = com.microsoft.Gelu (a) }",
    ),
    CapabilityCase(
        "skip_layer_norm_fusion",
        "m (float[2, 3, 4] x, float[2, 3, 4] z) => (float[2, 3, 4] y) <float[4] w1, float[4] w2>"
        "{ a = Add (x, z) y = LayerNormalization (a, w1, w2) }",
        "com.microsoft:SkipLayerNormalization",
        near_miss="m (float[2, 3, 4] x, float[2, 1, 1] z) => (float[2, 3, 4] y) <float[4] w1, float[4] w2>"
        "{ a = Add (x, z) y = LayerNormalization (a, w1, w2) }",
    ),
    CapabilityCase(
        "matmul_transpose_fusion",
        "m (float[2, 5, 3] x, float[2, 4, 3] z) => (float[2, 5, 4] y)"
        "{ a = Transpose <perm = [0, 2, 1]> (z) y = MatMul (x, a) }",
        "com.microsoft:FusedMatMul",
        near_miss="m (float[2, 5, 3] x, float[3, 2, 4] z) => (float[2, 5, 4] y)"
        "{ a = Transpose <perm = [1, 0, 2]> (z) b = Relu (a) y = MatMul (x, b) }",
    ),
    CapabilityCase(
        "conv_activation_fusion",
        _conv_graph("a = Conv (x, w1, w2) y = Relu (a)"),
        "com.microsoft:FusedConv",
        near_miss=_conv_graph("a = Conv (x, w1, w2) y = Sin (a)"),
    ),
    CapabilityCase("gather_fusion", _gather_graph("2"), "Split Squeeze Squeeze Squeeze", near_miss=_gather_graph("1")),
    CapabilityCase(
        "dynamic_quantize_matmul_fusion",
        _dynamic_quantized("Mul (f, t)"),
        "com.microsoft:DynamicQuantizeMatMul",
        near_miss=_dynamic_quantized("Add (f, t)"),
    ),
    CapabilityCase(
        "matmul_add_fusion",
        _matmul_graph("a = MatMul (x, w1) y = Add (a, w2)"),
        "Gemm",
        near_miss=_matmul_graph("a = MatMul (x, w1) b = Add (a, w2) y = Mul (a, b)"),
    ),
    CapabilityCase(
        "matmul_scale_fusion",
        "m (float[2, 3] x, float[3, 4] z) => (float[2, 4] y) <float half = {0.5}>"
        "{ a = MatMul (x, z) y = Mul (a, half) }",
        "com.microsoft:FusedMatMul",
        near_miss="m (float[2, 3] x, float[3, 4] z, float half) => (float[2, 4] y)"
        "{ a = MatMul (x, z) y = Mul (a, half) }",
    ),
    CapabilityCase(
        "gemm_activation_fusion",
        _matmul_graph("a = Gemm (x, w1, w2) y = Relu (a)"),
        "com.microsoft:FusedGemm",
        near_miss=_matmul_graph("a = Gemm (x, w1, w2) y = Sin (a)"),
    ),
    CapabilityCase(
        "gelu_approximation",
        "m (float[2, 4] x) => (float[2, 4] y) { y = com.microsoft.Gelu (x) }",
        "com.microsoft:FastGelu",
        near_miss="m (float[2, 4] x) => (float[2, 4] y) { y = com.microsoft.QuickGelu (x) }",
        changes_numbers=True,
    ),
    CapabilityCase(
        "quantized_operator_fusion",
        _quantized_graph("Sigmoid"),
        "com.microsoft:QLinearSigmoid",
        near_miss=_quantized_graph("Sin"),
    ),
    CapabilityCase(
        "nchwc_layout",
        "m (float[1, 3, 6, 6] x) => (float[1, 32, 4, 4] y) <float[32, 3, 3, 3] w1> { y = Conv (x, w1) }",
        "com.microsoft.nchwc:Conv com.microsoft.nchwc:ReorderOutput",
        near_miss="m (float[1, 3, 6] x) => (float[1, 32, 4] y) <float[32, 3, 3] w1> { y = Conv (x, w1) }",
    ),
)
