"""Which execution providers are there, and which of them take dimensions that are left open?

Data only: whether one is installed is found out by opening a session (``sessions.py``). Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from winml.modelkit.errors import UsageError
from winml.modelkit.options import nearest

__all__ = ["EXECUTION_PROVIDERS", "ExecutionProvider", "find_execution_provider", "refuse_dynamic"]


@dataclass(frozen=True)
class ExecutionProvider:
    """One backend of ONNX Runtime."""

    name: str
    """As ONNX Runtime calls it."""
    takes_dynamic: bool = True
    """Whether it runs, or compiles, graphs with dimensions left open; specified by its documentation."""


EXECUTION_PROVIDERS: Mapping[str, ExecutionProvider] = {
    "cpu": ExecutionProvider("CPUExecutionProvider"),
    "cuda": ExecutionProvider("CUDAExecutionProvider"),
    "tensorrt": ExecutionProvider("TensorrtExecutionProvider"),
    "nvtensorrtrtx": ExecutionProvider("NvTensorRTRTXExecutionProvider"),
    "dml": ExecutionProvider("DmlExecutionProvider"),
    "openvino": ExecutionProvider("OpenVINOExecutionProvider"),
    "migraphx": ExecutionProvider("MIGraphXExecutionProvider"),
    "coreml": ExecutionProvider("CoreMLExecutionProvider"),
    "webgpu": ExecutionProvider("WebGpuExecutionProvider"),
    "xnnpack": ExecutionProvider("XnnpackExecutionProvider"),
    # These compile a graph for a processor whose memory is planned beforehand.
    "qnn": ExecutionProvider("QNNExecutionProvider", takes_dynamic=False),
    "vitisai": ExecutionProvider("VitisAIExecutionProvider", takes_dynamic=False),
    "nnapi": ExecutionProvider("NnapiExecutionProvider", takes_dynamic=False),
}
"""Short name → provider."""


def find_execution_provider(name: str) -> ExecutionProvider:
    """Return the provider of a short name (``qnn``) or of ONNX Runtime's (``QNNExecutionProvider``); case is ignored.

    Raises:
        UsageError: there is none of this name; names the nearest.
    """
    short = name.lower().removesuffix("executionprovider")
    if short in EXECUTION_PROVIDERS:
        return EXECUTION_PROVIDERS[short]
    guess = nearest(short, EXECUTION_PROVIDERS)
    hint = f"Did you mean {guess!r}?" if guess else f"Known: {', '.join(EXECUTION_PROVIDERS)}."
    raise UsageError(f"--ep {name}: no such execution provider", hint=hint)


def refuse_dynamic(ep: str | None, *, is_dynamic: bool, allow_dynamic: bool) -> None:
    """Refuse dimensions left open where the provider needs fixed sizes.

    Args:
        ep: Name of the provider; None: any.
        is_dynamic: Whether some dimension is left open.
        allow_dynamic: Let it through all the same.

    Raises:
        UsageError: the provider is unknown, or needs fixed sizes.
    """
    if ep is None:
        return
    provider = find_execution_provider(ep)
    if is_dynamic and not provider.takes_dynamic and not allow_dynamic:
        raise UsageError(
            f"--ep {ep}: {provider.name} needs fixed sizes, and dimensions are to be left open",
            hint="Leave the dynamic options out, or add --allow-dynamic and fix the sizes later.",
        )
