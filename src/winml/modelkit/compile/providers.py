"""Which execution providers compile a file, and which of them is chosen?

What a provider makes is written by ``context_engine``, or for the CPU provider by ``runtime``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort

from winml.modelkit.errors import UsageError
from winml.modelkit.runtime.devices import ChosenProvider, choose_provider
from winml.modelkit.runtime.execution_providers import Device, refuse_uncompilable

__all__ = ["choose_compiler", "unreadable_reason"]


def choose_compiler(ep: str | None, device: Device | None, options: Mapping[str, str]) -> ChosenProvider:
    """Return the provider that compiles.

    Args:
        ep: Name of the provider, short or ONNX Runtime's.
        device: Kind of processor; None: the default of the provider.
        options: Options of the provider.

    Raises:
        UsageError: none is named, or it is unknown, not installed, or does not write what it compiles.
        StageError: it is a plug-in that the installed ONNX Runtime does not load.
    """
    if ep is None:
        raise UsageError(
            "no execution provider is named to compile for",
            hint="Give one with --ep; winml compile --list shows which there are.",
        )
    refuse_uncompilable(ep)
    chosen = choose_provider(ep, device, options)
    if chosen.provider.compiles and not hasattr(ort, "ModelCompiler"):
        raise UsageError(
            f"--ep {ep}: ONNX Runtime {ort.__version__} cannot write what a provider compiled",
            hint="Update it: ModelCompiler came with version 1.23.",
        )
    return chosen


def unreadable_reason(chosen: ChosenProvider) -> str:
    """Return why the provider cannot open what it compiled, where that shows in its package; else an empty string."""
    if chosen.provider.name != "OpenVINOExecutionProvider" or chosen.device != "cpu":
        return ""
    libraries = [path.name for path in (Path(ort.__file__).parent / "capi").glob("*openvino*")]
    if not libraries or any("ir_frontend" in name for name in libraries):
        return ""
    return (
        "the installed onnxruntime-openvino lacks OpenVINO's IR frontend (openvino_ir_frontend), with which its "
        "CPU device reads a compiled part; the plug-in onnxruntime-ep-openvino, beside onnxruntime, has it"
    )
