"""Files of other tools, of the kinds that users report, through every verb: each result is compared with its source.

A model is a graph as a tool writes it. ONNX Runtime runs the source and the result of each verb on the same inputs,
without winml. Verbs without a result have to end with one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from winml.modelkit import (
    compare_models,
    compile_model,
    diff_models,
    extract_modules,
    inspect_model,
    optimize_model,
    profile_model,
    quantize_model,
)
from winml.modelkit.errors import WinMLError

Feeds = Mapping[str, Any]

RIGHT = "right"
NO_MODULES = "the nodes have no module information"
NO_WEIGHT = "no node reads a float32, float16 or bfloat16 weight"
NO_NODE = {"dynamic": NO_WEIGHT, "qdq": NO_WEIGHT, "int4": NO_WEIGHT, "fp16": "no selected node has a weight"}
QUANTIZATIONS = ("dynamic", "qdq", "int4", "fp16")
NO_VALUES = {"compare": "no random values", "perf": "only arrays", "qdq": "random values for calibration"}
ALREADY = "the graph is already quantized"


@dataclass(frozen=True)
class Foreign:
    """A model, its inputs, and the steps that are refused."""

    write: Callable[[Path], None]
    feeds: Callable[[np.random.Generator], Feeds]
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Step → part of the reason."""
    module: str = ""
    """A module to extract; empty if no node names its module."""
    reference: Callable[[Path], None] | None = None
    """The same model as ONNX Runtime runs it, if it does not run the source."""
    is_drawn: bool = False
    """True if the outputs are drawn, so that values cannot be compared."""


def parsed(
    body: str, *, opset: int = 17, ir_version: int = 8, domains: str = "", functions: str = ""
) -> Callable[[Path], None]:
    """Return a function that saves a graph in ONNX's text; weights ``w…`` get random values of their shape."""

    def write(path: Path) -> None:
        header = f'<ir_version: {ir_version}, opset_import: ["" : {opset}{domains}]>'
        onnx.save(with_weights(onnx.parser.parse_model(f"{header}\n{body}\n{functions}")), path)

    return write


def with_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fill the weights ``w…`` of a graph and its subgraphs."""
    generator = np.random.default_rng(0)

    def fill(graph: onnx.GraphProto) -> None:
        weights = [value for value in graph.value_info if value.name.startswith("w")]
        for value in weights:
            tensor = value.type.tensor_type
            values = generator.standard_normal([size.dim_value for size in tensor.shape.dim]) / 4
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            graph.initializer.append(numpy_helper.from_array(values.astype(dtype), value.name))
            graph.value_info.remove(value)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    fill(attribute.g)

    fill(model.graph)
    return model


def floats(*shape: int, name: str = "x", dtype: Any = np.float32) -> Callable[[np.random.Generator], Feeds]:
    """Return a function that draws one input."""
    return lambda generator: {name: (generator.standard_normal(shape) / 2).astype(dtype)}


SILERO = """g (float[b, n] input, float[2, b, 32] state, int64 sr) => (float[b, 1] output, float[2, b, 32] stateN)
<int64 high = {16000}, int64[1] one = {1}, int64[1] zero = {0}> {
    is_high = Equal (sr, high)
    output, stateN = If (is_high) <
        then_branch = rate16 () => (float[b, 1] o1, float[2, b, 32] s1)
        <float[32, 1, 16] w16, float[1, 128, 32] wi16, float[1, 128, 32] wr16, float[32, 1] wo16> {
            framed = Unsqueeze (input, one)
            features = Conv <strides = [8]> (framed, w16)
            active = Relu (features)
            steps = Transpose <perm = [2, 0, 1]> (active)
            h, c = Split <axis = 0, num_outputs = 2> (state)
            all, h_n, c_n = LSTM <hidden_size = 32> (steps, wi16, wr16, , , h, c)
            last = Squeeze (h_n, zero)
            score = MatMul (last, wo16)
            o1 = Sigmoid (score)
            s1 = Concat <axis = 0> (h_n, c_n)
        },
        else_branch = rate8 () => (float[b, 1] o2, float[2, b, 32] s2)
        <float[32, 1, 8] w8, float[1, 128, 32] wi8, float[1, 128, 32] wr8, float[32, 1] wo8> {
            framed8 = Unsqueeze (input, one)
            features8 = Conv <strides = [4]> (framed8, w8)
            active8 = Relu (features8)
            steps8 = Transpose <perm = [2, 0, 1]> (active8)
            h8, c8 = Split <axis = 0, num_outputs = 2> (state)
            all8, h_n8, c_n8 = LSTM <hidden_size = 32> (steps8, wi8, wr8, , , h8, c8)
            last8 = Squeeze (h_n8, zero)
            score8 = MatMul (last8, wo8)
            o2 = Sigmoid (score8)
            s2 = Concat <axis = 0> (h_n8, c_n8)
        }
    >
}"""
GNN = """g (float[nodes, 16] x, int64[2, edges] edge_index) => (float[nodes, 8] y)
<float[16, 32] w1, float[32, 8] w2, int64 zero = {0}, int64 one = {1}, int64[1] axis = {1}> {
    source = Gather <axis = 0> (edge_index, zero)
    target = Gather <axis = 0> (edge_index, one)
    h = MatMul (x, w1)
    messages = Gather <axis = 0> (h, source)
    places = Unsqueeze (target, axis)
    shape = Shape (messages)
    index = Expand (places, shape)
    size = Shape (h)
    empty = ConstantOfShape (size)
    sums = ScatterElements <axis = 0, reduction = "add"> (empty, index, messages)
    active = Relu (sums)
    y = MatMul (active, w2)
}"""
BAG = """g (int64[entries] ids, int64[bags] offsets) => (float[bags, 16] y)
<float[50, 16] w, int64[1] zero = {0}, int64[1] one = {1}, int64 first = {0}, bool true = {1}> {
    entries = Shape (ids)
    ends_of_all = Concat <axis = 0> (offsets, entries)
    far = Constant <value = int64[1] {9223372036854775807}> ()
    ends = Slice (ends_of_all, one, far)
    count0 = Shape (offsets)
    count = Gather (count0, first)
    y = Loop (count, true) <body = body (int64 i, bool go) => (bool again, float[16] mean) {
        again = Identity (go)
        begin0 = Gather (offsets, i)
        end0 = Gather (ends, i)
        begin = Unsqueeze (begin0, zero)
        end = Unsqueeze (end0, zero)
        bag = Slice (ids, begin, end, zero)
        rows = Gather (w, bag)
        mean = ReduceMean <axes = [0], keepdims = 0> (rows)
    }>
}"""
OCR = """g (float[p2o_DynamicDimension_0, 3, 48, p2o_DynamicDimension_1] x) => (float[a, t, 20] softmax_0)
<float[16, 3, 3, 3] w1, float[16] s1 = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, float[16] wb1, float[16] wm1,
 float[16] v1 = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, float[16, 1, 3, 3] w2, float[16, 16, 1, 1] w3,
 float[16, 20] w4, float[20] w5, float three = {3}, float six = {6}> {
    c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w1)
    n = BatchNormalization (c, s1, wb1, wm1, v1)
    shifted = Add (n, three)
    clipped = Clip (shifted, , six)
    gate = Mul (n, clipped)
    swish = Div (gate, six)
    d = Conv <group = 16, pads = [1, 1, 1, 1]> (swish, w2)
    scale = GlobalAveragePool (d)
    squeezed = Conv (scale, w3)
    hard = HardSigmoid <alpha = 0.2> (squeezed)
    excited = Mul (d, hard)
    pooled = AveragePool <kernel_shape = [24, 2], strides = [24, 2]> (excited)
    flat = Squeeze <axes = [2]> (pooled)
    rows = Transpose <perm = [0, 2, 1]> (flat)
    scores = MatMul (rows, w4)
    logits = Add (scores, w5)
    softmax_0 = Softmax <axis = 2> (logits)
}"""
TREES = """g (float[N, 4] X) => (int64[N] output_label, seq(map(int64, float)) output_probability) {
    scaled = ai.onnx.ml.Scaler <offset = [0.1, 0.2, 0.3, 0.4], scale = [1.5, 0.5, 2.0, 1.0]> (X)
    label, raw = ai.onnx.ml.LinearClassifier <classlabels_ints = [0, 1, 2], post_transform = "SOFTMAX",
        coefficients = [1.0, -0.5, 0.25, 0.1, -1.0, 0.5, 0.3, 0.2, 0.1, 0.9, -0.4, 0.7],
        intercepts = [0.1, 0.0, -0.1]> (scaled)
    probabilities = ai.onnx.ml.Normalizer <norm = "L1"> (raw)
    output_label = Cast <to = 7> (label)
    output_probability = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2]> (probabilities)
}"""
TEXT_COLUMNS = """g (string[N, 1] colour, float[N, 1] size) => (float[N, 8] y)
<float[4, 8] w, int64[2] shape = {-1, 3}> {
    coded = ai.onnx.ml.OneHotEncoder <cats_strings = ["red", "green", "blue"], zeros = 1> (colour)
    flat = Reshape (coded, shape)
    both = Concat <axis = 1> (flat, size)
    y = MatMul (both, w)
}"""
OLD_INPUTS = """g (float[b, 16] x, float[16, 32] w1, float[32] w2, float[32, 8] w3) => (float[b, 8] y)
<float[16, 32] w1, float[32] w2, float[32, 8] w3> {
    h = MatMul (x, w1)
    s = Add (h, w2)
    a = Relu (s)
    y = MatMul (a, w3)
}"""
HALF = """g (float16[b, 8, 16] x) => (float16[b, 8, 8] y) <float16[16, 8] w, float16[8, 8] w2> {
    t = Transpose <perm = [0, 2, 1]> (x)
    m = MatMul (t, w2)
    u = Transpose <perm = [0, 2, 1]> (m)
    y = MatMul (u, w)
}"""
OPSET_6 = """g (float[1, 3, 8, 8] x) => (float[1, 10] y)
<float[4, 3, 3, 3] w1, float[4] w2, float[4] s = {1, 1.5, 2, 1}, float[4] b = {0.1, 0.2, 0.3, 0.4},
 float[4] m = {0, 0.1, 0, 0.2}, float[4] v = {1, 2, 1, 0.5}, float[10, 64] w3, float[10] w4, int64[2] shape = {1, -1}> {
    c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
    shifted = Add <axis = 1, broadcast = 1> (c, w2)
    n = BatchNormalization <is_test = 1> (shifted, s, b, m, v)
    r = Relu (n)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    d = Dropout <is_test = 1> (p)
    f = Reshape (d, shape)
    y = Gemm <transB = 1, broadcast = 1> (f, w3, w4)
}"""
OPSET_7 = OPSET_6.replace("Add <axis = 1, broadcast = 1>", "Add").replace("float[4] w2", "float[4, 1, 1] w2")
OPSET_7 = OPSET_7.replace(" <is_test = 1>", "").replace(", broadcast = 1", "")
LOOP = """g (float[b, 16] x, int64 n) => (float[b, 16] y, float[n, b, 16] steps) <bool true = {1}> {
    y, steps = Loop (n, true, x) <body = body (int64 i, bool go, float[b, 16] h)
    => (bool again, float[b, 16] next, float[b, 16] seen)
    <float[16, 16] w> {
        again = Identity (go)
        m = MatMul (h, w)
        next = Tanh (m)
        seen = Identity (next)
    }>
}"""
SCAN = """g (float[t, b, 16] x, float[b, 16] h0) => (float[b, 16] last, float[t, b, 16] all) {
    last, all = Scan <num_scan_inputs = 1, body = body (float[b, 16] h, float[b, 16] xt)
    => (float[b, 16] next, float[b, 16] out)
    <float[16, 16] wx, float[16, 16] wh> {
        a = MatMul (xt, wx)
        r = MatMul (h, wh)
        s = Add (a, r)
        next = Tanh (s)
        out = Identity (next)
    }> (h0, x)
}"""
SEQUENCE = """g (float[b, 16] x) => (seq(float[b, 8]) y) <float[16, 16] w, int64 parts = {8}> {
    h = MatMul (x, w)
    y = SplitToSequence <axis = 1> (h, parts)
}"""
SEQUENCE_LOOP = """g (float[b, 16] x, int64 n) => (float[m, 16] y) <bool true = {1}, float[16, 16] w> {
    empty = SequenceEmpty ()
    rows, h = Loop (n, true, empty, x) <body = body (int64 i, bool go, seq(float[b, 16]) s, float[b, 16] v)
        => (bool again, seq(float[b, 16]) longer, float[b, 16] next) {
        again = Identity (go)
        m0 = MatMul (v, w)
        next = Tanh (m0)
        longer = SequenceInsert (s, next)
    }>
    y = ConcatFromSequence <axis = 0> (rows)
}"""
SEQUENCE_INPUT = """g (seq(float[b, 16]) rows) => (float[m, 8] y) <float[16, 8] w> {
    x = ConcatFromSequence <axis = 0> (rows)
    y = MatMul (x, w)
}"""
MAP_INPUT = """g (map(string, float) row) => (float[1, 8] y) <float[2, 8] w> {
    x = ai.onnx.ml.DictVectorizer <string_vocabulary = ["age", "size"]> (row)
    y = MatMul (x, w)
}"""
OPTIONAL = """g (float[b, 16] x) => (float[b, 8] y, bool has) <float[16, 8] w> {
    h = MatMul (x, w)
    o = Optional (h)
    has = OptionalHasElement (o)
    y = OptionalGetElement (o)
}"""
TEXTS = """g (string[n] text) => (string[m] words, int64[m] ids) {
    words = StringNormalizer <case_change_action = "LOWER", is_case_sensitive = 0, locale = "C",
        stopwords = ["the"]> (text)
    ids = ai.onnx.ml.LabelEncoder <keys_strings = ["cat", "dog"], values_int64s = [1, 2], default_int64 = 0> (words)
}"""
FUNCTIONS = """g (float[b, 16] x) => (float[b, 8] y) <float[16, 32] w1, float[32] w2, float[32, 8] w3, float[8] w4> {
    h = pkg.Dense <slope = 0.1> (x, w1, w2)
    y = pkg.Dense <slope = 0.3> (h, w3, w4)
}"""
DENSE = """<domain: "pkg", opset_import: ["" : 17]> Dense <slope> (x, w, b) => (y) {
    m = MatMul (x, w)
    s = Add (m, b)
    y = LeakyRelu <alpha: float = @slope> (s)
}"""
KERAS = """g (float[unk__1, 8, 8, 3] input_1) => (float[unk__1, 10] dense) {
    w1 = Constant <value = float[8, 3, 3, 3] {0}> ()
    w2 = Constant <value = float[128, 10] {0}> ()
    shape = Constant <value = int64[2] {-1, 128}> ()
    nchw = Transpose <perm = [0, 3, 1, 2]> (input_1)
    c = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (nchw, w1)
    r = Relu (c)
    nhwc = Transpose <perm = [0, 2, 3, 1]> (r)
    f = Reshape (nhwc, shape)
    dense = MatMul (f, w2)
}"""
DETECTOR = """g (float[1, 3, 32, 32] images) => (int64[k, 3] selected, float[1, 64, 4] boxes)
<float[5, 3, 4, 4] w1, int64[1] four = {4}, int64[1] zero = {0}, int64[1] five = {5}, int64[1] axis = {2},
 int64[3] shape = {1, 5, 64}, int64 most = {10}, float iou = {0.5}, float score = {0.1}> {
    p = Conv <strides = [4, 4]> (images, w1)
    flat = Reshape (p, shape)
    rows = Transpose <perm = [0, 2, 1]> (flat)
    raw = Slice (rows, zero, four, axis)
    boxes = Sigmoid (raw)
    scores0 = Slice (rows, four, five, axis)
    scores1 = Transpose <perm = [0, 2, 1]> (scores0)
    scores = Sigmoid (scores1)
    selected = NonMaxSuppression (boxes, scores, most, iou, score)
}"""
CACHED = """g (float[1, s, 16] x, float[1, p, 16] past) => (float[1, s, 16] y, float[1, t, 16] present)
<float[16, 16] w> {
    k = MatMul (x, w)
    present = Concat <axis = 1> (past, k)
    kt = Transpose <perm = [0, 2, 1]> (present)
    scores = MatMul (x, kt)
    weights = Softmax <axis = -1> (scores)
    y = MatMul (weights, present)
}"""
TWO_PRODUCTS = """g (float[b, 64] x) => (float[b, 32] y) <float[64, 64] w1, float[64, 32] w2> {
    h = MatMul (x, w1)
    r = Relu (h)
    y = MatMul (r, w2)
}"""
DOUBLE = """g (double[b, 16] x) => (double[b, 8] y) <double[16, 8] w> { y = MatMul (x, w) }"""
RANDOM_GRAPH = """g (float[b, 16] x) => (float[b, 8] y) <float[16, 8] w> {
    noise = RandomNormalLike (x)
    s = Add (x, noise)
    y = MatMul (s, w)
}"""
CONSTANT_OUTPUT = """g () => (float[2, 8] y) <float[2, 4] x = {1, 2, 3, 4, 5, 6, 7, 8}, float[4, 8] w> {
    y = MatMul (x, w)
}"""
PASSED = """g (float[b, 16] x, int64[b] ids) => (float[b, 8] y, int64[b] ids_out, float[b, 8] again) <float[16, 8] w> {
    y = MatMul (x, w)
    ids_out = Identity (ids)
    again = Identity (y)
}"""
GRU = """g (float[t, b, 16] x, int32[b] lengths) => (float[t, 2, b, 32] y)
<float[2, 96, 16] wi, float[2, 96, 32] wr, float[2, 192] wb> {
    y, last = GRU <hidden_size = 32, direction = "bidirectional", linear_before_reset = 1> (x, wi, wr, wb, lengths)
}"""
EINSUM = """g (float[b, s, 16] x) => (float[b, s, 8] y) <float[16, 2, 8] w, float[2, 8, 8] w2> {
    heads = Einsum <equation = "bsd,dhk->bshk"> (x, w)
    y = Einsum <equation = "bshk,hko->bso"> (heads, w2)
}"""


def base_network(path: Path) -> None:
    """Save the network that other quantizers change."""
    parsed("""g (float[b, 3, 8, 8] x) => (float[b, 10] y)
        <float[8, 3, 3, 3] w1, float[8] b1 = {0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7}, float[128, 10] w2,
         int64[2] shape = {-1, 128}> {
        c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w1, b1)
        r = Relu (c)
        f = Reshape (r, shape)
        y = MatMul (f, w2)
    }""")(path)
    model = onnx.load(path)
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{number}"
    onnx.save(model, path)


def quantized_by_onnxruntime(form: str) -> Callable[[Path], None]:
    """Return a function that saves a file of ONNX Runtime's quantizer."""

    def write(path: Path) -> None:
        from onnxruntime.quantization import (
            CalibrationDataReader,
            QuantFormat,
            QuantType,
            quantize_dynamic,
            quantize_static,
        )

        source = path.with_name("float.onnx")
        base_network(source)
        if form == "dynamic":
            # ONNX Runtime 1.23 has no kernel of ConvInteger for signed weights.
            quantize_dynamic(source, path, weight_type=QuantType.QUInt8)
            return

        class Reader(CalibrationDataReader):
            def __init__(self) -> None:
                generator = np.random.default_rng(1)
                self.rows = iter([{"x": generator.standard_normal((1, 3, 8, 8)).astype(np.float32)}] * 2)

            def get_next(self) -> Any:
                return next(self.rows, None)

        formats = {"qdq": QuantFormat.QDQ, "operators": QuantFormat.QOperator}
        quantize_static(source, path, Reader(), quant_format=formats[form], per_channel=True)

    return write


def int4_of_onnxruntime(path: Path) -> None:
    """Save a file with MatMulNBits by ONNX Runtime's quantizer."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    parsed(TWO_PRODUCTS)(path)
    quantizer = MatMulNBitsQuantizer(onnx.load(path), block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))


def with_external_data(path: Path) -> None:
    """Save a network whose weights are in a file below a folder, with a name that is not plain."""
    parsed(GNN, opset=18)(path)
    (path.parent / "Gewichte 1").mkdir(exist_ok=True)
    model = onnx.load(path)
    onnx.external_data_helper.convert_model_to_external_data(model, location="Gewichte 1/däta.bin", size_threshold=0)
    onnx.save(model, path)


def with_nameless_nodes(path: Path) -> None:
    """Save a network with nodes without names, and names of values that are no identifiers."""
    base_network(path)
    model = onnx.load(path)
    for node in model.graph.node:
        node.name = ""
        for names in (node.input, node.output):
            names[:] = [f"a/b:0 {name} é" if name not in ("x", "y") else name for name in names]
    for tensor in model.graph.initializer:
        tensor.name = f"a/b:0 {tensor.name} é"
    onnx.save(model, path)


def keras_network(path: Path) -> None:
    """Save a network whose weights are constants, as tf2onnx writes it."""
    parsed(KERAS, opset=13)(path)
    model, generator = onnx.load(path), np.random.default_rng(0)
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0].startswith("w"):
            tensor = node.attribute[0].t
            tensor.CopyFrom(
                numpy_helper.from_array(generator.standard_normal(list(tensor.dims)).astype(np.float32) / 4)
            )
    onnx.save(model, path)


def sparse_weight(path: Path) -> None:
    """Save a network with a sparse constant."""
    values = helper.make_tensor("v", TensorProto.FLOAT, [3], [1.0, -2.0, 0.5])
    indices = helper.make_tensor("i", TensorProto.INT64, [3], [3, 50, 99])
    sparse = helper.make_sparse_tensor(values, indices, [16, 8])
    nodes = [
        helper.make_node("Constant", [], ["w"], sparse_value=sparse),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["b", 16])],
        [helper.make_tensor_value_info("y", 1, ["b", 8])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def encoder_of_torch(path: Path) -> None:
    """Save an encoder with a padding mask by torch's TorchScript exporter."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    inputs = (torch.randn(2, 5, 16), None, torch.arange(5)[None] >= torch.tensor([[5], [3]]))
    axes = {name: {0: "b", 1: "t"} for name in ("src", "pad")}
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself
            torch.onnx.export(
                encoder, inputs, path, input_names=[*axes], dynamic_axes=axes, dynamo=False, opset_version=17
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)


def _silero(generator: np.random.Generator) -> Feeds:
    values = generator.standard_normal
    return {"input": values((1, 512)).astype("f"), "state": values((2, 1, 32)).astype("f"), "sr": np.array(16000)}


def _graph_of_nodes(generator: np.random.Generator) -> Feeds:
    return {"x": generator.standard_normal((6, 16)).astype("f"), "edge_index": generator.integers(0, 6, (2, 9))}


def _bags(generator: np.random.Generator) -> Feeds:
    return {"ids": generator.integers(0, 50, 12), "offsets": np.array([0, 4, 7])}


MODELS: dict[str, Foreign] = {
    "silero": Foreign(parsed(SILERO, opset=18), _silero, refusals={"int4": "the quantized file is not smaller"}),
    "graph network": Foreign(parsed(GNN, opset=18), _graph_of_nodes),
    "embedding bag": Foreign(parsed(BAG), _bags),
    "encoder with padding mask": Foreign(
        encoder_of_torch,
        lambda generator: {
            "src": generator.standard_normal((2, 5, 16)).astype("f"),
            "pad": np.arange(5)[None] >= np.array([[5], [3]]),
        },
        module="layers.0.self_attn",
    ),
    "text recognition": Foreign(parsed(OCR, opset=11, ir_version=7), floats(1, 3, 48, 320)),
    "classifier with maps": Foreign(
        parsed(TREES, domains=', "ai.onnx.ml" : 1', opset=15), floats(5, 4, name="X"), refusals=NO_NODE
    ),
    "columns of text": Foreign(
        parsed(TEXT_COLUMNS, domains=', "ai.onnx.ml" : 1', opset=15),
        lambda generator: {
            "colour": np.array([["red"], ["blue"], ["?"]], object),
            "size": generator.random((3, 1), np.float32),
        },
    ),
    "weights as inputs": Foreign(parsed(OLD_INPUTS, opset=9, ir_version=3), floats(2, 16)),
    "half precision": Foreign(
        parsed(HALF), floats(2, 8, 16, dtype=np.float16), refusals={"fp16": "already has float16 weights"}
    ),
    "opset 6": Foreign(
        parsed(OPSET_6, opset=6, ir_version=3),
        floats(1, 3, 8, 8),
        reference=parsed(OPSET_7, opset=8, ir_version=3),
        refusals=dict.fromkeys(("compare", "perf"), "Could not find an implementation"),
    ),
    "loop": Foreign(
        parsed(LOOP), lambda generator: {"x": generator.standard_normal((2, 16)).astype("f"), "n": np.array(3)}
    ),
    "scan": Foreign(
        parsed(SCAN),
        lambda generator: {
            "x": generator.standard_normal((4, 2, 16)).astype("f"),
            "h0": generator.standard_normal((2, 16)).astype("f"),
        },
    ),
    "sequence": Foreign(parsed(SEQUENCE), floats(2, 16)),
    "sequence in a loop": Foreign(
        parsed(SEQUENCE_LOOP), lambda generator: {"x": generator.standard_normal((2, 16)).astype("f"), "n": np.array(3)}
    ),
    "optional": Foreign(parsed(OPTIONAL, opset=18), floats(2, 16)),
    "texts": Foreign(
        parsed(TEXTS, domains=', "ai.onnx.ml" : 2', opset=15),
        lambda _: {"text": np.array(["The", "Cat", "dog"], object)},
        refusals=NO_NODE,
    ),
    "qdq of onnxruntime": Foreign(
        quantized_by_onnxruntime("qdq"), floats(2, 3, 8, 8), refusals=dict.fromkeys(QUANTIZATIONS, ALREADY)
    ),
    "integer operators of onnxruntime": Foreign(
        quantized_by_onnxruntime("operators"), floats(2, 3, 8, 8), refusals=dict.fromkeys(QUANTIZATIONS, ALREADY)
    ),
    "dynamic int8 of onnxruntime": Foreign(
        quantized_by_onnxruntime("dynamic"), floats(2, 3, 8, 8), refusals=dict.fromkeys(QUANTIZATIONS, ALREADY)
    ),
    "int4 of onnxruntime": Foreign(
        int4_of_onnxruntime, floats(2, 64), refusals=dict.fromkeys(("dynamic", "qdq", "int4"), ALREADY)
    ),
    "external data": Foreign(with_external_data, _graph_of_nodes),
    "functions": Foreign(parsed(FUNCTIONS, domains=', "pkg" : 1', functions=DENSE), floats(2, 16)),
    "names that are no identifiers": Foreign(with_nameless_nodes, floats(2, 3, 8, 8)),
    "weights in constants": Foreign(keras_network, floats(2, 8, 8, 3, name="input_1")),
    "sparse weight": Foreign(sparse_weight, floats(2, 16)),
    "detector": Foreign(
        parsed(DETECTOR),
        floats(1, 3, 32, 32, name="images"),
        refusals=dict.fromkeys(("dynamic", "int4"), "does not support Conv")
        | dict.fromkeys(("qdq", "fp16"), "selected has an SQNR"),
    ),
    "empty cache": Foreign(
        parsed(CACHED),
        lambda generator: {
            "x": generator.standard_normal((1, 3, 16)).astype("f"),
            "past": np.zeros((1, 0, 16), np.float32),
        },
    ),
    "double precision": Foreign(
        parsed(DOUBLE),
        floats(2, 16, dtype=np.float64),
        refusals=dict.fromkeys(QUANTIZATIONS, "the weights are float64"),
    ),
    "noise": Foreign(
        parsed(RANDOM_GRAPH),
        floats(2, 16),
        is_drawn=True,
        refusals={"compare": "generates random numbers"},
    ),
    "no inputs": Foreign(parsed(CONSTANT_OUTPUT), lambda _: {}, refusals=NO_NODE | {"fp16": NO_WEIGHT}),
    "inputs that pass through": Foreign(
        parsed(PASSED), lambda generator: {"x": generator.standard_normal((2, 16)).astype("f"), "ids": np.array([3, 4])}
    ),
    "bidirectional recurrence": Foreign(
        parsed(GRU),
        lambda generator: {
            "x": generator.standard_normal((4, 2, 16)).astype("f"),
            "lengths": np.array([4, 2], np.int32),
        },
        refusals=dict.fromkeys(("dynamic", "qdq", "int4"), "does not support GRU"),
    ),
    "rows of maps": Foreign(
        parsed(MAP_INPUT, domains=', "ai.onnx.ml" : 1', opset=11),
        lambda _: {"row": {"size": 2.0, "age": -1.0}},
        refusals=NO_VALUES,
    ),
    "sequence as an input": Foreign(
        parsed(SEQUENCE_INPUT),
        lambda generator: {"rows": [generator.standard_normal((2, 16)).astype("f") for _ in range(3)]},
        refusals=NO_VALUES,
    ),
    "sums of products": Foreign(
        parsed(EINSUM), floats(2, 3, 16), refusals=dict.fromkeys(("dynamic", "qdq", "int4"), "does not support Einsum")
    ),
}


QUANTIZED = {
    "dynamic": {"precision": "int8", "mode": "dynamic"},
    "qdq": {"precision": "int8", "mode": "qdq"},
    "int4": {"precision": "int4"},
    "fp16": {"precision": "fp16"},
}
LEAST_DB = {"optimize": 80, "compile": 80, "dynamic": 25, "qdq": 15, "int4": 10, "fp16": 50}
"""Step that writes a file → smallest SQNR of its outputs. Chosen: sums of float32 in another order have 100 dB; a layer
of random weights has 35, 20 and 65 dB in 8, 4 and 16 bits."""


EQUAL_DB = 200.0


def write_result(step: str, source: Path, output: Path) -> None:
    """Run a step that writes a file."""
    if step == "optimize":
        optimize_model(source, output, level="full")
    elif step == "compile":
        compile_model(source, output, ep="cpu")
    else:
        quantize_model(source, output, **QUANTIZED[step])


def run(path: Path, feeds: Feeds) -> list[Any]:
    """Run a file; return its tensors, and keys and values of its maps in order."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return list(tensors_of(onnxruntime.InferenceSession(path, options).run(None, dict(feeds))))


def tensors_of(value: Any) -> Iterator[Any]:
    """Yield the tensors of sequences and maps."""
    if isinstance(value, Mapping):
        yield from (np.asarray([*part]) for part in (value.keys(), value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from tensors_of(part)
    else:
        yield np.asarray(value)


def similarity_db(expected: Any, actual: Any) -> float:
    """Return the SQNR of a tensor; integers and text are equal, or have 0 dB."""
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return 0.0
    if expected.dtype.kind != "f":
        return EQUAL_DB if np.array_equal(expected, actual) else 0.0
    signal, noise = (np.square(v.astype(np.float64)).sum() for v in (expected, expected - actual))
    return float(10 * np.log10(signal / noise)) if noise else EQUAL_DB


def outcome_of(step: str, model: Foreign, folder: Path, expected: list[Any], feeds: Feeds) -> str:
    """Run a step; return ``right``, the reason of a refusal, or what is wrong with the result."""
    source, output = folder / "model.onnx", folder / f"{step}.onnx"
    try:
        if step in LEAST_DB:
            write_result(step, source, output)
            actual = run(output, feeds)
            least = min([EQUAL_DB, *map(similarity_db, expected, actual)])
            is_right = len(expected) == len(actual) and (model.is_drawn or least >= LEAST_DB[step])
            return RIGHT if is_right else f"{least:.0f} dB"
        if step == "inspect":
            return RIGHT if inspect_model(source).total.nodes else "no nodes"
        if step == "diff":
            return RIGHT if diff_models(source, source).is_same else "differs from itself"
        if step == "compare":
            least = compare_models(source, source).worst.fidelity.sqnr_db
            return RIGHT if least >= LEAST_DB["optimize"] else f"{least:.0f} dB"
        if step == "perf":
            return RIGHT if profile_model(source, iterations=1) else "no runs"
        return RIGHT if extract_modules(source, model.module or "Conv", folder / "modules").modules else "no modules"
    except WinMLError as error:
        return error.message


STEPS = ("inspect", "compare", "perf", "extract", "diff", *LEAST_DB)


@pytest.mark.parametrize("name", MODELS)
def test_every_verb_takes_the_model_or_says_why_not(name: str, tmp_path: Path) -> None:
    """Each step gives a right result, or the reason that the table states."""
    model = MODELS[name]
    model.write(tmp_path / "model.onnx")
    reference = tmp_path / "reference" / "model.onnx"
    reference.parent.mkdir()
    (model.reference or model.write)(reference)
    feeds = model.feeds(np.random.default_rng(3))
    expected = run(reference, feeds)
    refusals = {} if model.module else {"extract": NO_MODULES}
    refusals.update(model.refusals)
    outcomes = {step: outcome_of(step, model, tmp_path, expected, feeds) for step in STEPS}
    wrong = {step: outcome for step, outcome in outcomes.items() if refusals.get(step, RIGHT) not in outcome}
    assert {} == wrong
