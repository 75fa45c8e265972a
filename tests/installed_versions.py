"""Marks of tests that need versions above the oldest supported ones."""

from __future__ import annotations

import importlib.util

import pytest
import torch.fx
import transformers
from packaging.version import Version

from winml.modelkit.ort.graph_sessions import newest_opset
from winml.modelkit.ort.kernel_memory import RECORDING_VERSION
from winml.modelkit.ort.sessions import is_onnxruntime_at_least

TWO_BITS = pytest.mark.skipif(not is_onnxruntime_at_least("1.24"), reason="ONNX Runtime before 1.24 has no 2 bits")
EXPERTS = pytest.mark.skipif(
    not is_onnxruntime_at_least("1.24"), reason="ONNX Runtime before 1.24 has no kernel for experts in float32"
)
QUANTIZED_CACHE = pytest.mark.skipif(
    not is_onnxruntime_at_least("1.31"), reason="ONNX Runtime before 1.31 has no KV cache in 8 bits"
)
OPSET_24 = pytest.mark.skipif(newest_opset() < 24, reason="the installed ONNX Runtime does not open opset 24")
STACK_TRACE_SETTING = pytest.mark.skipif(
    not hasattr(torch.fx.config, "do_not_emit_stack_traces"), reason="torch before 2.11 always keeps lines of Python"
)
PICTURES_WITHOUT_TORCHVISION = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23") and importlib.util.find_spec("torchvision") is None,
    reason="transformers before 5.23 prepares the pictures of Segformer with torchvision alone",
)
KERNEL_MEMORY = pytest.mark.skipif(
    not is_onnxruntime_at_least(RECORDING_VERSION), reason="this ONNX Runtime does not record the memory of kernels"
)
