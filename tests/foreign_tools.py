"""External tools that read an ONNX file and write a changed file, run without modification."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

from winml.modelkit import optimize_onnx
from winml.modelkit.transform.retag import carry_between, write_transfer

Tool = Callable[[Path, Path], None]
"""Reads the first file and writes the second."""


def ort_level(level: str) -> Tool:
    """Return the offline optimizer of ONNX Runtime at a level."""

    def run(source: Path, target: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
        options.optimized_model_filepath = str(target)
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])

    return run


def ort_transformers(level: int) -> Tool:
    """Return ONNX Runtime's optimizer for transformer models."""

    def run(source: Path, target: Path) -> None:
        from onnxruntime.transformers.optimizer import optimize_model

        model = optimize_model(str(source), model_type="bert", opt_level=level, use_gpu=False)
        model.save_model_to_file(str(target))

    return run


def onnxslim(source: Path, target: Path) -> None:
    """Simplify with OnnxSlim."""
    onnx.save(importlib.import_module("onnxslim").slim(str(source)), target)


def onnxsim(source: Path, target: Path) -> None:
    """Simplify with onnxsim."""
    onnx.save(importlib.import_module("onnxsim").simplify(str(source))[0], target)


def float16(source: Path, target: Path) -> None:
    """Convert to half precision; inputs and outputs stay float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def dynamic_quantization(source: Path, target: Path) -> None:
    """Quantize weights to 8 bits."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(source), str(target))


def opset_21(source: Path, target: Path) -> None:
    """Convert to a later opset."""
    from onnx import version_converter

    onnx.save(version_converter.convert_version(onnx.load(source), 21), target)


def onnxscript_fusions(source: Path, target: Path) -> None:
    """Fuse for ONNX Runtime with onnxscript's rules."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    result: Any = optimize_for_ort(ir.load(source))
    ir.save(result[0] if isinstance(result, tuple) else result, target)


def onnxscript_optimizer(source: Path, target: Path) -> None:
    """Simplify with onnxscript."""
    from onnxscript import optimizer

    model = ir.load(source)
    optimizer.optimize(model)
    ir.save(model, target)


def retagged(tool: Tool) -> Tool:
    """Return the tool followed by a transfer of the tags to its output file."""

    def run(source: Path, target: Path) -> None:
        made = target.with_suffix(".made.onnx")
        tool(source, made)
        write_transfer(carry_between(source, made, target, overwrite=True), overwrite=True)

    return run


def optimized(**options: Any) -> Callable[[Path, Path], object]:
    """Return our optimizer with options."""
    return lambda source, target: optimize_onnx(source, target, overwrite=True, verify=False, **options)
