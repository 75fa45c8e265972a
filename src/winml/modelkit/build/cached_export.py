"""Where is the ONNX file of this model? In the cache: exported the first time, found there the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from winml.modelkit.build.build_flow import BuildListener
from winml.modelkit.build.build_model import build_in_cache
from winml.modelkit.build.build_plan import plan_build
from winml.modelkit.build.build_stages import STAGES
from winml.modelkit.build.config import WinMLBuildConfig
from winml.modelkit.build.steps import StepEvent
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.load.source import ModelRequest

__all__ = ["exported_model"]


def exported_model(
    request: ModelRequest,
    config: WinMLExportConfig,
    on_step: Callable[[StepEvent], None] | None = None,
) -> Path:
    """Return the ONNX file of a model, exporting it where the cache does not hold it.

    It is found again by the content of the model's files, by everything the request and the config say, and by the
    versions of this tool and the libraries. What a user's factory returns is exported each time.

    Args:
        request: The model.
        config: How it is exported.
        on_step: Called when a step of an export starts and when it ends.

    Raises:
        UsageError: the request is wrong.
        InputError: files, the Hub, or the user's code did not deliver.
        ExportError: the model cannot be exported.
        VerificationError: ONNX Runtime and PyTorch disagree.
        WriteError: the cache cannot be written to.
    """
    stages = tuple(stage for stage in STAGES if stage.makes_graph)
    whole = WinMLBuildConfig(export=config, optim=None, quant=None, compile=None)
    result = build_in_cache(plan_build(whole, request), stages=stages, listener=BuildListener(on_step=on_step))
    return result.folder / stages[-1].file
