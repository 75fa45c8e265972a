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
    from winml.modelkit.builds.package_records import PackageResult
    from winml.modelkit.builds.package_verb import build_package
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
    from winml.modelkit.generate.sentence_embedding import load_sentence_transformer
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
    from winml.modelkit.view.verb import view_model

__all__ = [
    "BuildResult", "CheckpointError", "CompareOptions", "ConfigError", "ExportError", "ExportResult", "HTPExporter",
    "InputError", "InputTensorSpec", "OutputTensorSpec", "PackageResult", "StageError", "TuneOptions", "TuneResult",
    "UsageError", "VerificationError", "WinMLAutoModel", "WinMLBuildConfig", "WinMLError", "WinMLExportConfig",
    "__version__", "build_hf_model", "build_model", "build_onnx_model", "build_package", "check_optimization",
    "compare_models", "compile_model", "compile_onnx", "diff_models", "evaluate_model", "export_model",
    "export_pytorch", "extract_modules", "inspect_model", "load_pipeline", "load_sentence_transformer",
    "optimize_model", "optimize_onnx", "profile_model", "quantization_sensitivity", "quantize_model", "quantize_onnx",
    "refit_model", "retag_model", "run_model", "run_optimize_analyze_loop", "sweep_models", "tune_model",
    "verify_model", "view_model",
]  # fmt: skip

_INFERENCE_PREFIX = "WinMLModelFor"
_FORMER = frozenset({
    "build_hf_model", "build_onnx_model", "compile_onnx", "export_pytorch", "optimize_onnx", "quantize_onnx",
})  # fmt: skip
"""Former names, which stay importable; ``dir`` does not list them."""

_NAMES = {
    "builds.build_model": "build_hf_model build_onnx_model",
    "builds.compared_models": "compare_models",
    "builds.config": "WinMLBuildConfig",
    "builds.evaluated_models": "evaluate_model",
    "builds.manifest_records": "BuildResult",
    "builds.package_verb": "build_package",
    "builds.package_records": "PackageResult",
    "builds.proofs": "verify_model",
    "builds.refit_verb": "refit_model",
    "builds.verb": "build_model",
    "compare.comparing": "CompareOptions",
    "compare.diff": "diff_models",
    "compile.verb": "compile_model compile_onnx",
    "errors": "CheckpointError ConfigError ExportError InputError StageError UsageError VerificationError WinMLError",
    "export.config": "WinMLExportConfig",
    "export.exporting": "HTPExporter export_pytorch",
    "export.records": "ExportResult",
    "export.verb": "export_model",
    "extract.verb": "extract_modules",
    "generate.auto_model": "WinMLAutoModel",
    "generate.diffusion": "load_pipeline",
    "generate.run_verb": "run_model",
    "generate.sentence_embedding": "load_sentence_transformer",
    "inspect.verb": "inspect_model",
    "onnx.specs": "InputTensorSpec OutputTensorSpec",
    "optimize.file_optimization": "check_optimization run_optimize_analyze_loop",
    "optimize.verb": "optimize_model optimize_onnx",
    "profile.verb": "profile_model",
    "quantize.sensitivity": "quantization_sensitivity",
    "quantize.verb": "quantize_model quantize_onnx",
    "sweep.sweep": "sweep_models",
    "transform.retag_verb": "retag_model",
    "tune.options": "TuneOptions",
    "tune.records": "TuneResult",
    "tune.tuning": "tune_model",
    "view.verb": "view_model",
}
"""Module → its public names."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


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
