"""Public names of winml.

Every supported name is in ``__all__`` and is imported on first use, so that importing this package is fast and
imports neither torch nor transformers. All other names may move without notice.
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
    from winml.modelkit.builds.manifest_records import BuildResult
    from winml.modelkit.builds.proofs import verify_model
    from winml.modelkit.builds.refit_verb import refit_model
    from winml.modelkit.builds.verb import build_model
    from winml.modelkit.compare.comparing import CompareOptions
    from winml.modelkit.compare.diff import diff_models
    from winml.modelkit.compile.verb import compile_model, compile_onnx
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
    from winml.modelkit.export.exporting import HTPExporter, export_pytorch
    from winml.modelkit.export.records import ExportResult
    from winml.modelkit.export.verb import export_model
    from winml.modelkit.extract.verb import extract_modules
    from winml.modelkit.generate.auto_model import WinMLAutoModel
    from winml.modelkit.generate.diffusion import load_pipeline
    from winml.modelkit.generate.run_verb import run_model
    from winml.modelkit.inspect.verb import inspect_model
    from winml.modelkit.onnx.specs import InputTensorSpec, OutputTensorSpec
    from winml.modelkit.optimize.file_optimization import check_optimization, run_optimize_analyze_loop
    from winml.modelkit.optimize.verb import optimize_model, optimize_onnx
    from winml.modelkit.profile.verb import profile_model
    from winml.modelkit.quantize.sensitivity import quantization_sensitivity
    from winml.modelkit.quantize.verb import quantize_model, quantize_onnx
    from winml.modelkit.sweep.sweep import sweep_models
    from winml.modelkit.transform.retag_verb import retag_model
    from winml.modelkit.tune.options import TuneOptions
    from winml.modelkit.tune.records import TuneResult
    from winml.modelkit.tune.tuning import tune_model

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
    "build_model",
    "build_onnx_model",
    "check_optimization",
    "compare_models",
    "compile_model",
    "compile_onnx",
    "diff_models",
    "evaluate_model",
    "export_model",
    "export_pytorch",
    "extract_modules",
    "inspect_model",
    "load_pipeline",
    "optimize_model",
    "optimize_onnx",
    "profile_model",
    "quantization_sensitivity",
    "quantize_model",
    "quantize_onnx",
    "refit_model",
    "retag_model",
    "run_model",
    "run_optimize_analyze_loop",
    "sweep_models",
    "tune_model",
    "verify_model",
]

_INFERENCE_PREFIX = "WinMLModelFor"
_FORMER = frozenset({
    "build_hf_model", "build_onnx_model", "compile_onnx", "export_pytorch", "optimize_onnx", "quantize_onnx",
})  # fmt: skip
"""Former names, which stay importable; ``dir`` does not list them."""

_HOMES = {
    "BuildResult": "builds.manifest_records",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "ExportError": "errors",
    "ExportResult": "export.records",
    "HTPExporter": "export.exporting",
    "InputError": "errors",
    "InputTensorSpec": "onnx.specs",
    "OutputTensorSpec": "onnx.specs",
    "StageError": "errors",
    "UsageError": "errors",
    "VerificationError": "errors",
    "WinMLAutoModel": "generate.auto_model",
    "WinMLBuildConfig": "builds.config",
    "WinMLError": "errors",
    "WinMLExportConfig": "export.config",
    "build_hf_model": "builds.build_model",
    "build_onnx_model": "builds.build_model",
    "evaluate_model": "builds.evaluated_models",
    "export_pytorch": "export.exporting",
    "CompareOptions": "compare.comparing",
    "check_optimization": "optimize.file_optimization",
    "compare_models": "builds.compared_models",
    "compile_onnx": "compile.verb",
    "diff_models": "compare.diff",
    "optimize_onnx": "optimize.verb",
    "quantization_sensitivity": "quantize.sensitivity",
    "quantize_onnx": "quantize.verb",
    "run_optimize_analyze_loop": "optimize.file_optimization",
    "sweep_models": "sweep.sweep",
    "TuneOptions": "tune.options",
    "TuneResult": "tune.records",
    "tune_model": "tune.tuning",
    "build_model": "builds.verb",
    "refit_model": "builds.refit_verb",
    "export_model": "export.verb",
    "quantize_model": "quantize.verb",
    "optimize_model": "optimize.verb",
    "compile_model": "compile.verb",
    "profile_model": "profile.verb",
    "inspect_model": "inspect.verb",
    "load_pipeline": "generate.diffusion",
    "run_model": "generate.run_verb",
    "extract_modules": "extract.verb",
    "retag_model": "transform.retag_verb",
    "verify_model": "builds.proofs",
}


def __getattr__(name: str) -> object:
    try:
        if name.startswith(_INFERENCE_PREFIX):
            # The names come from the table of tasks, and are not repeated in _HOMES.
            classes = importlib.import_module(f"{__name__}.generate.auto_model").INFERENCE_CLASSES
            if name in classes:
                return classes[name]
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; available: {', '.join(__all__)}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        from winml.modelkit.errors import missing_library

        if (missing := missing_library(error)) is None:
            raise
        raise ImportError(f"{name}: {missing.message}. {missing.hint}", name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from winml.modelkit.models.checkpoints.task import inference_classes

    return sorted({*__all__, *inference_classes()} - _FORMER)
