"""Refusal of opsets that the installed ONNX Runtime does not support. Imports nothing heavy."""

from __future__ import annotations

from winml.modelkit.errors import UsageError

_ALWAYS_SUPPORTED = 23
"""Specified: the newest opset of the oldest ONNX Runtime that winml supports, 1.23."""


def refuse_unsupported_opset(opset: int | None) -> int | None:
    """Return an opset that is supported; `None` without an opset.

    Raises:
        UsageError: the installed onnx or ONNX Runtime does not support the opset; names the newest supported opset.
    """
    if opset is not None and opset > _ALWAYS_SUPPORTED:
        import onnx
        import onnxruntime

        from winml.modelkit.ort.graph_sessions import newest_opset

        if opset > newest_opset():
            raise UsageError(
                f"opset {opset}: onnx {onnx.__version__} and ONNX Runtime {onnxruntime.__version__} do not "
                "support this opset",
                hint=f"Use opset {newest_opset()} or older.",
            )
    return opset
