"""What may a caller use?

Everything a caller may rely on is in ``__all__`` and is fetched on first use, so that importing this package costs
nothing and brings in neither torch nor transformers. Anything imported from deeper down may move without notice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from winml.modelkit.version import __version__

if TYPE_CHECKING:
    from winml.modelkit.builds.build_model import build_hf_model, build_onnx_model
    from winml.modelkit.builds.compared_models import compare_models
    from winml.modelkit.builds.config import WinMLBuildConfig
    from winml.modelkit.builds.evaluated_models import evaluate_model
    from winml.modelkit.errors import (
        CheckpointError,
        ConfigError,
        ExportError,
        InputError,
        StageError,
        UsageError,
        VerificationError,
        WinMLError,
    )
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.flows.compare.compare import CompareOptions
    from winml.modelkit.flows.diff import diff_models
    from winml.modelkit.flows.export.export import HTPExporter, export_pytorch
    from winml.modelkit.flows.optimize import check_optimization, run_optimize_analyze_loop
    from winml.modelkit.flows.quantize.sensitivity import quantization_sensitivity
    from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
    from winml.modelkit.inference.auto_model import WinMLAutoModel
    from winml.modelkit.results.build_manifest import BuildResult
    from winml.modelkit.results.export_result import ExportResult
    from winml.modelkit.results.tuning import TuneResult
    from winml.modelkit.sweep.sweep import sweep_models
    from winml.modelkit.tune.options import TuneOptions
    from winml.modelkit.tune.tuning import tune_model
    from winml.modelkit.verbs.compile import compile_onnx
    from winml.modelkit.verbs.optimize import optimize_onnx
    from winml.modelkit.verbs.quantize import quantize_onnx

__all__ = [
    "BuildResult",
    "CheckpointError",
    "CompareOptions",
    "ConfigError",
    "ExportError",
    "ExportResult",
    "HTPExporter",
    "InputError",
    "InputTensorSpec",
    "OutputTensorSpec",
    "StageError",
    "TuneOptions",
    "TuneResult",
    "UsageError",
    "VerificationError",
    "WinMLAutoModel",
    "WinMLBuildConfig",
    "WinMLError",
    "WinMLExportConfig",
    "__version__",
    "build_hf_model",
    "build_onnx_model",
    "check_optimization",
    "compare_models",
    "compile_onnx",
    "diff_models",
    "evaluate_model",
    "export_pytorch",
    "optimize_onnx",
    "quantization_sensitivity",
    "quantize_onnx",
    "run_optimize_analyze_loop",
    "sweep_models",
    "tune_model",
]

_INFERENCE_PREFIX = "WinMLModelFor"

_HOMES = {
    "BuildResult": "results.build_manifest",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "ExportError": "errors",
    "ExportResult": "results.export_result",
    "HTPExporter": "flows.export.export",
    "InputError": "errors",
    "InputTensorSpec": "graph.specs",
    "OutputTensorSpec": "graph.specs",
    "StageError": "errors",
    "UsageError": "errors",
    "VerificationError": "errors",
    "WinMLAutoModel": "inference.auto_model",
    "WinMLBuildConfig": "builds.config",
    "WinMLError": "errors",
    "WinMLExportConfig": "export.config",
    "build_hf_model": "builds.build_model",
    "build_onnx_model": "builds.build_model",
    "evaluate_model": "builds.evaluated_models",
    "export_pytorch": "flows.export.export",
    "CompareOptions": "flows.compare.compare",
    "check_optimization": "flows.optimize",
    "compare_models": "builds.compared_models",
    "compile_onnx": "verbs.compile",
    "diff_models": "flows.diff",
    "optimize_onnx": "verbs.optimize",
    "quantization_sensitivity": "flows.quantize.sensitivity",
    "quantize_onnx": "verbs.quantize",
    "run_optimize_analyze_loop": "flows.optimize",
    "sweep_models": "sweep.sweep",
    "TuneOptions": "tune.options",
    "TuneResult": "results.tuning",
    "tune_model": "tune.tuning",
}


def __getattr__(name: str) -> object:
    if name.startswith(_INFERENCE_PREFIX):
        # One for each entry of the task table, which stands in one place.
        classes = importlib.import_module(f"{__name__}.inference.auto_model").INFERENCE_CLASSES
        if name in classes:
            return classes[name]
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; available: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
