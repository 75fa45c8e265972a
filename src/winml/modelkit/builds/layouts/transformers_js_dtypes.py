"""Dtypes of transformers.js, with the precision of the weights that winml writes for each."""

from __future__ import annotations

from collections.abc import Mapping

from winml.modelkit.builds.layouts.layout import Dtype
from winml.modelkit.quantize.precisions import FLOAT16, INT4, INT8

_NO_OPERATOR = "ONNX Runtime has no operator with weights of one bit"
DTYPES: Mapping[str, Dtype] = {
    "fp32": Dtype(""),
    "fp16": Dtype("_fp16", FLOAT16),
    "q8": Dtype("_quantized", INT8),
    "int8": Dtype("_int8", INT8),
    "uint8": Dtype("_uint8", "uint8"),
    "q4": Dtype("_q4", INT4),
    "q4f16": Dtype("_q4f16", FLOAT16, of="q4"),
    "q2": Dtype("_q2", "int2"),
    "q2f16": Dtype("_q2f16", FLOAT16, of="q2"),
    "bnb4": Dtype("_bnb4", "nf4"),
    "q1": Dtype("_q1", unwritable=_NO_OPERATOR),
    "q1f16": Dtype("_q1f16", unwritable=_NO_OPERATOR),
}
"""Specified by transformers.js 4.3.2, ``DEFAULT_DTYPE_SUFFIX_MAPPING``: dtype → end of the file name. Chosen: a dtype
with ``f16`` has the weights of the dtype without, and computes in float16."""
